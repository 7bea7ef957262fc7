"""Steps of a learner on several ranks, in a process of its own: a process group is for life.

    python -m tests.integration.rank_cases RANKS CASES.json OUT

CASES.json: [{"name": ..., "overrides": [...], "steps": [...], "load": name or null}]. For each case a learner is
built, perhaps given the state that an earlier case ended with, perhaps in another process, and takes the steps.
OUT/<name>/ has its checkpoint; OUT/<name>.safetensors the state in it and, as "published.<name>", the learner's
weights; OUT/stats.json what each step said. A negative step must be
refused: an odd step has an advantage that is not a number, an even step a log-probability, of a token that is not
trained.
"""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.errors import StoreError, TrainingDiverged
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.trainer.learners import Spread, open_learners
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import MANIFEST_FILE, CheckpointManifest, checkpoint_prefix, complete_checkpoints
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.weights.checkpoint import load_checkpoint, save_checkpoint
from tests.models import published_by, read_checkpoint
from tests.unit.training.learner_case import groups

EPOCH = 3


def rows_of(config, step):
    return assemble_rows(1, groups(5, 4, seed=step, longest=11), config).rows


def step_of(learner, config, step):
    rows = rows_of(config, abs(step))
    if step > 0:
        return learner.step(rows)
    if step % 2:  # only one rank has the row
        rows[1] = replace(rows[1], advantage=math.nan)
    else:  # the gradient is finite; only the longest of the other rows is trained, and the last pack has short ones
        rows[1].rollout.rollout_logprobs[0] = math.nan
        longest = max((row for row in rows if row is not rows[1]), key=lambda row: len(row.loss_mask))
        rows = [row if row is longest else replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in rows]
    try:
        learner.step(rows)
    except TrainingDiverged as error:
        return str(error)
    raise AssertionError("the step was not refused")


def checkpoint_of(out, name):
    """Store, step and epoch of the checkpoint of a case."""
    store = open_store(str(out / name))
    (reference,) = complete_checkpoints(store.list("checkpoints"))
    return store, reference.step, reference.epoch


def manifest_of(out, name):
    """Store and key of the manifest of a case."""
    store, step, epoch = checkpoint_of(out, name)
    return store, f"{checkpoint_prefix(step, epoch)}/{MANIFEST_FILE}"


def load(learner, store, step, epoch):
    """Load a checkpoint whose second file is damaged, then the intact one."""

    def damaged():
        yield next(load_checkpoint(store, step, epoch)[0])
        raise StoreError("the next file is damaged")

    with pytest.raises(StoreError, match="the next file is damaged"):
        learner.load_state(damaged(), {"version": 77})
    learner.load_state(*load_checkpoint(store, step, epoch))


def check_adoption(learner, tensors, out):
    """A learner that takes other weights has these; masters that round to the given weights, and moments, stay."""
    given = published_by(learner)
    name = next(name for name in given if f"weights.{name}" in tensors)
    given[name].view(-1)[::2] += 0.25
    learner.adopt_weights({key: tensor} for key, tensor in given.items() if f"weights.{key}" in tensors)
    published = published_by(learner)
    assert all(torch.equal(published[key], tensor) for key, tensor in given.items())
    save_checkpoint(open_store(str(out)), learner.version, EPOCH, learner.state())
    adopted, _ = read_checkpoint(open_store(str(out)), learner.version, EPOCH)
    shutil.rmtree(out / "checkpoints")
    changed = [key for key, tensor in adopted.items() if not torch.equal(tensor, tensors[key])]
    assert changed == [f"weights.{name}"]
    assert torch.equal(adopted[changed[0]].view(-1)[1::2], tensors[changed[0]].view(-1)[1::2])


def run_case(learners, case, out):
    config = load_config("quickstart", case["overrides"])
    learner = learners.build(config)
    if case.get("load"):
        load(learner, *checkpoint_of(out, case["load"]))
    stats = [step_of(learner, config, step) for step in case["steps"]]
    scored = learner.logprobs_of([row.rollout for row in rows_of(config, 1)])
    save_checkpoint(open_store(str(out)), learner.version, EPOCH, learner.state())
    (out / "checkpoints").rename((out / case["name"]).mkdir() or out / case["name"] / "checkpoints")
    tensors, values = read_checkpoint(*checkpoint_of(out, case["name"]))
    files = [entry.name for entry in read_record(*manifest_of(out, case["name"]), CheckpointManifest).files]
    published = {f"published.{name}": tensor for name, tensor in published_by(learner).items()}
    if not config.learner.lora_rank:
        check_adoption(learner, tensors, out)
    told = {"steps": stats, "values": values, "files": files, "scored": float(np.concatenate(scored).sum())}
    return tensors | published, told


def main(ranks, cases, out):
    told = {}
    with open_learners(str(out), ranks, Spread(nodes=1, store=open_store(str(out)), epoch=EPOCH)) as learners:
        for case in cases:
            tensors, told[case["name"]] = run_case(learners, case, out)
            save_file(tensors, out / f"{case['name']}.safetensors")
    (out / "stats.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
