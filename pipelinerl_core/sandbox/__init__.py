"""Isolation of processes that get a model's text, and the loading of a user's code."""
