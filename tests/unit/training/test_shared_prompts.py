"""Rollouts that share a prompt have the losses, gradients and metrics that they have without sharing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl_core.algo.packed import Band
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher, num_forward_tokens
from pipelinerl_core.config.losses import PpoLoss, ReinforceLoss
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.lora import add_adapters, trained_parameters
from pipelinerl_core.training.model import head_weight, hidden_states, prepare_model
from pipelinerl_core.types import TrainingRow
from tests.rollout_rows import build_rollout
from tests.unit.training.learner_case import config, tiny_model


def exact_model():
    """A policy in float64; transformers' own norms compute in float32."""
    model = prepare_model(tiny_model())
    for layer in model.modules():
        for name, norm in layer.named_children():
            if type(norm).__name__ == "Qwen2RMSNorm":
                own = torch.nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon)
                own.weight = norm.weight
                setattr(layer, name, own)
    return model.double()


EXACT = exact_model()
PACKING = {"time/compute_seconds", "train/num_packs", "train/pack_fill"}


@st.composite
def row_lists(draw):
    """Rows of groups: most prompts of a group are equal, some rows have branches."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for group_id in range(draw(st.integers(1, 4))):
        prompts = rng.integers(0, 100, (2, draw(st.integers(1, 25))), dtype=np.int32)
        for index in range(draw(st.integers(1, 5))):
            num_tokens = draw(st.integers(1, 12))
            made = build_rollout(rng, group_id=group_id, rollout_index=index, num_tokens=num_tokens)
            starts = tuple(sorted(set(draw(st.lists(st.integers(1, max(1, num_tokens - 1)), max_size=2)))))
            mask = rng.random(num_tokens) < 0.8
            starts = tuple(start for start in starts if start < num_tokens)
            mask[list(starts)] = False
            mask[0] = True
            made = replace(
                made, prompt_token_ids=prompts[draw(st.integers(0, 9)) // 9], loss_mask=mask, branch_starts=starts
            )
            weights = {"advantage": draw(st.sampled_from([0.0, -1.5, 0.7])), "loss_weight": float(rng.random())}
            rows.append(TrainingRow(rollout=made, loss_mask=mask, **weights))
    return rows


def packs_of(rows, ranks, **options):
    batcher = PackBatcher(**options)
    if ranks == 1:
        return list(batcher.rows(rows))
    return [pack for packs in batcher.plan(rows, ranks) for pack in batcher.planned(rows, packs) if not pack.is_empty]


def outcome(packs, model=EXACT):
    """Loss and gradients of a step in float64, and the log-probabilities by row."""
    loss, logprobs = torch.zeros((), dtype=torch.float64), {}
    for batch in packs:
        logits_NV = hidden_states(model, batch) @ head_weight(model).T
        logprobs_N = torch.log_softmax(logits_NV, -1).gather(-1, batch.target_ids_N[:, None])[:, 0]
        loss = loss - (batch.loss_weights_N.double() * batch.advantages_N.double() * logprobs_N).sum()
        for number, row in enumerate(batch.row_S.tolist()):
            logprobs[row] = logprobs_N[batch.sequence_N == number].detach()
    return [
        loss,
        *torch.autograd.grad(loss, list(model.parameters())),
        *(part for _, part in sorted(logprobs.items())),
    ]


@given(
    rows=row_lists(), ranks=st.sampled_from([1, 2, 3]), budget=st.sampled_from([16, 40, 2048]), skips=st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_losses_gradients_and_log_probabilities_are_those_of_single_rollouts(rows, ranks, budget, skips):
    options = {"pack_tokens": budget, "skips_backward": skips}
    shared = packs_of(rows, ranks, shares_prompts=True, **options)
    alone = packs_of(rows, 1, **options)
    torch.testing.assert_close(outcome(shared), outcome(alone), rtol=1e-9, atol=1e-9)
    longest = max(num_forward_tokens(row.rollout) for row in rows)
    assert all(pack.num_tokens <= max(budget, 1.25 * longest) for pack in shared)
    assert sum(pack.num_tokens for pack in shared) <= sum(pack.num_tokens for pack in alone)
    if ranks > 1:
        plan = PackBatcher(shares_prompts=True, **options).plan(rows, ranks)
        assert len({len(packs) for packs in plan}) == 1


def test_a_branch_that_begins_the_pack_is_scored():
    """Scoring has a place for each completion token, also for the first of a branch, which nothing predicts."""
    rng = np.random.default_rng(0)
    made = [build_rollout(rng, rollout_index=index, num_tokens=30, prompt_tokens=3) for index in range(2)]
    made = [replace(rollout, prompt_token_ids=made[0].prompt_token_ids, branch_starts=(4,)) for rollout in made]
    (pack,) = PackBatcher(2048, shares_prompts=True).rollouts(made)
    (alone,) = PackBatcher(2048).rollouts(made)
    assert pack.layout.lengths[0] == 25  # a branch, the longest context
    known = np.delete(np.arange(60), [4, 34])
    scored, wanted = (hidden_states(EXACT, batch)[known] for batch in (pack, alone))
    torch.testing.assert_close(scored, wanted, rtol=1e-9, atol=1e-9)


def one_group(num=4, prompt_tokens=5):
    rng = np.random.default_rng(0)
    made = [
        build_rollout(rng, rollout_index=index, num_tokens=5 + index, prompt_tokens=prompt_tokens)
        for index in range(num)
    ]
    made = [replace(rollout, prompt_token_ids=made[0].prompt_token_ids) for rollout in made]
    return [TrainingRow(rollout=m, loss_mask=m.loss_mask, advantage=1.0, loss_weight=0.5) for m in made]


def test_a_prompt_is_in_the_pack_once():
    rows = one_group()
    (pack,) = packs_of(rows, 1, pack_tokens=2048, shares_prompts=True)
    assert pack.num_tokens == 5 + (5 + 6 + 7 + 8) - 4
    assert pack.row_S.tolist() == [3, 2, 1, 0]  # the longest first
    assert len(pack.layout.parents) == 3


def test_a_group_with_a_long_prompt_is_cut_before_its_copies_of_keys_outgrow_the_budget():
    rows = one_group(40, prompt_tokens=500)
    packs = packs_of(rows, 1, pack_tokens=1024, shares_prompts=True)
    assert all(pack.row_tokens <= 8 * 1024 for pack in packs)
    assert len(packs) > 1
    assert sum(pack.row_tokens for pack in packs) == sum(num_forward_tokens(row.rollout) for row in rows)
    assert sum(pack.num_tokens for pack in packs) < sum(pack.row_tokens for pack in packs) / 5


def test_prompts_of_different_lengths_are_not_padded_to_the_longest():
    rng = np.random.default_rng(0)
    groups = [one_group(4, prompt_tokens=size) for size in (300, 20, 20, 20)]
    rows = [
        replace(row, rollout=replace(row.rollout, group_id=number, sampler=build_rollout(rng).sampler))
        for number, group in enumerate(groups)
        for row in group
    ]
    (pack,) = packs_of(rows, 1, pack_tokens=2048, shares_prompts=True)
    for band in pack.layout.bands:
        longest = band.prefixes.longest if band.prefixes else 0
        slots = len(band.lengths) * (band.width + longest)
        assert slots <= 4 * pack.row_tokens


def test_a_mask_that_shows_one_token_too_many_is_found(monkeypatch):
    rows = one_group(prompt_tokens=20)
    packs = packs_of(rows, 1, pack_tokens=2048, shares_prompts=True)
    wanted = outcome(packs_of(rows, 1, pack_tokens=2048))
    torch.testing.assert_close(outcome(packs), wanted, rtol=1e-9, atol=1e-9)
    mask = Band.mask

    def leaking(self, window):
        right = mask(self, window)
        if self.prefixes is None:
            return right
        leaked = right.clone()
        leaked[0, 0, 0, self.prefixes.longest + 1] = True  # the first own token sees the second
        return leaked

    monkeypatch.setattr(Band, "mask", leaking)
    packs = packs_of(rows, 1, pack_tokens=2048, shares_prompts=True)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(outcome(packs), wanted, rtol=1e-9, atol=1e-9)


def groups_with_prompts():
    rng = np.random.default_rng(1)
    made = []
    for group_id in range(3):
        group = [
            build_rollout(rng, group_id=group_id, rollout_index=index, num_tokens=2 + index, reward=float(index % 2))
            for index in range(4)
        ]
        made.append([replace(rollout, prompt_token_ids=group[0].prompt_token_ids) for rollout in group])
    return made


@pytest.mark.parametrize(
    ("loss", "learner"),
    [
        (ReinforceLoss(advantage="value", value_coefficient=0.5), {}),
        (PpoLoss(kl_coefficient=0.1), {}),
        (ReinforceLoss(), {"lora_rank": 4}),
    ],
    ids=["value head", "reference", "lora"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_that_of_single_rollouts(loss, learner, dtype):
    run_config = config(loss=loss, **{"lr": 1e-2, "warmup_steps": 0, **learner})
    rows = assemble_rows(1, groups_with_prompts(), run_config).rows
    steps = []
    for shares in (True, False):
        model = prepare_model(tiny_model().to(dtype))
        if learner:
            add_adapters(model, run_config.learner, 3)
        reference = prepare_model(tiny_model(7).to(dtype)).requires_grad_(False) if loss.kl_coefficient else None
        batcher = PackBatcher(2048, shares_prompts=shares)
        made = TorchLearner(model, run_config, batcher=batcher, reference=reference)
        steps.append((made.step(rows), trained_parameters(model)))
    (metrics, weights), (wanted, wanted_weights) = steps
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for name in wanted.keys() - PACKING:
        assert metrics[name] == pytest.approx(wanted[name], rel=tolerance, abs=tolerance), name
    assert metrics["train/tokens"] == wanted["train/tokens"]  # each rollout with its prompt
    if dtype == torch.float32:
        for name, tensor in wanted_weights.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
