"""Every combination of settings of the objective is refused in one line or has the gradient of docs/algorithms.md."""

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.combinations import (
    AXES,
    OPTIONS,
    accepts_key,
    all_combinations,
    as_markdown,
    refusal,
    values_of,
)
from tests.unit.algo.objective_case import config_of, measured, wanted

# Narrow bounds, so that every clip of every loss acts on some tokens of the case.
NARROW = {
    "reinforce": {"ratio_max": 1.2},
    "cispo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "icepop": {"ratio_min": 0.8, "ratio_max": 1.5},
    "decoupled_ppo": {"clip_low": 0.1, "clip_high": 0.1, "ratio_max": 1.1},
    "dppo": {"divergence_max": 0.05, "ratio_max": 1.4},
}
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors of a few numbers: handing them to other threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cases():
    """Each combination of AXES alone, and with a random half of OPTIONS; refused options are left out."""
    rng = random.Random(3)
    for settings in all_combinations():
        yield settings, {}
        keys = [key for key in OPTIONS if accepts_key(settings, key)]
        yield settings, {key: OPTIONS[key] for key in keys if rng.random() < 0.5}


def check(settings, options):
    """Raises AssertionError unless the case is refused in one line or its gradients agree; returns what was compared,
    or None if the axes alone are refused."""
    while message := refusal({**settings, **options}):
        assert "\n" not in message
        assert "Set " in message
        if not options:
            return None
        options = dict(list(options.items())[:-1])
    narrow = {f"loss.{key}": value for key, value in NARROW.get(settings["loss.kind"], {}).items()}
    config = config_of(values_of({**narrow, **settings, **options}))
    found, exact = measured(config), wanted(config)
    for part in (0, 1):
        difference = np.concatenate([(found[key][part] - exact[key][part]).ravel() for key in exact])
        size = np.linalg.norm(np.concatenate([exact[key][part].ravel() for key in exact]))
        assert size > 0 or (part == 1 and config.loss.advantage != "value"), (settings, options)
        assert np.linalg.norm(difference) <= TOLERANCE * size, (settings, options, np.linalg.norm(difference) / size)
    return {**settings, **options}


def test_a_sample_of_combinations():
    compared = [check(*case) for case in random.Random(0).sample(list(cases()), 160)]
    assert sum(one is not None for one in compared) > 120


@pytest.mark.slow
def test_all_combinations_with_every_pair_of_options():
    compared = [done for case in cases() if (done := check(*case)) is not None]
    assert len(compared) == 2 * (1200 - 120)
    alone = [(key, value) for key, values in AXES.items() for value in values] + list(OPTIONS.items())
    seen = {pair for one in compared for pair in combinations(sorted(one.items(), key=str), 2)}
    pairs = [pair for pair in combinations(sorted(alone, key=str), 2) if pair[0][0] != pair[1][0]]
    unseen = [pair for pair in pairs if pair not in seen]
    assert all(refusal(dict(pair)) for pair in unseen), unseen


def test_the_page_is_what_the_command_writes():
    assert Path("docs/combinations.md").read_text(encoding="utf-8") == as_markdown(), (
        "run python -m pipelinerl_core.algo.combinations > docs/combinations.md"
    )
