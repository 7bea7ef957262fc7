"""The actor: an engine that is kept full, whose weights are swapped in the middle of sequences."""
