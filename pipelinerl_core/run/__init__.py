"""What a run is on disk: its records, which commits count, its hub, its weight versions."""
