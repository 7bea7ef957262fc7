"""The Prometheus metrics of one process, and of runs from their status documents.

Run, role and name of a process are labels of its target in /targets.json (`pipelinerl serve`) and of
pipelinerl_role_info. Other labels have few values, which bounds the number of series.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from pipelinerl_core.telemetry.metrics import METRICS, RUN_LABELS, Metric
from pipelinerl_core.types import Fate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("running", "stopped", "finished", "unreadable")


class RoleMetrics:
    """The metrics of one process. Thread-safe; each call takes microseconds.

    Names are keys of METRICS. Raises KeyError for a metric that the role does not export.
    """

    def __init__(self, role: str, name: str, run_id: str) -> None:
        self._registry = _empty_registry()
        ProcessCollector(registry=self._registry)
        self._known = {
            metric.name: _build(metric, self._registry) for metric in METRICS.values() if role in metric.roles
        }
        info = self._known["role_info"].labels(run_id, role, name)
        assert isinstance(info, Gauge)
        info.set(1)

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Increase a counter; `label` is the value of the metric's label, if there is one."""
        counter = self._child(name, label)
        assert isinstance(counter, Counter)
        counter.inc(amount)

    def set(self, name: str, value: float) -> None:
        gauge = self._child(name, "")
        assert isinstance(gauge, Gauge)
        gauge.set(value)

    def ask(self, name: str, value: Callable[[], float]) -> None:
        """Let a gauge call `value` at every scrape, on the server's thread."""
        gauge = self._child(name, "")
        assert isinstance(gauge, Gauge)
        gauge.set_function(value)

    def observe(self, name: str, value: float, label: str = "") -> None:
        histogram = self._child(name, label)
        assert isinstance(histogram, Histogram)
        histogram.observe(value)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _child(self, name: str, label: str) -> Counter | Gauge | Histogram:
        parent = self._known[name]
        if not label:
            return parent
        if label not in METRICS[name].values:
            raise KeyError(f"{name}: label {label} is not declared")
        return parent.labels(label)


def runs_exposition(statuses: Iterable[Mapping[str, Any]], unreadable: Iterable[str] = ()) -> bytes:
    """The metrics of runs in the text format, from status documents (report/live_view.py), without empty values.

    `info` of a document: values of RUN_LABELS. unreadable: ids of runs that cannot be read; only their state is
    exported.
    """
    registry = _empty_registry()
    built: dict[str, Counter | Gauge] = {}
    runs = [(str(status["run_id"]), _run_values(status)) for status in statuses]
    runs += [(run, {"state": {state: state == "unreadable" for state in STATES}}) for run in unreadable]
    for run, values in runs:
        for name, value in values.items():
            samples = value if isinstance(value, dict) else {"": value}
            if not samples or None in samples.values():
                continue
            if name not in built:
                metric = _build(METRICS[name], registry)
                assert not isinstance(metric, Histogram)
                built[name] = metric
            for label, sample in samples.items():
                labels = label if isinstance(label, tuple) else (label,) * len(METRICS[name].labels)
                built[name].labels(run, *labels).inc(float(sample))
    return generate_latest(registry)


def _run_values(status: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value, or values by label or labels."""
    actors = _newest_epochs(status["actors"] if status["state"] == "running" else {})

    def of_actors(key: str) -> dict[str, int]:
        return {name: actor[key] for name, actor in actors.items()}

    def of_parts(key: str) -> dict[str, float]:
        return {name: part[key] for name, part in status["parts"].items() if part.get(key) is not None}

    hub = status["hub"]
    of_steps = {metric.name for metric in METRICS.values() if metric.group in ("trainer", "evaluator")}
    return {
        **{name: value for name, value in status["metrics"].items() if name in of_steps},
        "step": status["step"],
        "steps": status["steps"],
        "weight_version": status["newest_version"],
        "pause_seconds": status["swap_pause_seconds"],
        "tokens_per_second": status["tokens_per_second"],
        "ready_groups": status["ready"],
        "leased_groups": status["leased"],
        "state": {state: status["state"] == state for state in STATES},
        "hub_silent_seconds": None if hub is None or hub["ended"] else hub["silent_seconds"],
        "run_info": {tuple(status["info"][label] for label in RUN_LABELS): 1} if "info" in status else {},
        "actor_running": of_actors("running"),
        "actor_waiting": of_actors("waiting"),
        "actor_slots": of_actors("concurrency"),
        "actor_weight_version": of_actors("engine_version"),
        "part_reward": of_parts("reward"),
        "part_accuracy": of_parts("eval_last"),
        **{f"part_{fate}_groups_total": of_parts(f"groups_{fate}") for fate in Fate},
        "tokens": dict(status["ledger"]),
    }


def _newest_epochs(actors: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name -> entry of the newest epoch; keys of `actors` are "<name>/<epoch>"."""
    newest: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for key, entry in actors.items():
        name, _, epoch = key.partition("/")
        newest[name] = max(newest.get(name, (-1, entry)), (int(epoch or 0), entry), key=lambda known: known[0])
    return {name: entry for name, (_, entry) in newest.items()}


def _empty_registry() -> CollectorRegistry:
    disable_created_metrics()  # type: ignore[no-untyped-call]  # switches off the series with the creation time of each counter
    return CollectorRegistry(auto_describe=False)


def _build(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = [*([] if metric.group == "role" else ["run"]), *metric.labels]
    if metric.kind == "histogram":
        built: Counter | Gauge | Histogram = Histogram(
            metric.prometheus, metric.help, labels, buckets=metric.buckets, registry=registry
        )
    else:
        kind = Counter if metric.kind == "counter" else Gauge
        built = kind(metric.prometheus, metric.help, labels, registry=registry)
    for value in metric.values:  # at 0 from the start: a rate over a series that appears later misses its first value
        built.labels(value)
    return built
