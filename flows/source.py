"""The pull step of prefect.yaml: returns the directory in which the flows are installed to a worker."""

from pathlib import Path


def installed() -> dict[str, str]:
    """{"directory": parent directory of the installed package `flows` on this host}.

    Prefect changes to this directory before Prefect loads the entrypoint of a deployment.
    """
    return {"directory": str(Path(__file__).resolve().parents[1])}
