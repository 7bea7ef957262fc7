"""Every combination of settings of the objective is refused in one line or has the gradient of docs/algorithms.md."""

import inspect
import random
import textwrap
from itertools import chain, combinations, islice

import numpy as np
import pytest
import torch

from pipelinerl_core.algo import advantages, shaping, staleness, weighting
from pipelinerl_core.algo.logprobs import _log_softmax
from pipelinerl_core.algo.losses import LOSSES, TrainedTokens, compute_loss
from pipelinerl_core.algo.losses.decoupled import proximal_logprobs
from pipelinerl_core.algo.losses.divergence import divergence
from pipelinerl_core.algo.losses.surrogate import surrogate
from pipelinerl_core.batching import assemble, collate, pack
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.ledger import order
from pipelinerl_core.training.policy import pack_loss
from tests.unit.algo.combinations import (
    AXES,
    OPTIONS,
    accepts_key,
    all_combinations,
    base_of,
    refusal,
    values_of,
)
from tests.unit.algo.objective_case import config_of, measured, random_case, wanted

KINDS = AXES["loss.kind"]
# Narrow bounds, so that every clip of every loss acts on some tokens of a case.
NARROW = {
    "reinforce": {"ratio_max": 1.2},
    "cispo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "icepop": {"ratio_min": 0.8, "ratio_max": 1.5},
    "decoupled_ppo": {"clip_low": 0.1, "clip_high": 0.1, "ratio_max": 1.1},
    "dppo": {"divergence_max": 0.05, "ratio_max": 1.4},
    "sapo": {"tau_positive": 2.0, "tau_negative": 3.0},
    "sequence_product": {"ratio_max": 1.2, "masks": True},
}
ROUNDS, STEPS = 2, 100
TOLERANCE = 5e-6

