"""The gradient of a step for any settings of the objective: by the code under test, and once more in float64.

The second computation is written from the papers and docs/algorithms.md, one token after the other, and calls no code
of the project. Both start from the same random groups of rollouts and from the same logits of a vocabulary of four
words.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.ledger.order import deadline, is_filtered
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.hub.recovery import summarize
from pipelinerl_core.training.policy import PolicyOutput, pack_loss
from pipelinerl_core.types import FinishReason, Rollout, TurnSpan, WeightSpan
from tests.rollout_rows import build_rollout, group_ref

STEP, MAX_LAG, MAX_TOKENS, WORDS = 5, 2, 6, 4
TEMPERATURE = 0.9
PARTS = {"short": 4, "long": MAX_TOKENS}
"""Part of the mixture -> longest completion."""


@dataclass(frozen=True)
class Case:
    """Groups of a step and what models say of their tokens, the completions one after the other."""

    groups: list[list[Rollout]]
    logits: np.ndarray
    """[tokens, WORDS] float32"""
    ref_logprobs: np.ndarray
    teacher_logprobs: np.ndarray
    values: np.ndarray

    @cached_property
    def summaries(self) -> list[Any]:
        every = [rollout for group in self.groups for rollout in group]
        return summarize([group_ref(group) for group in self.groups], encode_rollouts("", every))

    @cached_property
    def places(self) -> dict[tuple[int, int], slice]:
        """(group, index) -> the tokens of the completion."""
        slices, end = {}, 0
        for rollout in (rollout for group in self.groups for rollout in group):
            slices[rollout.group_id, rollout.rollout_index] = slice(end, end + rollout.num_tokens)
            end += rollout.num_tokens
        return slices


@cache
def random_case(seed: int) -> Case:
    """Six groups of two to four rollouts, one of each kind.

    The logarithm of a ratio has a spread of 0.35 around the mean of its rollout, and a few tokens are far out.
    """
    rng = np.random.default_rng(seed)
    groups = [
        _group(rng, 0, oldest=0),  # several versions in one rollout; at step 5 versions 0 and 1 are stale
        _group(rng, 1, oldest=3, has_error=True),
        _group(rng, 2, oldest=3, is_equal=True),
        _group(rng, 3, oldest=2, has_turns=True),
        _group(rng, 4, oldest=3, has_turns=True, is_equal=True, has_parts=True),
        _group(rng, 5, oldest=0, newest=1),  # every token is stale
    ]
    every = [rollout for group in groups for rollout in group]
    num = sum(rollout.num_tokens for rollout in every)
    logits = rng.normal(size=(num, WORDS)).astype(np.float32)
    tables = logits.astype(np.float64) / TEMPERATURE
    ids = np.concatenate([rollout.completion_token_ids for rollout in every])
    own = tables[np.arange(num), ids] - np.log(np.exp(tables).sum(-1))
    noise = rng.normal(size=num) * 0.35 + 1.2 * (rng.random(num) < 0.15) * rng.choice([-1, 1], num)
    case = Case(
        groups=groups,
        logits=logits,
        ref_logprobs=(own + rng.choice([-1, 1], num) * (0.3 + rng.random(num))).astype(np.float32),
        teacher_logprobs=(own + rng.normal(size=num) * 0.7).astype(np.float32),
        values=(rng.random(num) * 0.6 + 0.2).astype(np.float32),
    )
    for group in groups:
        for index, rollout in enumerate(group):
            place = case.places[rollout.group_id, index]
            logprobs = np.where(rollout.loss_mask, own[place] - noise[place] - rng.normal() * 0.3, 0)
            group[index] = replace(rollout, rollout_logprobs=logprobs.astype(np.float32))
    return case


def _group(
    rng, group_id, *, oldest, newest=STEP - 1, has_turns=False, is_equal=False, has_parts=False, has_error=False
):
    source = str(rng.choice(list(PARTS)))
    size = int(rng.integers(3 if has_error else 2, 5))
    rewards = [1.0] * size if is_equal else [1.0, 0.0, *rng.choice([0.0, 0.25, 1.0], size - 2)]
    group = []
    for index, reward in enumerate(rewards):
        num = int(rng.integers(3 if has_turns else 1, PARTS[source] + 1))
        turns = _turns(rng, num) if has_turns else ()
        mask = np.full(num, not turns)
        for turn in turns:
            mask[turn.start : turn.end] = True
        is_error = has_error and index == size - 1
        rollout = build_rollout(rng, group_id=group_id, rollout_index=index, num_tokens=num, prompt_tokens=2,
                                reward=None if is_error else float(reward), group_size=size)  # fmt: skip
        group.append(
            replace(
                rollout,
                source=source,
                completion_token_ids=(rollout.completion_token_ids % WORDS).astype(np.int32),
                weight_spans=_spans(rng, num, oldest, newest),
                loss_mask=mask,
                turn_spans=turns,
                turn_rewards=tuple(rng.choice([0.0, 0.5, 1.0], len(turns)).tolist()) if has_parts else (),
                max_tokens=MAX_TOKENS,
                finish_reason=FinishReason.LENGTH if rng.random() < 0.25 else FinishReason.STOP,
            )
        )
    return group


def _turns(rng, num):
    """Turns of one or two tokens; the tokens between them, and perhaps some at the end, are of the environment."""
    turns, start = [], 0
    while start < num:
        end = min(num, start + int(rng.integers(1, 3)))
        turns.append(TurnSpan(start, end))
        start = end + 1
    return tuple(turns)


def _spans(rng, num, oldest, newest):
    versions = np.sort(rng.integers(oldest, newest + 1, num)).tolist()
    starts = [t for t in range(num) if t == 0 or versions[t] != versions[t - 1]]
    return tuple(
        WeightSpan(versions[start], start, end) for start, end in zip(starts, [*starts[1:], num], strict=True)
    )


def config_of(values):
    """The configuration of nested values, in the sizes of these groups."""
    schedule = {"max_lag": MAX_LAG, **values.get("schedule", {})}
    rollouts = {"max_tokens": MAX_TOKENS, "group_size": 2, "temperature": TEMPERATURE, **values.get("rollouts", {})}
    trainer = {"pack_tokens": 40, "groups_per_step": 64, **values.get("trainer", {})}
    return build_config({**values, "schedule": schedule, "rollouts": rollouts, "trainer": trainer})


def measured(case, config):
    """The gradient by the code under test, summed over ranks: of the logits [tokens, WORDS] and values [tokens]."""
    kept = [
        group for group, summary in zip(case.groups, case.summaries, strict=True)
        if not is_filtered(summary, config)
        and deadline(summary, STEP, max_lag=config.schedule.max_lag, stale=config.schedule.stale) is not None
    ]  # fmt: skip
    rows = assemble_rows(STEP, kept, config).rows
    logits, values = (torch.tensor(leaf).requires_grad_() for leaf in (case.logits, case.values))
    batcher = PackBatcher(config.trainer.pack_tokens, config.trainer.packing, skips_backward=config.skips_backward)
    plan = batcher.plan(rows, config.trainer.ranks)
    for batch in (batch for packs in plan for batch in batcher.planned(rows, packs)):
        if batch.needs_backward and not batch.is_empty:
            _add_pack(case, config, rows, batch, logits, values)
    return tuple(
        np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.double().numpy() for leaf in (logits, values)
    )


def _add_pack(case, config, rows, batch, logits, values):
    packed = [rows[row].rollout for row in batch.row_S.tolist()]
    starts = [case.places[rollout.group_id, rollout.rollout_index].start for rollout in packed]
    places = torch.tensor(
        np.concatenate(
            [start + rollout.loss_mask.nonzero()[0] for start, rollout in zip(starts, packed, strict=True)]
        )
    )
    logprobs_N, entropy_N = token_logprobs(
        logits[places], torch.eye(WORDS), batch.target_ids_N, temperature=config.rollouts.temperature
    )
    is_masked_N = torch.ones(len(places), dtype=torch.bool)
    is_masked_N[batch.trained_M] = False

    def model(figures):
        """A model's log-probabilities; nothing that it says of a masked token may reach the gradient."""
        return lambda _: (torch.tensor(figures)[places].masked_fill(is_masked_N, math.nan),)

    loss = config.loss
    pack_loss(
        batch,
        PolicyOutput(logprobs_N, entropy_N, values[places] if loss.advantage == "value" else None),
        loss,
        version=STEP - 1,
        reference=model(case.ref_logprobs) if loss.kl_coefficient else None,
        teacher=model(case.teacher_logprobs) if loss.teacher else None,
    ).loss.backward()


