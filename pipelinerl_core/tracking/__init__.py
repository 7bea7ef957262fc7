"""Metric declarations, MLflow, run reports."""
