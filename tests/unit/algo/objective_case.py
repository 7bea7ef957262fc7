"""The gradient of a step for any settings of the objective: by the code under test, and once more in float64.

The second computation is written from docs/algorithms.md, one token after the other, and calls no code of the
project. Both start from the same groups of rollouts and from the same logits of a vocabulary of four words.
"""

import math
from dataclasses import replace

import numpy as np
import torch

from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config.load import build_config
from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.ledger.order import deadline, is_filtered
from pipelinerl_core.roles.hub.recovery import summarize
from pipelinerl_core.testing.rollout_rows import build_rollout, group_ref
from pipelinerl_core.training.policy import PolicyOutput, pack_loss
from pipelinerl_core.types import FinishReason, TurnSpan, WeightSpan

STEP, MAX_LAG, MAX_TOKENS, WORDS = 5, 2, 6, 4
TEMPERATURE = 0.9
# (rewards, spans of weight versions as (version, tokens), turns, rewards of turns, whether truncated) by rollout.
_FRESH, _MIXED, _OLD = ((4, 3),), ((1, 2), (3, 2), (4, 1)), ((0, 2), (1, 1))
_GROUPS = (
    # Several versions in one rollout; at step 5 versions 0 and 1 are stale.
    [(1.0, _MIXED, (), (), True), (0.0, ((2, 4),), (), (), False), (0.25, ((1, 1), (4, 2)), (), (), False)],
    # Nothing stale, and an error.
    [(1.0, _FRESH, (), (), False), (0.0, ((3, 5),), (), (), True), (None, _FRESH, (), (), False)],
    # Equal rewards of different lengths.
    [(1.0, ((3, 6),), (), (), True), (1.0, ((4, 2),), (), (), False), (1.0, ((4, 1),), (), (), False)],
    # Several turns; tokens between turns were not sampled.
    [(1.0, ((3, 6),), ((0, 2), (3, 6)), (), False), (0.0, ((2, 5),), ((0, 1), (2, 3), (4, 5)), (), False)],
    # Equal rewards that belong to different turns.
    [(1.0, ((4, 4),), ((0, 2), (3, 4)), (1.0, 0.0), False), (1.0, ((4, 4),), ((0, 1), (2, 4)), (0.0, 1.0), False)],
    # Every token is stale.
    [(1.0, _OLD, (), (), False), (0.0, _OLD, (), (), False)],
)


def _groups():
    rng = np.random.default_rng(5)
    found = []
    for group_id, rollouts in enumerate(_GROUPS):
        group = []
        for index, (reward, spans, turns, turn_rewards, is_truncated) in enumerate(rollouts):
            num = sum(tokens for _, tokens in spans)
            starts = np.cumsum([0, *(tokens for _, tokens in spans)])
            mask = np.ones(num, bool)
            if turns:
                mask[:] = False
                for start, end in turns:
                    mask[start:end] = True
            rollout = build_rollout(rng, group_id=group_id, rollout_index=index, num_tokens=num, prompt_tokens=2,
                                    reward=reward, group_size=len(rollouts))  # fmt: skip
            group.append(
                replace(
                    rollout,
                    completion_token_ids=(rollout.completion_token_ids % WORDS).astype(np.int32),
                    weight_spans=tuple(
                        WeightSpan(version, int(start), int(start + tokens))
                        for (version, tokens), start in zip(spans, starts, strict=False)
                    ),
                    loss_mask=mask,
                    turn_spans=tuple(TurnSpan(*turn) for turn in turns),
                    turn_rewards=turn_rewards,
                    max_tokens=MAX_TOKENS,
                    finish_reason=FinishReason.LENGTH if is_truncated else FinishReason.STOP,
                )
            )
        found.append(group)
    return found


