"""What a run says of itself: the registry of metrics, and the exporters to MLflow, Prometheus, traces and logs."""
