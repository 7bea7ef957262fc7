"""Settings of Prefect that must be in the environment before Prefect is imported. Imports nothing heavy."""

import os

_DEFAULTS = {
    # No hidden second server: a client without a server is an error, not a reason to start one.
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # What supervision logs belongs to the flow run in the UI; the roles' own output stays in their log files.
    "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks,flows",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_SHOW_PROMOTIONAL_CONTENT": "false",
    # MLflow's own telemetry, imported in the same process.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def set_defaults() -> None:
    """Set what the user has not set."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