def _figures(rng, groups):
    """(group, index) -> logits [C, WORDS], logprobs of the reference [C], values [C]; float32.

    The logarithm of a ratio has a spread of 0.35 around the mean of its rollout, and a few tokens are far out.
    """
    figures = {}
    for group in groups:
        for place, rollout in enumerate(group):
            logits = rng.normal(size=(rollout.num_tokens, WORDS)).astype(np.float32)
            exact = torch.log_softmax(torch.tensor(logits).double() / TEMPERATURE, -1).numpy()
            own = exact[np.arange(len(logits)), rollout.completion_token_ids]
            noise = rng.normal(size=len(own)) * 0.35 + rng.normal() * 0.3
            noise += 1.2 * (rng.random(len(own)) < 0.15) * rng.choice([-1, 1])
            group[place] = replace(
                rollout, rollout_logprobs=np.where(rollout.loss_mask, own - noise, 0).astype(np.float32)
            )
            figures[rollout.group_id, rollout.rollout_index] = (
                logits,
                (own + rng.choice([-1, 1], len(own)) * (0.3 + rng.random(len(own)))).astype(np.float32),
                (rng.random(len(own)) * 0.6 + 0.2).astype(np.float32),
            )
    return figures


GROUPS = _groups()
FIGURES = _figures(np.random.default_rng(11), GROUPS)
SUMMARIES = [summarize([group_ref(group)], encode_rollouts("", group))[0] for group in GROUPS]


def config_of(values):
    """The configuration of nested values, in the sizes of these groups."""
    schedule = {"max_lag": MAX_LAG, **values.get("schedule", {})}
    rollouts = {"max_tokens": MAX_TOKENS, "group_size": 2, "temperature": TEMPERATURE, **values.get("rollouts", {})}
    trainer = {"pack_tokens": 16, "groups_per_step": 64, **values.get("trainer", {})}
    return build_config({**values, "schedule": schedule, "rollouts": rollouts, "trainer": trainer})


def measured(config):
    """The gradient by the code under test: (group, index) -> gradient of the logits [C, WORDS], of the values [C]."""
    kept = [
        group for group, summary in zip(GROUPS, SUMMARIES, strict=True)
        if not is_filtered(summary, config)
        and deadline(summary, STEP, max_lag=config.schedule.max_lag, stale=config.schedule.stale) is not None
    ]  # fmt: skip
    rows = assemble_rows(STEP, kept, config).rows
    leaves = {
        key: (torch.tensor(logits).requires_grad_(), torch.tensor(values).requires_grad_())
        for key, (logits, _, values) in FIGURES.items()
    }
    has_values = config.loss.advantage == "value"
    for batch in PackBatcher(config.trainer.pack_tokens, skips_backward=config.skips_backward).rows(rows):
        if not batch.needs_backward:
            continue
        packed = [rows[row].rollout for row in batch.row_S.tolist()]
        keys = [(rollout.group_id, rollout.rollout_index) for rollout in packed]
        chosen = [torch.tensor(rollout.loss_mask.nonzero()[0]) for rollout in packed]
        pairs = list(zip(keys, chosen, strict=True))
        hidden_NC = torch.cat([leaves[key][0][places] for key, places in pairs])
        logprobs_N, entropy_N = token_logprobs(
            hidden_NC, torch.eye(WORDS), batch.target_ids_N, temperature=config.rollouts.temperature
        )
        values_N = torch.cat([leaves[key][1][places] for key, places in pairs]) if has_values else None
        ref_N = torch.cat([torch.tensor(FIGURES[key][1])[places] for key, places in pairs])
        reference = (lambda _, ref_N=ref_N: (ref_N,)) if config.loss.kl_coefficient else None
        output = PolicyOutput(logprobs_N, entropy_N, values_N)
        pack_loss(batch, output, config.loss, version=STEP - 1, reference=reference).loss.backward()
    return {
        key: tuple(
            np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.double().numpy() for leaf in pair
        )
        for key, pair in leaves.items()
    }  # fmt: skip


# ---- once more, from docs/algorithms.md ------------------------------------------------------------------------


def wanted(config):
    """The same gradient in float64, from the formulas of docs/algorithms.md."""
    groups = [
        [rollout for rollout in group if rollout.reward is not None] for group in GROUPS if _is_trained(group, config)
    ]
    counts = [[int(rollout.loss_mask.sum()) for rollout in group] for group in groups]
    num_tokens, num_rollouts = sum(map(sum, counts)), sum(map(len, counts))
    gradients = {
        key: (np.zeros(logits.shape), np.zeros(values.shape)) for key, (logits, _, values) in FIGURES.items()
    }
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
            key = (rollout.group_id, rollout.rollout_index)
            _add_rollout(rollout, advantages, weight, config, FIGURES[key], *gradients[key])
    return gradients


