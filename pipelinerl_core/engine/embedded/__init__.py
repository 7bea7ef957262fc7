"""The embedded engine: a transformers decoder over a fixed number of slots."""
