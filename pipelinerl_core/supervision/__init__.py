"""Roles as child processes: start, watch, restart, stop; their logs and temporary directories."""