# ---- once more, from the papers and docs/algorithms.md -------------------------------------------------------------


def wanted(case, config):
    """The same gradient in float64."""
    groups = [
        [rollout for rollout in group if rollout.reward is not None]
        for group in case.groups
        if _is_trained(group, config)
    ]
    counts = [[int(rollout.loss_mask.sum()) for rollout in group] for group in groups]
    num_tokens, num_rollouts = sum(map(sum, counts)), sum(map(len, counts))
    of_logits, of_values = np.zeros(case.logits.shape), np.zeros(case.values.shape)
    for group, group_counts in zip(groups, counts, strict=True):
        for rollout, advantages, count in zip(group, _advantages(group, config), group_counts, strict=True):
            weight = {
                "token": 1 / num_tokens,
                "sequence": 1 / (num_rollouts * count),
                "prompt": 1 / (len(groups) * sum(group_counts)),
                "constant": 1 / (num_rollouts * MAX_TOKENS),
            }[config.loss.normalization]
            if config.loss.overlong_filtering and rollout.finish_reason == "length":
                continue
            place = case.places[rollout.group_id, rollout.rollout_index]
            figures = [
                array[place].astype(np.float64).tolist()
                for array in (case.ref_logprobs, case.teacher_logprobs, case.values)
            ]
            logits = case.logits[place].astype(np.float64)
            _add_rollout(rollout, advantages, weight, config, logits, figures, of_logits[place], of_values[place])
    return of_logits, of_values


