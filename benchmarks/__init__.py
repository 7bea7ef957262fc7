"""Benchmarks of the project, each a ratio against a bare library, a peer or a limit of the machine: `make bench`."""
