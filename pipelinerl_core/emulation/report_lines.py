"""The section of a report on emulated speeds (accelerators.py): the speeds and the overrun of real work."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl_core.config.load import variants
from pipelinerl_core.run.records import Commit

# A wait of the trainer ends at most this much late.
_LATE_SECONDS = 0.002


def emulation(config: Mapping[str, Any], commits: Sequence[Commit]) -> dict[str, Any] | None:
    """The `emulation` key of report.json; None for a run at real speed. `note` is a sentence for people."""
    section = config.get("emulation", {})
    accelerators = section.get("accelerators", 0)
    if not accelerators:
        return None
    schedule: Any = variants("schedule")[config["schedule"]["kind"]]
    takes_turns: bool = schedule.takes_turns
    generators = accelerators if takes_turns else section["generators"]
    facts = {
        **section,
        "generators": generators,
        "trainers": accelerators if takes_turns else accelerators - generators,
    }
    # Times of the run are longer than emulated by these sums.
    facts["decode_overrun_seconds"] = _decode_overrun(commits)
    facts["train_overrun_seconds"] = _train_overrun(commits, facts["train_token_seconds"] / facts["trainers"])
    facts["note"] = _note(facts, takes_turns)
    return facts


def _decode_overrun(commits: Sequence[Commit]) -> float:
    """Seconds over all actors; an actor counts from the start of its epoch."""
    newest: dict[str, float] = {}
    for commit in commits:
        for key, sample in commit.actors.items():
            newest[key] = sample.counters.emulation_overrun_seconds
    return sum(newest.values())


def _train_overrun(commits: Sequence[Commit], token_seconds: float) -> float:
    beyond = (
        commit.metrics["time/compute_seconds"] - commit.metrics["train/tokens"] * token_seconds - _LATE_SECONDS
        for commit in commits
        if {"time/compute_seconds", "train/tokens"} <= commit.metrics.keys()
    )
    return sum(max(0.0, seconds) for seconds in beyond)


def _note(facts: Mapping[str, Any], takes_turns: bool) -> str:
    share = "in turn" if takes_turns else f"{facts['generators']} generate, {facts['trainers']} train"
    return (
        f"Speeds are emulated: {facts['accelerators']} accelerators ({share}), "
        f"{facts['token_seconds'] * 1e3:g} ms per sampled token, full from {facts['saturation']} sequences on, "
        f"{facts['train_token_seconds'] * 1e3:g} ms per trained token. Real work took "
        f"{facts['decode_overrun_seconds']:.1f} s longer than that in decoding and "
        f"{facts['train_overrun_seconds']:.1f} s in training."
    )
