"""A peer's points as an arm, with numbers worked out by hand."""

import json
from dataclasses import replace

import pytest

from benchmarks.peer_points import peer_key, peer_run, read_peer
from benchmarks.run_peers import parse_peers, peer_runs
from pipelinerl_core.comparison.analysis import compare, run_figures
from pipelinerl_core.comparison.plan import Wanted
from pipelinerl_core.errors import ConfigError

DOCUMENT = {
    "name": "trl",
    "seed": 1,
    "settings": {},
    "config": {},
    "points": [
        {"step": 0, "seconds": 0.0, "samples": 0, "reward": None, "accuracy": 0.2},
        {"step": 2, "seconds": 8.0, "samples": 200, "reward": 0.4, "accuracy": 0.4},
        {"step": 4, "seconds": 20.0, "samples": 400, "reward": 0.6, "accuracy": 0.6},
    ],
    "rewards": [0.3, 0.4, 0.5, 0.6],
    "step_seconds": [5.0, 3.0, 6.0, 6.0],
}


def test_a_peer_reaches_the_target_between_two_of_its_points():
    figures = run_figures(peer_run(DOCUMENT), 0.5)
    assert figures["time_to_target_seconds"] == 14.0
    assert figures["samples_to_target"] == 300.0
    assert figures["rollouts_per_second"] == 300.0 / 15.0, "after the first step"
    assert figures["ess_mean"] is None
    assert figures["engine_cpu_seconds"] is None


def test_a_peer_is_an_arm_beside_others_with_the_same_seed():
    peer = peer_run(DOCUMENT)
    table = compare([peer], ["trl"], "trl", 0.5)
    assert table["arms"]["trl"]["time_to_target_seconds"]["by_seed"] == {"1": 14.0}


def test_a_peer_that_was_not_evaluated_is_no_arm_yet(store):
    assert read_peer(store, "trl-s1-0") is None
    raw = {**DOCUMENT, "points": [{"step": 0, "seconds": 0.0, "samples": 0, "reward": None}]}
    store.put(peer_key("trl-s1-0"), json.dumps(raw).encode())
    assert read_peer(store, "trl-s1-0") is None
    store.put(peer_key("trl-s1-0"), json.dumps(DOCUMENT).encode())
    peer = read_peer(store, "trl-s1-0")
    assert peer is not None
    assert peer.accuracies == {0: 0.2, 2: 0.4, 4: 0.6}


def test_a_peer_has_its_own_settings_over_the_suites_and_under_the_users():
    wanted = Wanted(source="quickstart", arms=(), seeds=(0, 1), target=0.5)
    peers = parse_peers("trl,sequential", ("learner.lr=1e-4", "trainer.steps=7"), ())
    runs = peer_runs(peers, wanted)
    assert [(run.arm, run.seed, run.config.learner.lr) for run in runs] == [
        ("trl", 0, 2e-4),
        ("sequential", 0, 1e-4),
        ("trl", 1, 2e-4),
        ("sequential", 1, 1e-4),
    ]
    assert {run.config.trainer.steps for run in runs} == {7}
    (mine,) = peer_runs(parse_peers("trl", ("learner.lr=1e-4",), ("learner.lr=3e-4",)), replace(wanted, seeds=(0,)))
    assert mine.config.learner.lr == 3e-4
    assert mine.run_id != runs[0].run_id, "other settings are another run"
    (later,) = peer_runs(peers[:1], replace(wanted, seeds=(0,), target=0.6))
    assert later.run_id != runs[0].run_id, "another target stops elsewhere"


def test_a_name_that_is_no_peer_is_refused():
    with pytest.raises(ConfigError, match="there are trl, sequential"):
        parse_peers("verl", (), ())
