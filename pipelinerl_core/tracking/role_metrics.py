"""What each role exports for Prometheus: one table of names, and the values of one process.

Identity (run, role, name) is in the labels of the target, which /targets.json of `pipelinerl status --web` gives, and
in pipelinerl_role_info; the samples themselves carry bounded labels only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

ALL_ROLES = ("hub", "actor", "trainer", "evaluator")
# Seconds: a swap or a write to the store takes milliseconds, a step or a wait up to minutes.
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMetric:
    """One exported metric."""

    name: str
    """As Prometheus shows it; without the _bucket, _sum and _count of a histogram."""
    kind: Literal["gauge", "counter", "histogram"]
    roles: tuple[str, ...]
    text: str
    label: str = ""
    """Name of its one label, if it has one."""
    values: tuple[str, ...] = ()
    """Every value of the label."""
    buckets: tuple[float, ...] = _SECONDS


def _gauge(name: str, roles: tuple[str, ...], text: str) -> RoleMetric:
    return RoleMetric(name=f"pipelinerl_{name}", kind="gauge", roles=roles, text=text)


def _counter(
    name: str, roles: tuple[str, ...], text: str, label: str = "", values: tuple[str, ...] = ()
) -> RoleMetric:
    return RoleMetric(name=f"pipelinerl_{name}", kind="counter", roles=roles, text=text, label=label, values=values)


def _histogram(
    name: str, roles: tuple[str, ...], text: str, label: str = "", values: tuple[str, ...] = ()
) -> RoleMetric:
    return RoleMetric(name=f"pipelinerl_{name}", kind="histogram", roles=roles, text=text, label=label, values=values)


_ACTOR, _TRAINER, _HUB = ("actor",), ("trainer",), ("hub",)
_STORE_OPERATIONS = ("put", "get", "list", "exists", "delete")

ROLE_METRICS: tuple[RoleMetric, ...] = (
    _gauge("role_healthy", ALL_ROLES, "1 while the main loop turns: what /healthz says."),
    _gauge("role_ready", ALL_ROLES, "1 while it does its work: what /readyz says."),
    _gauge("role_beat_age_seconds", ALL_ROLES, "Since the main loop turned last."),
    _gauge("role_weight_version", ALL_ROLES, "Weight version that it holds; the hub: the newest announced one."),
    _counter("role_restarts_total", ALL_ROLES, "Times that its supervisor has started it again."),
    _histogram("store_seconds", ALL_ROLES, "Requests to the object store.", "operation", _STORE_OPERATIONS),
    _counter(
        "store_errors_total", ALL_ROLES, "Requests that the object store failed.", "operation", _STORE_OPERATIONS
    ),
    _gauge("hub_channel_groups", _HUB, "Finished groups in the channel that no step has reserved."),
    _gauge("hub_row_bytes", _HUB, "Rows that the hub keeps in memory."),
    _gauge("hub_peers", _HUB, "Open exchanges: actors and the trainer."),
    _counter("actor_rollouts_total", _ACTOR, "Rollouts by outcome.", "outcome", ("scored", "error")),
    _counter(
        "actor_lost_scorings_total", _ACTOR,
        "Scorings without a result, which count as wrong answers: over their deadline, or their process died.",
        "cause", ("timeout", "died"),
    ),
    _counter("actor_tokens_total", _ACTOR, "Completion tokens of finished rollouts."),
    _counter(
        "actor_groups_total", _ACTOR, "Groups by what the hub said.", "answer", ("accepted", "stale_lease", "other")
    ),
    _gauge("actor_unsent_groups", _ACTOR, "Finished groups that wait for credit of the hub."),
    _gauge("actor_engine_running", _ACTOR, "Sequences that hold a slot."),
    _gauge("actor_engine_waiting", _ACTOR, "Sequences that wait for a slot."),
    _gauge("actor_kv_usage", _ACTOR, "Share of the KV memory in use."),
    _histogram("actor_generation_seconds", _ACTOR, "Generation of the longest rollout of a group."),
    _histogram("actor_scoring_seconds", _ACTOR, "From last token to reward, the slowest rollout of a group."),
    _histogram("actor_swap_pause_seconds", _ACTOR, "Time without sampling at a swap of weights."),
    _histogram("actor_weight_update_seconds", _ACTOR, "From hearing of a version to sampling from it."),
    _histogram("trainer_step_seconds", _TRAINER, "Forward, backward and optimizer of a step."),
    _histogram("trainer_wait_seconds", _TRAINER, "Waiting for the groups of a step."),
    _histogram("trainer_commit_seconds", _TRAINER, "From the start of publishing a step to its commit."),
    _counter("trainer_tokens_total", _TRAINER, "Completion tokens of trained rollouts."),
    RoleMetric(
        name="pipelinerl_trainer_lag_steps", kind="histogram", roles=_TRAINER, buckets=_LAGS,
        text="Lag of the oldest token of each trained rollout, in optimizer steps.",
    ),
    _gauge("trainer_reward_mean", _TRAINER, "Mean reward of the newest step."),
    _gauge("trainer_ess", _TRAINER, "Effective sample size of the newest step, 1 is on-policy."),
    _gauge("trainer_kl", _TRAINER, "Rollout minus trainer log-probability of the newest step, nats."),
    _gauge("trainer_ratio_clipped_fraction", _TRAINER, "Tokens whose importance ratio was cut in the newest step."),
    _gauge("trainer_checkpoint_age_seconds", _TRAINER, "Since the newest checkpoint was finished."),
)  # fmt: skip
"""Every metric of a role."""

INFO_METRIC = "pipelinerl_role_info"
_BY_NAME: Mapping[str, RoleMetric] = {metric.name: metric for metric in ROLE_METRICS}


class RoleMetrics:
    """The metrics of one process. Every method takes microseconds and is safe between threads.

    Names are those of ROLE_METRICS without `pipelinerl_`; a name that is not among the role's is a KeyError.
    """

    def __init__(self, role: str, name: str, run_id: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series per counter: when the process began
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        info = Gauge(INFO_METRIC, "1; which process this is.", ["run", "role", "name"], registry=self._registry)
        info.labels(run_id, role, name).set(1)
        self._known = {
            one.name: _build(one, self._registry) for one in ROLE_METRICS if role in one.roles
        }  # fmt: skip

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Count; `label` is the value of the metric's label, if it has one."""
        counter = self._child(name, label)
        assert isinstance(counter, Counter)
        counter.inc(amount)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        gauge = self._child(name, "")
        assert isinstance(gauge, Gauge)
        gauge.set(value)

    def ask(self, name: str, value: Callable[[], float]) -> None:
        """A gauge whose value is asked for at every scrape, on the server's thread."""
        gauge = self._child(name, "")
        assert isinstance(gauge, Gauge)
        gauge.set_function(value)

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Add to a histogram."""
        histogram = self._child(name, label)
        assert isinstance(histogram, Histogram)
        histogram.observe(value)

    def exposition(self) -> bytes:
        """All of it in the text format."""
        return generate_latest(self._registry)

    def _child(self, name: str, label: str) -> Counter | Gauge | Histogram:
        full = f"pipelinerl_{name}"
        parent = self._known[full]
        if not label:
            return parent
        if label not in _BY_NAME[full].values:
            raise KeyError(f"{full}: label {label} is not declared")
        return parent.labels(label)


def _build(metric: RoleMetric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = [metric.label] if metric.label else []
    if metric.kind == "histogram":
        built: Counter | Gauge | Histogram = Histogram(
            metric.name, metric.text, labels, buckets=metric.buckets, registry=registry
        )
    else:
        kind = Counter if metric.kind == "counter" else Gauge
        built = kind(metric.name, metric.text, labels, registry=registry)
    for value in metric.values:  # at 0 from the start: a rate over a series that appears later misses its first value
        built.labels(value)
    return built


def as_markdown() -> list[str]:
    """Lines of docs/metrics.md."""
    lines = ["| name | kind | roles | label | meaning |", "| --- | --- | --- | --- | --- |"]
    for one in ROLE_METRICS:
        roles = "all" if one.roles == ALL_ROLES else ", ".join(one.roles)
        label = f"{one.label}: {', '.join(one.values)}" if one.label else ""
        lines.append(f"| `{one.name}` | {one.kind} | {roles} | {label} | {one.text} |")
    return lines


def role_metric_names() -> set[str]:
    """Every name that a query may use; histograms by their three series."""
    names = {INFO_METRIC}
    for metric in ROLE_METRICS:
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {f"{metric.name}{end}" for end in ends}
    return names