def _versions(rollout):
    return [span.version for span in rollout.weight_spans for _ in range(span.start, span.end)]


def _is_trained(group, config):
    scored = [rollout for rollout in group if rollout.reward is not None]
    lags = [STEP - 1 - version for rollout in scored for version in _versions(rollout)]
    is_stale = [lag > config.schedule.max_lag for lag in lags]
    if all(is_stale) or (config.schedule.stale == "drop" and any(is_stale)):
        return False
    has_parts = any(rollout.turn_rewards for rollout in scored) and config.loss.advantage == "turn"
    is_equal = len({rollout.reward for rollout in scored}) == 1 and not has_parts
    return not (config.rollouts.filter_zero_variance and is_equal)


def _advantages(group, config):
    """For each rollout the advantage of each completion token; with values the reward."""
    loss, rewards = config.loss, []
    for rollout in group:
        k, c = config.reward.overlong_tokens, rollout.num_tokens
        rewards.append(rollout.reward - (min(1, max(0, (c - (MAX_TOKENS - k)) / k)) if k else 0))
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    found = []
    for i, rollout in enumerate(group):
        others = [reward for j, reward in enumerate(rewards) if j != i]
        if loss.advantage != "turn":
            advantage = {
                "leave_one_out": rewards[i] - sum(others) / len(others),
                "group_mean": rewards[i] - mean,
                "standardized": (rewards[i] - mean) / (std + 1e-4),
                "value": rewards[i],
            }[loss.advantage]
            found.append([advantage] * rollout.num_tokens)
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
        found.append(advantages)
    return found


def _add_rollout(rollout, advantages, weight, config, figures, of_logits, of_values):
    """Add the gradient of the terms of a rollout with respect to its logits and values."""
    loss, temperature = config.loss, config.rollouts.temperature
    logits, ref_logprobs, values = (figure.astype(np.float64) for figure in figures)
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
    by_token = loss.advantage in ("turn", "value")
    slopes = dict.fromkeys(trained, 0.0)  # d loss / d trainer_logprob, by token
    for t in trained:
        advantage = advantages[t] - (values[t] if loss.advantage == "value" else 0)
        is_masked = loss.negative_kl_max and -mean_log_ratio > loss.negative_kl_max and advantage < 0
        if is_masked:
            pass
        elif loss.kind == "gspo":
            slope = -_bounded_slope(math.exp(mean_log_ratio), advantage, loss)
            for other in [t] if by_token else trained:  # GSPO-token, or the gradient of the mean
                slopes[other] += slope / (1 if by_token else len(trained))
        else:
            slopes[t] += _slope(loss, logprobs[t], log_ratios[t], advantage, lags[t])
        if loss.kl_coefficient:
            plain = 1 - math.exp(ref_logprobs[t] - logprobs[t])
            weighted = math.exp(log_ratios[t]) * (logprobs[t] - ref_logprobs[t])
            slopes[t] += loss.kl_coefficient * (weighted if loss.kl_weighted else plain)
        if loss.advantage == "value":
            of_values[t] += weight * loss.value_coefficient * (values[t] - advantages[t])
    for t in trained:
        probabilities = np.exp(tables[t])
        entropy = -(probabilities * tables[t]).sum()
        of_logprob = (np.arange(WORDS) == ids[t]) - probabilities
        of_entropy = -probabilities * (tables[t] + entropy)
        of_logits[t] += weight / temperature * (slopes[t] * of_logprob - loss.entropy_bonus * of_entropy)


def _slope(loss, logprob, log_ratio, advantage, lag):
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
    return -_bounded_slope(ratio, advantage, loss)


def _bounded_slope(x, advantage, loss):
    """dp / d log x for p(x) of docs/algorithms.md: x * A where p is x * A, and 0 where p is a bound."""
    bounded = min(max(x, 1 - loss.clip_low), 1 + loss.clip_high)
    if bounded * advantage < x * advantage:
        return 0.0
    if advantage < 0 and loss.dual_clip and x * advantage < loss.dual_clip * advantage:
        return 0.0
    return x * advantage
