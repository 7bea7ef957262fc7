"""Environments that ship with the system (docs/environments.md)."""
