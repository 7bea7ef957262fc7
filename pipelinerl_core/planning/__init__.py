"""Planning of a run before it runs: closed forms of throughput and lag, and a simulation on the real scheduler."""
