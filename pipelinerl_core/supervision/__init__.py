"""Roles as child processes: start, watch, restart, stop; the logs and temporary directories."""
