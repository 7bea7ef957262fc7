"""Rollouts whose advantage is 0 are computed without a backward pass: the step stays the same."""

import pytest
import torch

from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config.losses import DapoLoss, GspoLoss, ReinforceLoss
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import prepare_model
from tests.models import published_by
from tests.unit.training.learner_case import config, groups, tiny_model

PACKING = {"time/compute_seconds", "train/num_packs", "train/pack_fill"}


def mixed_rows(run_config, equal=(0, 2)):
    """Four groups; the rewards of the groups in `equal` are all 1."""
    made_groups = groups(num_groups=4)
    for number in equal:
        for rollout in made_groups[number]:
            object.__setattr__(rollout, "reward", 1.0)
    return assemble_rows(1, made_groups, run_config).rows


def step(run_config, rows, *, skips):
    """Weights and metrics after a step, and the number of backward passes."""
    batcher = PackBatcher(run_config.trainer.pack_tokens, skips_backward=skips)
    model = prepare_model(tiny_model())
    learner = TorchLearner(model, run_config, batcher=batcher)
    metrics = learner.step(rows)
    num_backward = sum(batch.needs_backward for batch in batcher.rows(rows))
    return published_by(learner), metrics, num_backward


@pytest.mark.parametrize("loss", [ReinforceLoss(), DapoLoss(), GspoLoss()], ids=lambda loss: loss.kind)
@pytest.mark.parametrize("pack_tokens", [24, 2048])
def test_weights_and_metrics_of_a_step_are_those_with_every_backward_pass(loss, pack_tokens):
    run_config = config(pack_tokens, loss=loss, lr=1e-2, warmup_steps=0, clip_norm=1.0)
    rows = mixed_rows(run_config)
    weights, metrics, num_backward = step(run_config, rows, skips=True)
    wanted_weights, wanted, num_wanted = step(run_config, rows, skips=False)
    assert num_backward < num_wanted or pack_tokens == 2048
    for name, tensor in wanted_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert metrics.keys() == wanted.keys()
    for name in wanted.keys() - PACKING:
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name


def test_a_step_without_any_advantage_has_no_backward_pass_and_no_gradient():
    run_config = config()
    rows = mixed_rows(run_config, equal=range(4))
    _, metrics, num_backward = step(run_config, rows, skips=True)
    assert num_backward == 0
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["train/tokens"] == step(run_config, rows, skips=False)[1]["train/tokens"]


def test_a_step_without_any_advantage_leaves_the_weights_with_every_backward_pass_too():
    run_config = config(lr=1e-2, warmup_steps=0)
    for skips in (True, False):
        batcher = PackBatcher(run_config.trainer.pack_tokens, skips_backward=skips)
        learner = TorchLearner(prepare_model(tiny_model()), run_config, batcher=batcher)
        learner.step(mixed_rows(run_config))
        before = published_by(learner)
        learner.step(mixed_rows(run_config, equal=range(4)))
        assert all(torch.equal(before[name], tensor) for name, tensor in published_by(learner).items())


def test_ranks_get_equally_many_packs_of_both_kinds():
    run_config = config(24)
    rows = mixed_rows(run_config)
    batcher = PackBatcher(24, skips_backward=True)
    plan = batcher.plan(rows, ranks=2)
    kinds = [[batch.needs_backward for batch in batcher.planned(rows, packs) if not batch.is_empty] for packs in plan]
    assert len(plan[0]) == len(plan[1])
    assert abs(sum(kinds[0]) - sum(kinds[1])) <= 1
    assert sorted(index for packs in plan for pack in packs for index in pack) == list(range(len(rows)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        ({"trainer": {"skip_zero_advantage": False}}, False),
        ({"learner": {"kind": "deepspeed"}}, False),
        ({"loss": {"kind": "ppo", "kl_coefficient": 0.1}}, False),
        ({"loss": {"kind": "reinforce", "advantage": "value"}}, False),
        ({"loss": {"entropy_bonus": 0.1}}, False),
    ],
    ids=str,
)
def test_losses_with_other_terms_need_every_backward_pass(values, expected):
    assert build_config(values).skips_backward is expected


def test_the_entropy_bonus_of_equal_rewards_has_its_gradient():
    run_config = config(loss=ReinforceLoss(entropy_bonus=0.1))
    rows = mixed_rows(run_config, equal=range(4))
    _, metrics, _ = step(run_config, rows, skips=run_config.skips_backward)
    assert metrics["train/grad_norm"] > 0
