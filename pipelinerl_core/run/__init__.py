"""A run in the object store: its records, the commits that count, its hub, its weight versions."""
