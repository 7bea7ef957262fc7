"""Prefect flows, one file each, and the command line."""