def _versions(rollout):
    return [span.version for span in rollout.weight_spans for _ in range(span.start, span.end)]


def _is_trained(group, config):
    scored = [rollout for rollout in group if rollout.reward is not None]
    lags = [STEP - 1 - version for rollout in scored for version in _versions(rollout)]
    is_stale = [lag > config.schedule.max_lag for lag in lags]
    if all(is_stale) or (config.schedule.stale == "drop" and any(is_stale)):
        return False
    has_parts = any(len(rollout.turn_rewards) > 1 for rollout in scored) and config.loss.advantage == "turn"
    is_equal = len({rollout.reward for rollout in scored}) == 1 and not has_parts
    return not (config.rollouts.filter_zero_variance and is_equal)


def _shaped_reward(rollout, config):
    """The reward with DAPO's soft overlong punishment, by the limit of the rollout's part of a mixture."""
    limit, k = MAX_TOKENS, config.reward.overlong_tokens
    if config.mixture:
        part = config.mixture[rollout.source]
        limit, k = part.max_tokens or MAX_TOKENS, part.reward["overlong_tokens"]
    return rollout.reward - (min(1, max(0, (rollout.num_tokens - (limit - k)) / k)) if k else 0)


def _advantages(group, config):
    """For each rollout the advantage of each completion token; with values the reward."""
    rewards = [_shaped_reward(rollout, config) for rollout in group]
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    token_advantages = []
    for i, rollout in enumerate(group):
        others = [reward for j, reward in enumerate(rewards) if j != i]
        if config.loss.advantage != "turn":
            advantage = {
                "leave_one_out": rewards[i] - sum(others) / len(others),
                "group_mean": rewards[i] - mean,
                "standardized": (rewards[i] - mean) / (std + 1e-4),
                "max_likelihood": (rewards[i] - mean) / mean if mean > 0 and min(rewards) >= 0 else 0.0,
                "value": rewards[i],
            }[config.loss.advantage]
            token_advantages.append([advantage] * rollout.num_tokens)
            continue
        turns = rollout.turn_spans or [(0, rollout.num_tokens)]
        advantages = [0.0] * rollout.num_tokens
        for k, (start, end) in enumerate(turns):
            returns = [
                reward - sum(other.turn_rewards[:k])
                for other, reward in zip(group, rewards, strict=True)
                if other is not rollout and len(other.turn_spans or [0]) > k
            ]
            own = rewards[i] - sum(rollout.turn_rewards[:k])
            for t in range(start, end):
                advantages[t] = own - sum(returns) / len(returns) if returns else 0.0
        token_advantages.append(advantages)
    return token_advantages


