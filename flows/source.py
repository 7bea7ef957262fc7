"""Where a worker finds the flows: a pull step of prefect.yaml."""

from pathlib import Path


def installed() -> dict[str, str]:
    """The directory that the installed package `flows` lies in, whatever the worker's own is on this host.

    Prefect changes to it before it loads the entrypoint of a deployment.
    """
    return {"directory": str(Path(__file__).resolve().parents[1])}
