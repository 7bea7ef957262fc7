"""whatif.json: curves of loss, KL, ESS and held-out accuracy of every arm, its limit, and the ranking."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl_core.comparison.whatif.limit import WINDOW, last_valid, limit_step
from pipelinerl_core.comparison.whatif.plan import RECORDED, PlannedArm
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import REPLAY_KEY, ReplayRecord

JSON_KEY, HTML_KEY = "whatif.json", "whatif.html"
NOT_EXACT = "the recorded objective did not come out bit for bit"
NO_VERSION = "no version was evaluated in every arm within the limits of half of the changed arms"
METRICS = {
    "loss": "train/loss",
    "kl": "importance/kl",
    "ess": "importance/ess",
    "ess_sequence": "importance/ess_sequence",
    "grad_norm": "train/grad_norm",
}


def document_of(
    run: RunContext, arms: Sequence[PlannedArm], share: float, recorded: PlannedArm | None, url: str
) -> dict[str, Any]:
    """The document of the arms that are trained. recorded: the arm of the recorded objective, trained again; None:
    the recorded run itself stands for it, which was not trained again."""
    trained = [arm for arm in arms if arm.is_trained]
    first, last = arms[0].origin.first, arms[0].origin.last
    source = recorded.store if recorded is not None and recorded.is_trained else run.store
    base = _curves(source, first, last)
    ess = dict(_pairs(_curves(run.store, first, last), "ess_sequence"))
    is_exact = None
    if recorded is not None:
        is_exact = recorded.is_trained and _record(recorded).first_difference is None
    entries = {RECORDED: {"settings": [], "url": source.url, "limit": None, **base}}
    for arm in trained:
        if arm.is_recorded:
            continue
        found = _curves(arm.store, first, last)
        limit = limit_step(dict(_pairs(found, "ess_sequence")), ess, share)
        entries[arm.name] = {
            "settings": list(arm.origin.overrides), "url": arm.store.url, "limit": limit, **found,
        }  # fmt: skip
    for arm in trained:
        record = _record(arm)
        entries[arm.name] |= {
            "cpu_seconds": record.cpu_seconds, "seconds": record.seconds,
            "first_difference": record.first_difference,
        }  # fmt: skip
    return {
        "run_id": run.run_id,
        "url": url,
        "first": first,
        "last": last,
        "ess_share": share,
        "ess_window": WINDOW,
        "exact": is_exact,
        "missing": [arm.name for arm in arms if not arm.is_trained],
        "arms": entries,
        **ranking(entries, last, is_exact),
    }


def ranking(entries: Mapping[str, Mapping[str, Any]], last: int, is_exact: bool | None) -> dict[str, Any]:
    """{ranked_version, ranking, unranked}: arms by held-out accuracy at one version, best first.

    The version is the newest that every arm has evaluated and at which at least half of the changed arms hold, that
    is, before their limits. The other arms are not ranked. Without a bit-exact recorded arm (`is_exact` False), or
    without such a version, nothing is ranked.
    """
    ends = {name: last_valid(one["limit"], last) for name, one in entries.items()}
    shared = set.intersection(*({point["version"] for point in one["accuracy"]} for one in entries.values()))
    changed = [name for name in entries if name != RECORDED]
    fit = [one for one in shared - {0} if 0 < len(changed) <= 2 * sum(ends[name] >= one for name in changed)]
    if is_exact is False or not fit:
        reason = NOT_EXACT if is_exact is False else NO_VERSION
        return {"ranked_version": None, "ranking": [], "unranked": dict.fromkeys(entries, reason)}
    version = max(fit)
    unranked = {
        name: f"its limit is step {one['limit']}, and version {version} is not before it"
        for name, one in entries.items()
        if ends[name] < version
    }
    at = {
        name: next(point for point in one["accuracy"] if point["version"] == version) for name, one in entries.items()
    }
    order = sorted((name for name in entries if name not in unranked), key=lambda name: -at[name]["accuracy"])
    return {
        "ranked_version": version,
        "ranking": [{"arm": name, **at[name]} for name in order],
        "unranked": unranked,
    }


def write_document(store: ObjectStore, document: Mapping[str, Any], page: str) -> None:
    """Write whatif.json and whatif.html."""
    store.put(JSON_KEY, json.dumps(document, indent=1, allow_nan=False).encode())
    store.put(HTML_KEY, page.encode())


def replay_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a replay of one arm: whatif.json and, for each step, its metrics beside the recorded loss."""
    (name,) = document["arms"].keys() - {RECORDED}
    arm = document["arms"][name]
    recorded = {one["step"]: one for one in document["arms"][RECORDED]["steps"]}
    steps = [{**one, "recorded_loss": recorded[one["step"]]["loss"], "verdict": "studied"} for one in arm["steps"]]
    return {"steps": steps, "all_equal": False, "overrides": arm["settings"], **document}


def _record(arm: PlannedArm) -> ReplayRecord:
    return read_record(arm.store, REPLAY_KEY, ReplayRecord)


def _curves(store: ObjectStore, first: int, last: int) -> dict[str, Any]:
    """{steps: metrics of each step, accuracy: evaluations on the run's own prompts} of a run, in order."""
    follower = RunFollower(store)
    follower.refresh()
    steps = []
    for step in range(first, last + 1):
        if step in follower.commits:
            metrics = follower.commits[step].metrics
            found = {name: metrics[key] for name, key in METRICS.items() if math.isfinite(metrics.get(key, math.nan))}
            steps.append({"step": step, **found})
    accuracy = [
        {
            "version": version, "accuracy": one.known_accuracy, "low": one.low, "high": one.high,
            "num_prompts": one.num_prompts,
        }
        for version, one in follower.evals.items()
        if one.known_accuracy is not None and one.last_version in (-1, version) and version <= last
    ]  # fmt: skip
    return {"steps": steps, "accuracy": accuracy}


def _pairs(curves: Mapping[str, Any], name: str) -> list[tuple[int, float]]:
    return [(one["step"], one[name]) for one in curves["steps"] if name in one]
