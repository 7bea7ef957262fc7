"""What operators have changed on the Prefect server since `pipelinerl deploy`, which the next `deploy` keeps.

After `deploy`, a variable on the server has a digest of each field of each deployment and automation. A field that
differs from its digest at the next `deploy` was changed by an operator, in the UI or by a command.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from prefect.client.schemas.responses import DeploymentResponse
from prefect.variables import Variable

VARIABLE = "pipelinerl_deployed"
ABOUT_RUNS = ("schedules", "paused", "tags", "concurrency_limit")
"""Fields that `deploy` keeps if no digest tells whether an operator has changed them."""

Fields = Mapping[str, Any]


def read_digests() -> dict[str, dict[str, str]]:
    """Name of a deployment or automation -> field -> digest of what the last `deploy` has applied."""
    digests: Any = Variable.get(VARIABLE, default={})
    return dict(digests) if isinstance(digests, dict) else {}


def write_digests(digests: Mapping[str, Mapping[str, str]]) -> None:
    """Store the digests for the next `deploy`."""
    Variable.set(VARIABLE, {name: dict(fields) for name, fields in digests.items()}, overwrite=True)


def digest(value: Any) -> str:
    """Of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=6).hexdigest()


def new_digests(fields: Fields, kept: Iterable[str], earlier: Mapping[str, str]) -> dict[str, str]:
    """Digests of the fields after `deploy`; a kept field stays different from its digest, and is kept again."""
    return {name: earlier.get(name, "") if name in set(kept) else digest(value) for name, value in fields.items()}


def changed(fields: Fields, applied: Mapping[str, str]) -> list[str]:
    """The fields that differ from what `deploy` has applied."""
    return [name for name, value in fields.items() if name in applied and applied[name] != digest(value)]


def fields_of(deployment: DeploymentResponse) -> dict[str, Any]:
    """The fields of a deployment that operators change, as JSON values in the form of prefect.yaml; but `schedules`
    has the server's form."""
    limit, options = deployment.global_concurrency_limit, deployment.concurrency_options
    schedules = [
        schedule.model_dump(mode="json", include={"schedule", "active", "parameters", "slug"})
        for schedule in deployment.schedules
    ]
    return {
        "schedules": sorted(schedules, key=digest),
        "paused": deployment.paused,
        "tags": sorted(deployment.tags),
        "concurrency_limit": limit and {"limit": limit.limit, **(options.model_dump(mode="json") if options else {})},
        "parameters": deployment.parameters,
        "job_variables": deployment.job_variables or {},
    }


def keep(entry: dict[str, Any], fields: Fields, applied: Mapping[str, str] | None) -> list[str]:
    """Put what operators have changed into a deployment of prefect.yaml; returns the fields.

    applied: digests; None if this deployment was never deployed with digests.
    """
    kept = list(ABOUT_RUNS) if applied is None else changed(fields, applied)
    kept = [name for name in kept if fields[name] or name in entry]  # nothing on the server and in the file: equal
    for name in kept:
        if name == "schedules":
            entry.pop(name, None)  # without schedules in the file, the schedules on the server stay
        elif name == "job_variables":
            entry["work_pool"] = {**entry["work_pool"], name: fields[name]}
        else:
            entry[name] = fields[name]
    entry.setdefault("paused", fields["paused"])
    return kept
