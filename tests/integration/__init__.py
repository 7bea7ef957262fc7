"""Whole processes."""