def _add_rollout(rollout, advantages, weight, config, logits, figures, of_logits, of_values):
    """Add the gradient of the terms of a rollout with respect to its logits and values."""
    loss, temperature = config.loss, config.rollouts.temperature
    ref_logprobs, teacher_logprobs, values = figures
    lags = [STEP - 1 - version for version in _versions(rollout)]
    trained = [t for t in range(rollout.num_tokens) if rollout.loss_mask[t] and lags[t] <= config.schedule.max_lag]
    if not trained:
        return
    ids = rollout.completion_token_ids
    tables = logits / temperature
    tables = tables - np.log(np.exp(tables).sum(-1, keepdims=True))
    logprobs = [float(tables[t, ids[t]]) for t in range(len(ids))]
    log_ratios = [logprobs[t] - float(rollout.rollout_logprobs[t]) for t in range(len(ids))]
    mean_log_ratio = sum(log_ratios[t] for t in trained) / len(trained)
    if loss.sequence_ratio_max and abs(mean_log_ratio) > math.log(loss.sequence_ratio_max):
        return
    for t in trained:
        advantage = advantages[t] - (values[t] if loss.advantage == "value" else 0)
        if loss.teacher:
            gap = teacher_logprobs[t] - logprobs[t]
            advantage = loss.reward_coefficient * advantage + loss.teacher_coefficient * gap
        slope = 0.0  # d loss / d trainer_logprob
        if not (loss.negative_kl_max and -mean_log_ratio > loss.negative_kl_max and advantage < 0):
            slope = _slope(loss, logprobs[t], log_ratios[t], mean_log_ratio, advantage, lags[t], len(trained))
        if loss.kl_coefficient:
            plain = 1 - math.exp(ref_logprobs[t] - logprobs[t])
            weighted = math.exp(log_ratios[t]) * (logprobs[t] - ref_logprobs[t])
            slope += loss.kl_coefficient * (weighted if loss.kl_weighted else plain)
        if loss.advantage == "value":
            of_values[t] += weight * loss.value_coefficient * (values[t] - advantages[t])
        probabilities = np.exp(tables[t])
        entropy = -(probabilities * tables[t]).sum()
        of_logprob = (np.arange(WORDS) == ids[t]) - probabilities
        of_entropy = -probabilities * (tables[t] + entropy)
        of_logits[t] += weight / temperature * (slope * of_logprob - loss.entropy_bonus * of_entropy)


def _slope(loss, logprob, log_ratio, mean_log_ratio, advantage, lag, num):
    """d loss_t / d trainer_logprob_t for loss_t of the table in docs/algorithms.md."""
    ratio = math.exp(log_ratio)
    if loss.kind == "reinforce":
        return -min(ratio, loss.ratio_max) * advantage
    if loss.kind == "cispo":
        return -min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high) * advantage
    if loss.kind == "icepop":
        return -ratio * advantage if loss.ratio_min <= ratio <= loss.ratio_max else 0.0
    if loss.kind == "dppo":
        moved = math.exp(logprob) - math.exp(logprob - log_ratio)
        is_up, is_down = moved > loss.divergence_max, moved < -loss.divergence_max
        is_outside = (is_up and advantage > 0) or (is_down and advantage < 0)
        return 0.0 if is_outside else -min(ratio, loss.ratio_max) * advantage
    if loss.kind == "decoupled_ppo":  # b and u, with b * u = ratio
        alpha = 1 / (lag + 1)
        behaviour = min(math.exp((1 - alpha) * log_ratio), loss.ratio_max)
        return -behaviour * _bounded_slope(math.exp(alpha * log_ratio), advantage, loss)
    if loss.kind == "sapo":
        tau = loss.tau_positive if advantage > 0 else loss.tau_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 * gate * (1 - gate) * ratio * advantage
    if loss.kind == "sequence_product":
        product = math.exp(num * mean_log_ratio)
        if product > loss.ratio_max:
            return 0.0 if loss.masks else -loss.ratio_max * advantage
        return -product * advantage
    if loss.kind == "gspo":  # GSPO-token: the ratio of the rollout, and the gradient at the token itself
        return -_bounded_slope(math.exp(mean_log_ratio), advantage, loss)
    return -_bounded_slope(ratio, advantage, loss)


def _bounded_slope(x, advantage, loss):
    """dp / d log x for p(x) of docs/algorithms.md: x * A where p is x * A, and 0 where p is a bound."""
    bounded = min(max(x, 1 - loss.clip_low), 1 + loss.clip_high)
    if bounded * advantage < x * advantage:
        return 0.0
    if advantage < 0 and loss.dual_clip and x * advantage < loss.dual_clip * advantage:
        return 0.0
    return x * advantage
