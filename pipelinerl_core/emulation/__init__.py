"""Accelerators that are not there, as waits around real work; and what a report says about them."""
