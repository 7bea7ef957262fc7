"""The registry of metrics, and the exporters to MLflow, Prometheus, traces and logs."""
