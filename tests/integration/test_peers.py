"""Peers train what we train: their gradient on their own rollouts is that of our learner on the same rollouts."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.peers import sequential
from benchmarks.peers.record import read_points
from benchmarks.peers.task import open_task, peer_parser
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.roles.trainer.learners import build_alone
from tests.rollout_rows import build_rollout

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".bench-packages"
SMALL = ["trainer.groups_per_step=8", "rollouts.max_tokens=24", "engine.concurrency=64", "learner.clip_norm=1000000"]


def open_small(out, model, *options):
    arguments = ["--out", str(out), "--model", str(model), "--threads", "1", *options, *SMALL]
    return open_task(peer_parser("").parse_args(arguments))


def rollout_of(index, prompt_ids, completion_ids, reward, group_size):
    num = len(completion_ids)
    rollout = build_rollout(
        np.random.default_rng(0), group_id=index // group_size, rollout_index=index % group_size,
        group_size=group_size, num_tokens=num, reward=reward,
    )  # fmt: skip
    return replace(
        rollout,
        prompt_token_ids=np.array(prompt_ids, np.int32),
        completion_token_ids=np.array(completion_ids, np.int32),
        rollout_logprobs=np.zeros(num, np.float32),
    )


def our_gradient(config, rollouts):
    """Of our learner's loss on rollouts that its own weights sampled."""
    learner = build_alone(config)
    for rollout, logprobs in zip(rollouts, learner.logprobs_of(rollouts), strict=True):
        rollout.rollout_logprobs[:] = logprobs
    size = config.rollouts.group_size
    groups = [rollouts[first : first + size] for first in range(0, len(rollouts), size)]
    learner.step(assemble_rows(1, groups, config).rows)
    return gradient_of(learner._model)


def gradient_of(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    assert torch.cat([grad.flatten() for grad in expected.values()]).norm() > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item() + 1e-7)


@pytest.mark.slow
def test_the_sequential_peer_has_the_gradient_of_our_learner(tmp_path, prepared_model):
    task = open_small(tmp_path, prepared_model)
    batch = sequential.generate(task, [task.prompt(index) for index in range(8)])
    assert not sequential.backward(task, replace(batch, rewards_B=torch.ones_like(batch.rewards_B)))
    assert sequential.backward(task, batch)
    rollouts = []
    for index, (ids, attention, sampled) in enumerate(
        zip(batch.token_ids_BS, batch.attention_BS.bool(), batch.sampled_BC, strict=True)
    ):
        width = len(ids) - len(sampled)
        prompt, completion = ids[:width][attention[:width]], ids[width:][sampled]
        rollouts.append(rollout_of(index, prompt, completion, batch.rewards_B[index].item(), 8))
    assert_equal_gradients(gradient_of(task.model), our_gradient(task.config, rollouts))


@pytest.fixture(scope="module")
def trl() -> None:
    """What only peers need, beside the environment of the tests."""
    subprocess.run(["make", "bench-peers"], check=True, timeout=300, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.usefixtures("trl")
@pytest.mark.parametrize("generation", ["continuous", "plain"])
def test_trl_has_the_gradient_of_our_learner(tmp_path, prepared_model, generation):
    # In a process of its own, which looks for packages where `make bench-peers` puts them.
    call = f"compare_trl({str(tmp_path)!r}, {str(prepared_model)!r}, {generation == 'continuous'})"
    command = [sys.executable, "-W", "ignore", "-c", f"from tests.integration.test_peers import compare_trl; {call}"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, timeout=400, env=environment, cwd=ROOT)


def compare_trl(out, model, continuous_batching):
    """One step of TRL: its gradient on what it sampled against ours."""
    from benchmarks.peers import trl_grpo

    rollouts, gradients = [], []

    class Rewards(trl_grpo.Rewards):
        def __call__(self, completions, index, **columns):
            scores = super().__call__(completions, index)
            prompts = self._task.tokenizer([self._task.prompt(position).text for position in index])["input_ids"]
            sampled = zip(prompts, columns["completion_ids"], scores, strict=True)
            rollouts.extend(rollout_of(number, *rollout, 8) for number, rollout in enumerate(sampled))
            return scores

    class Record(trl_grpo.Record):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            gradients.append(gradient_of(kwargs["model"]))

    trl_grpo.Rewards, trl_grpo.Record = Rewards, Record
    task = open_small(Path(out), model, "--steps", "1")
    trl_grpo.train(task, trl_grpo.trainer_settings(task, rows=16, continuous_batching=continuous_batching))
    assert_equal_gradients(gradients[0], our_gradient(task.config, rollouts))


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.usefixtures("trl")
def test_processes_of_trl_share_a_step(tmp_path, prepared_model):
    options = ["--out", str(tmp_path), "--model", str(prepared_model), "--steps", "2", "--every", "1", *SMALL]
    command = [sys.executable, "-m", "benchmarks.peers", "trl", *options]
    subprocess.run(command, check=True, timeout=200)
    document = read_points(tmp_path)
    assert [(point["step"], point["samples"]) for point in document["points"]] == [(0, 0), (1, 64), (2, 128)]
    assert document["settings"]["processes"] == len(os.sched_getaffinity(0))


@pytest.mark.slow
def test_a_peer_runs_and_its_weights_are_evaluated_afterwards(tmp_path, prepared_model):
    module = [sys.executable, "-m", "benchmarks.peers"]
    train = ["sequential", "--model", str(prepared_model), *["--steps", "3", "--every", "2"], *SMALL]
    for command in (train, ["evaluate", "--prompts", "40"]):
        subprocess.run([*module, *command, "--out", str(tmp_path), "--threads", "1"], check=True, timeout=120)
    document = read_points(tmp_path)
    assert [point["step"] for point in document["points"]] == [0, 2, 3]
    assert all(0.0 < point["accuracy"] < 1.0 for point in document["points"])
