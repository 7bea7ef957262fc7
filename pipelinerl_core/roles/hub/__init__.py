"""The hub grants leases to actors, selects the groups of each step, and announces weight versions."""
