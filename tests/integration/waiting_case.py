"""Packs of the DeepSpeed learner under a watch for whatever waits for the device, in a process of its own.

    python -m tests.integration.waiting_case

Ends with 1 and the operation that waits, where there is one (tests/unit/training/test_no_waiting.py).
"""

import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist

from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.training.attention import PACKED_ATTENTION
from pipelinerl_core.training.deepspeed_learner import DeepSpeedLearner
from pipelinerl_core.training.ranks import Ranks
from pipelinerl_core.training.step_sums import StepSums
from tests.models import tiny_model
from tests.unit.training.no_waiting_case import NoWaiting, packs_of


def run(stage, dtype):
    config = build_config(
        {
            "loss": {"advantage": "value", "kl_coefficient": 0.1},
            "trainer": {"pack_tokens": 64},
            "schedule": {"max_lag": 2},
            "model": {"dtype": dtype},
            "learner": {"kind": "deepspeed", "zero_stage": stage},
        }
    )
    models = [tiny_model(seed=seed).to(getattr(torch, dtype)) for seed in (0, 1)]
    for model in models:
        model.set_attn_implementation(PACKED_ATTENTION)
    learner = DeepSpeedLearner(
        models[0], config, batcher=PackBatcher(64), ranks=Ranks(), reference=models[1].requires_grad_(False)
    )
    learner.version = 4
    # In its first step stage 3 learns in which order layers are used, and asks all ranks whether they found the same.
    step(learner, packs_of(config), nullcontext)
    step(learner, packs_of(config), NoWaiting)


def step(learner, packs, watch):
    sums = StepSums(4, 64)
    for index, pack in enumerate(packs):
        learner._engine.set_gradient_accumulation_boundary(index == len(packs) - 1)
        with watch() as mode:
            loss, _ = learner._forward(pack, sums)
            learner._engine.backward(loss, scale_wrt_gas=False)
        assert mode is None or len(mode.seen) > 300  # forward and backward
    learner._apply(1e-4)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=0, world_size=1)
        for stage, dtype in ((2, "bfloat16"), (3, "float32")):
            run(stage, dtype)
        dist.destroy_process_group()
