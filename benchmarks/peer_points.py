"""Reads the points.json of a reference library's run as commits and accuracies, so that the run is an arm.

<root>/peers/<name>-s<seed>-<digest of its settings>/points.json: {name, seed, target, settings, config, points:
[{step, seconds, samples, reward, accuracy}], rewards: one per step, step_seconds: one per step}, written by
`benchmarks.peers`.
"""

import json
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from pipelinerl_core.comparison.analysis import ComparedRun
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.records import Commit

PEERS_PREFIX = "peers"
POINTS_FILE = "points.json"


def peer_key(run_id: str) -> str:
    """Key of the points of a library's run below a root."""
    return f"{PEERS_PREFIX}/{run_id}/{POINTS_FILE}"


def read_peer(root: ObjectStore, run_id: str) -> ComparedRun | None:
    """A library's run; None if the run does not exist or is not evaluated."""
    key = peer_key(run_id)
    if not root.exists(key):
        return None
    document = json.loads(root.get(key))
    if any("accuracy" not in point for point in document["points"]):
        return None
    return peer_run(document)


def peer_run(document: Mapping[str, Any]) -> ComparedRun:
    """Commits with the time and the reward of every step, as far as a comparison reads commits.

    The reference libraries alternate generation and training on-policy, so ESS, lag and idle share are undefined.
    """
    samples_per_step = document["points"][-1]["samples"] / max(1, document["points"][-1]["step"])
    seconds = [0.0, *accumulate(document["step_seconds"])]
    rewards = [None, *document["rewards"]]
    commits = {
        step: _commit(step, at, reward, step * samples_per_step)
        for step, (at, reward) in enumerate(zip(seconds, rewards, strict=True))
    }
    return ComparedRun(
        arm=document["name"],
        seed=document["seed"],
        run_id=f"{document['name']}-s{document['seed']}",
        code_version="",
        is_emulated=False,
        commits=commits,
        accuracies={point["step"]: point["accuracy"] for point in document["points"]},
        report={},
    )


def _commit(step: int, at: float, reward: float | None, samples: float) -> Commit:
    metrics = {"progress/samples": samples}
    if reward is not None:
        metrics["reward/mean"] = reward
    return Commit(
        run_id="",
        step=step,
        epoch=0,
        batches=(),
        weights_digest="",
        manifest=None,
        checkpoint=None,
        metrics=metrics,
        reserved_at=at,
        computed_at=at,
        committed_at=at,
    )
