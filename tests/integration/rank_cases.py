"""Steps of a learner on several ranks, in a process of its own: a process group is for life.

    python -m tests.integration.rank_cases RANKS CASES.json OUT

CASES.json: [{"name": ..., "overrides": [...], "steps": [...], "load": name or null}]. For each case a learner is
built, perhaps given the state that an earlier case ended with, and takes the steps. OUT/<name>.safetensors has its
state and, as "published.<name>", its weights; OUT/stats.json what each step said. A negative step must be
refused: an odd step has an advantage that is not a number, an even step a log-probability, of a token that is not
trained.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.errors import TrainingDiverged
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.trainer.learners import open_learners
from tests.models import published_by, state_of
from tests.unit.training.learner_case import groups


def rows_of(config, step):
    return assemble_rows(1, groups(5, 4, seed=step, longest=11), config).rows


def step_of(learner, config, step):
    rows = rows_of(config, abs(step))
    if step > 0:
        return learner.step(rows)
    if step % 2:  # only one rank has the row
        rows[1] = replace(rows[1], advantage=math.nan)
    else:  # the gradient is finite
        rows[1].rollout.rollout_logprobs[0] = math.nan
        rows[1] = replace(rows[1], loss_mask=np.zeros_like(rows[1].loss_mask))
    try:
        learner.step(rows)
    except TrainingDiverged as error:
        return str(error)
    raise AssertionError("the step was not refused")


def saved(out, name):
    """State that an earlier process ended with, on another number of ranks perhaps."""
    tensors = load_file(out / f"{name}.safetensors")
    values = json.loads((out / "stats.json").read_text())[name]["values"]
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("published.")}, values


def run_case(learners, case, states, out):
    config = load_config("quickstart", case["overrides"])
    learner = learners.build(config)
    if case.get("load"):
        learner.load_state(*(states.get(case["load"]) or saved(out, case["load"])))
    stats = [step_of(learner, config, step) for step in case["steps"]]
    scored = learner.logprobs_of([row.rollout for row in rows_of(config, 1)])
    states[case["name"]] = tensors, values = state_of(learner)
    published = {f"published.{name}": tensor for name, tensor in published_by(learner).items()}
    return tensors | published, {"steps": stats, "values": values, "scored": float(np.concatenate(scored).sum())}


def main(ranks, cases, out):
    states, told = {}, {}
    with open_learners("", ranks) as learners:
        for case in cases:
            tensors, told[case["name"]] = run_case(learners, case, states, out)
            save_file(tensors, out / f"{case['name']}.safetensors")
    (out / "stats.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
