"""Keep sequences in flight, continue partial ones, form groups."""
