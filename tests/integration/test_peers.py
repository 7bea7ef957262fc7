"""Peers train what we train: their gradient on their own rollouts is that of our learner on the same rollouts."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.roles.replay import build_learner
from pipelinerl_core.testing.peers import PACKAGES, sequential
from pipelinerl_core.testing.peers.record import read_points
from pipelinerl_core.testing.peers.task import open_task, peer_parser
from pipelinerl_core.types import FinishReason, Outcome, Rollout, Sampler, WeightSpan

SMALL = ["trainer.groups_per_step=8", "rollouts.max_tokens=24", "engine.concurrency=64", "learner.clip_norm=1000000"]


def open_small(out, model):
    task = open_task(peer_parser("").parse_args(["--out", str(out), "--model", str(model), "--threads", "1", *SMALL]))
    return task


def rollout_of(index, prompt_ids, completion_ids, reward, group_size):
    return Rollout(
        group_id=index // group_size,
        rollout_index=index % group_size,
        attempt=0,
        lease_id="",
        prompt_id="",
        source="sums",
        env="sums",
        actor="peer",
        group_size=group_size,
        prompt_token_ids=np.array(prompt_ids, np.int32),
        completion_token_ids=np.array(completion_ids, np.int32),
        rollout_logprobs=np.zeros(len(completion_ids), np.float32),
        weight_spans=(WeightSpan(0, 0, len(completion_ids)),),
        loss_mask=np.ones(len(completion_ids), np.bool_),
        reward=reward,
        outcome=Outcome.SCORED,
        finish_reason=FinishReason.STOP,
        error=None,
        sampler=Sampler(seed=0),
        max_tokens=24,
        started_at=0.0,
        finished_at=0.0,
        scored_at=0.0,
    )


def our_gradient(config, rollouts):
    """Of our learner's loss on rollouts that its own weights sampled."""
    learner = build_learner(config)
    for rollout, logprobs in zip(rollouts, learner.logprobs_of(rollouts), strict=True):
        rollout.rollout_logprobs[:] = logprobs
    size = config.rollouts.group_size
    groups = [rollouts[first : first + size] for first in range(0, len(rollouts), size)]
    learner.step(assemble_rows(1, groups, config).rows)
    return gradient_of(learner._model)


def gradient_of(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal_gradients(found, expected):
    assert found.keys() == expected.keys()
    assert torch.cat([grad.flatten() for grad in expected.values()]).norm() > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item() + 1e-7)


@pytest.mark.slow
def test_the_sequential_peer_has_the_gradient_of_our_learner(tmp_path, prepared_model):
    task = open_small(tmp_path, prepared_model)
    batch = sequential.generate(task, [task.prompt(index) for index in range(8)])
    sequential.loss_of(task, batch).backward()
    rollouts = []
    for index, (ids, attention, sampled) in enumerate(
        zip(batch.token_ids_BS, batch.attention_BS.bool(), batch.sampled_BC, strict=True)
    ):
        width = len(ids) - len(sampled)
        prompt, completion = ids[:width][attention[:width]], ids[width:][sampled]
        rollouts.append(rollout_of(index, prompt, completion, batch.rewards_B[index].item(), 8))
    assert_equal_gradients(gradient_of(task.model), our_gradient(task.config, rollouts))


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGES.exists(), reason="make bench-peers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("continuous_batching", [True, False])
def test_trl_has_the_gradient_of_our_learner(tmp_path, prepared_model, monkeypatch, continuous_batching):
    from pipelinerl_core.testing.peers import trl_grpo

    task = open_small(tmp_path, prepared_model)
    rollouts, gradients = [], []

    class Rewards(trl_grpo.Rewards):
        def __call__(self, completions, index, **columns):
            scores = super().__call__(completions, index)
            prompts = self._task.tokenizer([self._task.prompt(position).text for position in index])["input_ids"]
            for number, (prompt, completion, score) in enumerate(
                zip(prompts, columns["completion_ids"], scores, strict=True)
            ):
                rollouts.append(rollout_of(number, prompt, completion, score, 8))
            return scores

    class Record(trl_grpo.Record):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            gradients.append(gradient_of(kwargs["model"]))

    monkeypatch.setattr(trl_grpo, "Rewards", Rewards)
    monkeypatch.setattr(trl_grpo, "Record", Record)
    small = task.config.model_copy(update={"trainer": task.config.trainer.model_copy(update={"steps": 1})})
    object.__setattr__(task, "config", small)
    settings = trl_grpo.trainer_settings(task, rows=16, continuous_batching=continuous_batching)
    trl_grpo.train(task, settings)
    assert_equal_gradients(gradients[0], our_gradient(task.config, rollouts))


@pytest.mark.slow
def test_a_peer_runs_and_its_weights_are_evaluated_afterwards(tmp_path, prepared_model):
    arguments = ["--out", str(tmp_path), "--threads", "1"]
    module = "pipelinerl_core.testing.peers."
    train = [
        f"{module}sequential",
        *arguments,
        "--model",
        str(prepared_model),
        "--steps",
        "3",
        "--every",
        "2",
        *SMALL,
    ]
    for command in (train, [f"{module}evaluate", *arguments, "--prompts", "40"]):
        subprocess.run([sys.executable, "-m", *command], check=True, timeout=120, env=os.environ)
    document = read_points(tmp_path)
    assert [point["step"] for point in document["points"]] == [0, 2, 3]
    assert all(0.0 < point["accuracy"] < 1.0 for point in document["points"])
    assert json.dumps(document)
