"""Prefect tasks: thin supervision of the roles."""
