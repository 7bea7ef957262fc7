"""Weight versions: manifest, publish, subscribe."""
