"""Defaults for environment variables that Prefect reads when it is imported. This module imports only `os`."""

import os

_DEFAULTS = {
    # Without a server a client must fail; it must not start a hidden second server.
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # The UI shows these log lines with the flow run, also the warnings and errors of the roles (role_problems.py).
    "PREFECT_LOGGING_EXTRA_LOGGERS": (
        "pipelinerl,pipelinerl_core.run,pipelinerl_core.supervision,pipelinerl_core.telemetry,pipelinerl_core.tools"
    ),
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_SHOW_PROMOTIONAL_CONTENT": "false",
    # MLflow is imported in the same process; this switches off the telemetry of MLflow.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


def set_defaults() -> None:
    """Set each variable that the user has not set."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
