"""Verifiers, run in child processes with hard limits."""
