"""What Prometheus scrapes of a run: its status as gauges and counters, with bounded labels."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES: Mapping[str, tuple[str, str]] = {
    "pipelinerl_step": ("step", "Newest committed optimizer step."),
    "pipelinerl_steps": ("steps", "Steps of the run."),
    "pipelinerl_weight_version": ("newest_version", "Newest announced weight version."),
    "pipelinerl_reward_mean": ("reward_mean", "Mean reward of the newest step."),
    "pipelinerl_eval_accuracy": ("eval_last", "Newest held-out accuracy."),
    "pipelinerl_weight_lag_steps": ("lag_mean", "Mean lag of the tokens of the newest step."),
    "pipelinerl_ess": ("ess", "Effective sample size of the newest step, 1 is on-policy."),
    "pipelinerl_pause_seconds": ("swap_pause_seconds", "Median pause of recent weight swaps."),
    "pipelinerl_tokens_per_second": ("tokens_per_second", "Tokens sampled per second, all actors."),
    "pipelinerl_ready_groups": ("ready", "Finished groups that wait for the trainer."),
    "pipelinerl_leased_groups": ("leased", "Groups that actors work on."),
}
"""Name -> (key of the status, help)."""
ACTOR_GAUGES: Mapping[str, tuple[str, str]] = {
    "pipelinerl_actor_running": ("running", "Sequences that are decoded."),
    "pipelinerl_actor_waiting": ("waiting", "Sequences that wait for a slot."),
    "pipelinerl_actor_slots": ("concurrency", "Slots."),
    "pipelinerl_actor_weight_version": ("engine_version", "Weight version in the engine."),
}
STATES = ("running", "stopped", "finished")


class _Collector(Collector):
    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status, run = self._status, str(self._status["run_id"])
        for name, (key, text) in GAUGES.items():
            if status.get(key) is not None:
                yield _gauge(name, text, ["run"], [([run], status[key])])
        states = [([run, state], float(status["state"] == state)) for state in STATES]
        yield _gauge("pipelinerl_state", "1 for the state of the run.", ["run", "state"], states)
        if status["hub"] is not None:
            silent = [([run], status["hub"]["silent_seconds"])]
            yield _gauge("pipelinerl_hub_silent_seconds", "Since the last beat of the hub.", ["run"], silent)
        for name, (key, text) in ACTOR_GAUGES.items():
            values = [([run, actor], one[key]) for actor, one in _newest_epochs(status["actors"]).items()]
            if values:
                yield _gauge(name, text, ["run", "actor"], values)
        tokens = CounterMetricFamily("pipelinerl_tokens", "Tokens by what became of them.", labels=["run", "class"])
        for name, number in status["ledger"].items():
            tokens.add_metric([run, name], number)
        yield tokens


def _newest_epochs(actors: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name -> what is known of its newest epoch; keys are "<name>/<epoch>"."""
    found: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for key, one in actors.items():
        name, _, epoch = key.partition("/")
        found[name] = max(found.get(name, (-1, one)), (int(epoch or 0), one), key=lambda known: known[0])
    return {name: one for name, (_, one) in found.items()}


def exposition(status: Mapping[str, Any]) -> bytes:
    """The text format, of a document of `tracking.live.run_status`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    return generate_latest(registry)


def metric_names() -> set[str]:
    """Every name that `exposition` may give: what dashboards and alerts can ask for."""
    others = {"pipelinerl_state", "pipelinerl_hub_silent_seconds", "pipelinerl_tokens_total"}
    return {*GAUGES, *ACTOR_GAUGES, *others}


def described() -> list[tuple[str, str, str]]:
    """(name, labels beside `run`, meaning) of every metric, for people."""
    return [
        *((name, "", text) for name, (_, text) in GAUGES.items()),
        ("pipelinerl_state", "state", "1 for the state of the run."),
        ("pipelinerl_hub_silent_seconds", "", "Since the last beat of the hub."),
        *((name, "actor", text) for name, (_, text) in ACTOR_GAUGES.items()),
        ("pipelinerl_tokens_total", "class", "Tokens by what became of them."),
    ]


def _gauge(name: str, text: str, labels: list[str], values: Iterable[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for found, value in values:
        family.add_metric(found, float(value))
    return family
