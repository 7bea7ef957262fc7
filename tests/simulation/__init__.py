"""The real roles of a run on a simulated clock, network and disk; a seed chooses every interleaving and fault."""
