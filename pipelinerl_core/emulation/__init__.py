"""Emulated accelerators: waits around real work, and their section of the report."""
