"""Planning of a run before it runs: a simulation on the real scheduler."""
