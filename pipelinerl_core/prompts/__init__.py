"""Deterministic, resumable prompt sources."""
