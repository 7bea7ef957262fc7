"""Weight versions: serialize, publish and broadcast (trainer); read, merge adapters and stage (actor, evaluator)."""
