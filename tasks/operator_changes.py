"""What `pipelinerl deploy` leaves to operators once it is on the Prefect server: schedules, pause, tags, limit."""

from typing import Any

from prefect.client.schemas.responses import DeploymentResponse

_SCHEDULE_KEYS = ("cron", "interval", "rrule", "timezone", "active")


def keep(entry: dict[str, Any], existing: DeploymentResponse) -> list[str]:
    """Put the operators' fields of a deployment on the server into its entry of prefect.yaml.

    Returns the fields that differ from the entry.
    """
    limit, options = existing.global_concurrency_limit, existing.concurrency_options
    fields: dict[str, Any] = {
        "paused": existing.paused,
        "tags": existing.tags,
        "concurrency_limit": limit and {"limit": limit.limit, **(options.model_dump(mode="json") if options else {})},
    }
    on_server = [
        {**schedule.schedule.model_dump(mode="json"), "active": schedule.active} for schedule in existing.schedules
    ]
    differs = {
        "schedules": _plain(entry.get("schedules", ())) != _plain(on_server),
        "paused": bool(entry.get("paused")) != existing.paused,
        "tags": sorted(entry.get("tags", ())) != sorted(existing.tags),
        "concurrency_limit": _limit(entry.get("concurrency_limit")) != _limit(fields["concurrency_limit"]),
    }
    entry.pop("schedules", None)  # without schedules in the file, the schedules on the server stay
    entry.update(fields)
    return [name for name, is_different in differs.items() if is_different]


def _plain(schedules: Any) -> list[str]:
    defaults = {"timezone": "UTC", "active": True}
    rows = [{**defaults, **{key: value for key, value in row.items() if value is not None}} for row in schedules]
    return sorted(str([row.get(key) for key in _SCHEDULE_KEYS]) for row in rows)


def _limit(value: Any) -> tuple[int | None, str]:
    """The limit, and what happens to further flow runs; Prefect's default is to wait."""
    values = value if isinstance(value, dict) else {"limit": value}
    return values.get("limit"), str(values.get("collision_strategy") or "ENQUEUE")