# (function, its text, the text with an error)
ERRORS = [
    # Losses: signs, gradients of constants, bounds.
    (LOSSES["reinforce"], "= -(", "= ("),
    (LOSSES["reinforce"], "log_ratio_M.detach()", "log_ratio_M"),
    (LOSSES["reinforce"], "max=config.ratio_max", "max=2 * config.ratio_max"),
    (LOSSES["cispo"], "1.0 - config.clip_low", "0.0"),
    (LOSSES["cispo"], "log_ratio_M.detach()", "log_ratio_M"),
    (LOSSES["icepop"], "(ratio_M < config.ratio_min) | ", ""),
    (LOSSES["dppo"], " * tokens.advantages_M.sign()", ""),
    (LOSSES["dppo"], "ratio_M.clamp(max=config.ratio_max)", "ratio_M"),
    (LOSSES["gspo"], "log_ratio_M.detach() + (tokens.log_ratio_M - tokens.log_ratio_M.detach())", "log_ratio_M"),
    (LOSSES["sapo"], "tokens.advantages_M > 0", "tokens.advantages_M < 0"),
    (LOSSES["sapo"], "(4.0 / tau_M)", "4.0"),
    (LOSSES["sequence_product"], "tokens.sequence_sums", "tokens.sequence_means"),
    (LOSSES["sequence_product"], "0.0 if config.masks else config.ratio_max", "config.ratio_max"),
    (LOSSES["gspo"], "tokens.sequence_means(tokens.log_ratio_M)", "tokens.log_ratio_M"),
    (surrogate, "torch.minimum", "torch.maximum"),
    (surrogate, "(advantages_M < 0) & ", "(advantages_M > 0) & "),
    (surrogate, "1.0 + bounds.clip_high", "1.0 + bounds.clip_low"),
    (proximal_logprobs, "tokens.lags_M + 1.0", "tokens.lags_M + 2.0"),
    (proximal_logprobs, ".detach()", ""),
    # Terms that every loss may have.
    (compute_loss, "loss=sums.loss - config.entropy_bonus", "loss=sums.loss + config.entropy_bonus"),
    (compute_loss, "kl_M = ratio_M * kl_M", "kl_M = ratio_M.detach() * kl_M"),
    (divergence, "(ref_logprobs_M - trainer_logprobs_M)", "(trainer_logprobs_M - ref_logprobs_M)"),
    (TrainedTokens.sequence_means, "/ self.sequence_sums", "/ 2 / self.sequence_sums"),
    (TrainedTokens.without_far_sequences, ".abs()", ""),
    (TrainedTokens.without_far_negatives, " & (self.advantages_M < 0)", ""),
    (pack_loss, "- config.teacher_coefficient * gaps_N", ""),
    (pack_loss, "config.teacher_coefficient * gaps_N", "gaps_N"),
    (pack_loss, "config.reward_coefficient * advantages_N", "advantages_N"),
    (pack_loss, "output.trainer_logprobs_N.detach() - _logprobs", "output.trainer_logprobs_N - _logprobs"),
    (pack_loss, "- values_N.detach()", "- values_N"),
    (pack_loss, "0.5 * config.value_coefficient", "config.value_coefficient"),
    (pack_loss, "version - batch.versions_N", "version + 1 - batch.versions_N"),
    (_log_softmax, ".div_(temperature)", ""),
    # Advantages, weights, masks.
    (advantages.leave_one_out, "(len(rewards) - 1)", "len(rewards)"),
    (advantages.standardized, "(len(centred) - 1)", "len(centred)"),
    (advantages.per_turn, "sum(parts[index][:turn])", "sum(parts[index][: turn + 1])"),
    (advantages.per_turn, "else [0.0]", "else returns"),
    (shaping.overlong_penalty, "return -min", "return min"),
    (weighting.loss_weights, "(num_groups * sum(group))", "(num_groups * own_tokens)"),
    (weighting.loss_weights, "1.0 / (num_rollouts * own_tokens)", "1.0 / (num_groups * own_tokens)"),
    (weighting.loss_weights, "(num_rollouts * max_tokens)", "(step_tokens * max_tokens)"),
    (staleness.live_mask, "<= max_lag", "< max_lag"),
    (assemble._row, "rollout.loss_mask & live_C", "rollout.loss_mask"),
    (assemble._part, "if config.mixture and group", "if False"),
    (assemble._filtered, "0.0 if is_overlong else weight", "weight"),
    # Which rows and packs are trained.
    (order.is_filtered, " and not credits_turns", ""),
    (RunConfig.skips_backward.fget, " and not self.other_term", ""),
    (collate._has_gradient, "row.turn_advantages or (row.advantage,)", "(row.advantage,)"),
    (collate._token_advantages, "turn.start : turn.end", "turn.start : turn.start + 1"),
    (collate.PackBatcher.planned, "if indices else", "if len(indices) > 1 else"),
    (pack.share, "shares[rank].append(chosen)", "shares[rank] = [chosen]"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors of a few numbers: handing them to other threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draws(kind):
    """Each accepted combination of AXES for a loss, in random order, several times, with random options; every
    refusal on the way is one line that says what to set."""
    rng = random.Random(f"{kind}/1")
    accepted = [
        settings for settings in all_combinations() if settings["loss.kind"] == kind and is_accepted(settings)
    ]
    for _ in range(ROUNDS):
        for settings in rng.sample(accepted, len(accepted)):
            keys = [key for key in OPTIONS if accepts_key(settings, key) and rng.random() < 0.5]
            rng.shuffle(keys)
            drawn = dict(settings)
            for _ in range(2):  # because an option may need another option
                for key in keys:
                    if key not in drawn and is_accepted({**drawn, key: OPTIONS[key]}):
                        drawn[key] = OPTIONS[key]
            yield drawn


def is_accepted(settings):
    message = refusal(settings)
    assert not message or ("\n" not in message and "Set " in message), message
    return not message


def error_of(settings, seed, *, is_narrow=True):
    """Largest error of a gradient on a random step, as a share of the gradient's norm."""
    narrow = NARROW.get(settings["loss.kind"], {}) if is_narrow else {}
    config = config_of(values_of({**{f"loss.{key}": value for key, value in narrow.items()}, **settings}))
    case = random_case(seed % STEPS)
    errors = []
    for actual, exact in zip(measured(case, config), wanted(case, config), strict=True):
        size = np.linalg.norm(exact)
        errors.append(np.linalg.norm(actual - exact) / size if size else np.abs(actual).max())
    return max(errors)


@pytest.mark.parametrize("kind", KINDS)
def test_random_settings_have_the_gradient_of_a_second_computation(kind):
    chosen = list(draws(kind))
    errors = [error_of(settings, seed, is_narrow=seed % 4 > 0) for seed, settings in enumerate(chosen)]
    worst = int(np.argmax(np.nan_to_num(errors, nan=np.inf)))
    assert errors[worst] <= TOLERANCE, (worst, errors[worst], chosen[worst])
    assert len(chosen) == ROUNDS * 132
    # Every value was compared, and every pair of values that is not refused.
    seen = {pair for settings in chosen for pair in combinations(sorted(map(str, settings.items())), 2)}
    values = [(key, value) for key, values in AXES.items() for value in values if key != "loss.kind" or value == kind]
    values += [(key, value) for key, value in OPTIONS.items() if accepts_key({"loss.kind": kind}, key)]
    assert {str(value) for value in values} <= {value for pair in seen for value in pair}
    for pair in combinations(sorted(values, key=str), 2):
        if pair[0][0] != pair[1][0] and tuple(map(str, pair)) not in seen:
            needed = {name: value for key, _ in pair if key in OPTIONS for name, value in base_of(key).items()}
            assert not is_accepted({**needed, "loss.kind": kind, **dict(pair)}), pair


def plant(monkeypatch, function, text, error):
    """Exchange the code of a function, wherever it was imported to."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1, f"{function.__qualname__} has no longer this text once: {text}"
    planted = {}
    lines = source.replace(text, error).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("def "))  # without decorators
    exec(compile("\n".join(lines[start:]), function.__qualname__, "exec"), function.__globals__, planted)
    monkeypatch.setattr(function, "__code__", planted[function.__name__].__code__)


def label(value):
    return getattr(value, "__qualname__", None) or str(value)


@pytest.mark.parametrize(("function", "text", "error"), ERRORS, ids=label)
def test_each_error_of_a_list_is_found(monkeypatch, function, text, error):
    plant(monkeypatch, function, text, error)
    tried = chain.from_iterable(zip(*map(draws, KINDS), strict=True))  # of each loss in turn
    errors = (error_of(settings, seed) for seed, settings in enumerate(islice(tried, 1000)))
    assert any(not error <= TOLERANCE for error in errors)
