"""Weight versions: serialize, publish, broadcast, read."""
