"""Simulated runs on the real ledger, against the formulas of the PipelineRL paper (arXiv:2509.19128, appendix A)
and the rules of the schedules."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pipelinerl_core.config import RunConfig
from pipelinerl_core.emulation.accelerators import EmulatedSpeeds
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.planning import simulator
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.preemptions import read_trace
from pipelinerl_core.planning.simulator import Preemption, SimulatedRun, Work, simulate
from pipelinerl_core.planning.speeds import Line, MeasuredSpeeds

LENGTHS = Lengths.uniform(400)
SKIP = 20


def planned(**changes: dict[str, Any]) -> RunConfig:
    """8 accelerators, of which 4 generate with 32 sequences each; steps of 64 rollouts."""
    values: dict[str, dict[str, Any]] = {
        "rollouts": {"group_size": 2},
        "engine": {"concurrency": 64},
        "schedule": {"max_lag": 8},
        "trainer": {"groups_per_step": 32, "steps": 100},
        "placement": {"actors": 2},
        "emulation": {"accelerators": 8, "generators": 4, "token_seconds": 1e-4, "saturation": 50},
    }
    for section, settings in changes.items():
        values[section] = {**values.get(section, {}), **settings}
    return build_config(values)


def simulated(config: RunConfig, **values: Any) -> SimulatedRun:
    return simulate(config, EmulatedSpeeds.of(config), Work(**({"lengths": LENGTHS} | values)))


def per_flash(run: SimulatedRun, config: RunConfig) -> float:
    return run.throughput(SKIP) * config.emulation.token_seconds


@pytest.mark.parametrize("train_token_seconds", [5e-5, 1e-4, 2e-4])
def test_the_pipeline_has_the_throughput_of_the_paper(train_token_seconds):
    """The engines are the bottleneck with the first two values, the trainer with the last."""
    config = planned(emulation={"train_token_seconds": train_token_seconds})
    expected = min(32 / 50 * 4, 4 / (train_token_seconds / 1e-4))  # U(H) I and (N - I) / tau
    assert per_flash(simulated(config), config) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("steps", [1, 4])
def test_conventional_has_the_throughput_of_the_paper(steps):
    config = planned(
        schedule={"kind": "conventional", "steps_per_phase": steps},
        engine={"concurrency": 64 * steps},
        placement={"actors": 1},
    )
    run = simulated(config)
    running = 64 * steps * LENGTHS.running / 8  # sequences on each accelerator after t decode steps
    flashes = (running / np.minimum(1, running / 50)).sum()
    tau = config.emulation.train_token_seconds / 1e-4
    expected = 1 / (flashes / (64 * steps * LENGTHS.mean) + tau / 8)
    assert per_flash(run, config) == pytest.approx(expected, rel=0.02)
    assert run.max_lag(SKIP) == steps - 1


def test_lengths_by_hand():
    lengths = Lengths.uniform(3)
    assert lengths.mean == pytest.approx(2)
    assert lengths.running == pytest.approx([1, 2 / 3, 1 / 3])
    assert Lengths.of([1, 3, 3, 3]).shares == pytest.approx([0.25, 0, 0.75])


def test_drawn_lengths_have_the_distribution():
    drawn = Lengths.of([1, 3, 3, 3]).draw(np.random.default_rng(0), 2_500, 4).ravel()
    assert set(drawn) == {1, 3}
    assert np.mean(drawn) == pytest.approx(2.5, rel=0.02)


def test_prompts_are_trained_with_every_completion():
    config = planned(emulation={"train_token_seconds": 2e-4})
    expected = 4 / (2 * (1 + 100 / LENGTHS.mean))
    assert per_flash(simulated(config, prompt_tokens=100), config) == pytest.approx(expected, rel=0.02)


def test_a_small_window_leaves_slots_empty_and_lowers_the_lag():
    wide, narrow = (
        simulated(planned(schedule={"max_lag": lag}, emulation={"train_token_seconds": 5e-5})) for lag in (8, 1)
    )
    assert narrow.busy_slots < 0.95 < wide.busy_slots
    assert narrow.throughput(SKIP) < wide.throughput(SKIP)
    assert narrow.mean_lag(SKIP) < wide.mean_lag(SKIP)


@pytest.mark.parametrize(
    "schedule",
    [
        {"max_lag": 1, "stale": "mask"},
        {"max_lag": 1, "stale": "drop"},
        {"max_lag": 1, "stale": "wait"},
        {"max_lag": 2, "kind": "april"},
        {"max_lag": 3, "kind": "conventional", "steps_per_phase": 4},
    ],
)
def test_every_schedule_ends_and_accounts_for_every_token(schedule):
    config = planned(schedule=schedule, engine={"concurrency": 48}, trainer={"steps": 30})
    run = simulated(config, equal_share=0.1, swap_seconds=0.05, publish_seconds=0.1)
    assert len(run.steps) == 30
    generated = run.tokens["generated"]
    assert generated == sum(num for name, num in run.tokens.items() if name != "generated")
    assert sum(step.tokens for step in run.steps) == run.tokens["trained"] + run.tokens["masked_stale"]
    assert (run.tokens["dropped_stale"] > 0) == (schedule.get("stale") == "drop")


def test_a_filtered_group_is_replaced():
    config = planned(rollouts={"filter_zero_variance": True}, trainer={"steps": 40})
    tokens = simulated(config, equal_share=0.5).tokens
    assert tokens["filtered"] == pytest.approx(tokens["trained"], rel=0.15)


def test_swaps_and_prefill_cost_time():
    config = planned(emulation={"train_token_seconds": 5e-5})
    free, swapping, reading = (
        per_flash(simulated(config, **costs), config)
        for costs in ({}, {"swap_seconds": 0.05}, {"prompt_tokens": 50, "prefill_token_seconds": 1e-5})
    )
    step_seconds = 64 * 200.5 * 1e-4 / free
    assert swapping == pytest.approx(free * step_seconds / (step_seconds + 0.05), rel=0.02)
    assert reading == pytest.approx(free * step_seconds / (step_seconds + 32 * 50 * 1e-5), rel=0.02)


def test_the_seed_decides_the_run():
    config = planned(trainer={"steps": 5})
    assert simulated(config) == simulated(config)
    assert simulated(config) != simulated(config.model_copy(update={"seed": 1}))


def test_configurations_that_cannot_be_simulated_are_refused():
    with pytest.raises(ConfigError, match="drain"):
        simulated(planned(engine={"kv": "drain"}))
    with pytest.raises(ConfigError, match="never trains"):
        Work(lengths=LENGTHS, equal_share=1.0)
    with pytest.raises(ConfigError, match="Simulate more steps"):
        simulated(planned(trainer={"steps": 5})).throughput(SKIP)


@dataclass(frozen=True)
class Constant:
    """Decode steps of 1 s and optimizer steps of 10 s."""

    def decode_seconds(self, num_running: int) -> float:
        return 1.0

    def train_seconds(self, num_tokens: int) -> float:
        return 10.0


ONE_LENGTH = Lengths.of([4])


def turns(**values: Any) -> SimulatedRun:
    """Conventional steps of two groups of two, which fill the slots: generation takes 4 s, training 10 s."""
    config = build_config(
        {
            "rollouts": {"group_size": 2},
            "engine": {"concurrency": 4},
            "trainer": {"groups_per_step": 2, "steps": 6},
            "schedule": {"kind": "conventional", "steps_per_phase": 1, "max_lag": 0},
        }
    )
    return simulate(config, Constant(), Work(lengths=ONE_LENGTH, **values))


def test_a_step_in_turns_lasts_as_long_as_its_parts():
    """Without latency 4 + 10 s; each latency is added once, because the parts wait for each other."""
    assert turns().steps[1].at - turns().steps[0].at == pytest.approx(14)
    run = turns(commit_seconds=0.5, publish_seconds=0.25, fetch_seconds=0.125, arrival_seconds=1.0, swap_seconds=0.0)
    assert run.steps[2].at - run.steps[1].at == pytest.approx(14 + 0.5 + 0.25 + 0.125 + 1.0)


def test_the_trainer_waits_for_groups_and_rows_but_not_for_its_snapshot():
    """Wait of a step: generation and swap after the commit, minus the snapshot, and the time of the rows."""
    run = turns(snapshot_seconds=0.5, fetch_seconds=0.25)
    assert run.steps[2].wait_seconds == pytest.approx(4 - 0.5 + 0.25)


def test_an_engine_syncs_at_the_next_multiple_of_the_interval():
    """Two engines, one sync per second each, half a second apart; a second request adds no sync."""
    config = planned(placement={"actors": 2})
    simulation = simulator._Simulation(config, Constant(), Work(lengths=ONE_LENGTH, sync_seconds=1.0))
    simulation._now = 2.3
    for number in (0, 1, 0):
        simulation._sync_soon(number)
    assert sorted(time for time, _, _ in simulation._events) == [2.5, 3.0]


def paced(**values: Any) -> SimulatedRun:
    """Engines four times as fast as the trainer."""
    config = build_config(
        {
            "rollouts": {"group_size": 2},
            "engine": {"concurrency": 8, "pace": True},
            "trainer": {"groups_per_step": 4, "steps": 60},
            "schedule": {"max_lag": 6},
        }
    )
    speeds = MeasuredSpeeds(decode=Line(0.01, 0.0, 1, 8), train=Line(2.0, 0.0, 1, 100))
    return simulate(config, speeds, Work(lengths=Lengths.of([50]), **values))


def test_paced_engines_keep_their_slots_full_with_less_lag():
    full, slowed = paced(), paced(sync_seconds=0.05)
    assert full.mean_lag(SKIP) > 5, "groups age at the window"
    assert slowed.mean_lag(SKIP) < 4
    assert slowed.throughput(SKIP) == pytest.approx(full.throughput(SKIP), rel=0.05)
    assert slowed.busy_slots > full.busy_slots
    assert slowed.delay_seconds > 0.001


def test_a_cache_for_half_of_the_sequences_halves_the_slots_in_use():
    config = planned(engine={"concurrency": 8}, trainer={"steps": 60})
    speeds = MeasuredSpeeds(decode=Line(0.01, 0.0, 1, 8), train=Line(0.001, 0.0, 1, 100))
    run = simulate(config, speeds, Work(lengths=ONE_LENGTH, prompt_tokens=6, cache_tokens=40))
    assert run.busy_slots == pytest.approx(0.5, abs=0.02)
    assert run.waited_for_cache > 0.9


def test_a_slower_actor_has_the_throughput_of_its_speed():
    """The actors of speeds 1 and 0.5 generate 1.5 times as much as one actor."""
    config = planned(emulation={"train_token_seconds": 1e-6})
    both = simulated(config).throughput(SKIP)
    assert simulated(config, actor_speeds=(1.0, 0.5)).throughput(SKIP) == pytest.approx(0.75 * both, rel=0.03)


@pytest.mark.parametrize(
    ("event", "later"),
    [
        (Preemption(2.0, "actor-0", 5.0), 6),  # of 2 tokens, the log has the first; 3 tokens from 7 s on
        (Preemption(3.0, "actor-0", 5.0, 1.0), 6),  # SIGTERM at 2 s: the log has 2 tokens; 2 tokens from 8 s on
        (Preemption(8.0, "trainer", 5.0), 9),  # the step that began at 4 s begins at 13 s
        (Preemption(20.0, "trainer", 5.0), 17),  # step 2 began at 18 s; step 1 is trained again, then step 2 at 35 s
        (Preemption(29.0, "trainer", 1.0, 3.0), 0),  # step 2 ends at 28 s; the groups of step 3 at 32 s
        (Preemption(29.0, "trainer", 5.0, 3.0), 2),  # step 2 has a checkpoint; step 3 begins at 34 s
        (Preemption(15.0, "hub", 5.0), 2),  # the groups of 18 s arrive at 20 s
    ],
)
def test_a_preemption_costs_the_time_worked_out_by_hand(event, later):
    assert turns(preemptions=(event,)).steps[-1].at == turns().steps[-1].at + later


def test_a_role_starts_after_its_machine_is_back():
    event = Preemption(8.0, "trainer", 5.0)
    assert turns(preemptions=(event,), start_seconds=3.0).steps[-1].at == turns().steps[-1].at + 12


@pytest.mark.parametrize("notice", [0, 3])
@pytest.mark.parametrize("schedule", [{}, {"kind": "april"}, {"stale": "drop"}], ids=str)
def test_preemptions_lose_no_group_and_train_none_twice(schedule, notice):
    """The ledger refuses a group that arrives or is trained twice; its accounts of tokens balance."""
    config = planned(schedule={"max_lag": 2} | schedule, trainer={"steps": 40})
    trace = read_trace(f"actors=15,trainer=20,hub=50,away=4,notice={notice}", config, 1000)
    times = {"arrival_seconds": 0.05, "commit_seconds": 0.1, "publish_seconds": 0.02, "start_seconds": 1.0}
    run = simulated(config, preemptions=tuple(trace), equal_share=0.1, **times)
    assert len(run.steps) == 40
    assert run.tokens["generated"] == sum(num for name, num in run.tokens.items() if name != "generated")
    assert sum(step.tokens for step in run.steps) == run.tokens["trained"] + run.tokens["masked_stale"]
    if notice == 0:
        assert run.tokens["superseded"] > 0  # what the logs lack


def test_a_sequence_that_cannot_fit_the_cache_is_refused():
    with pytest.raises(ConfigError, match=r"one sequence of 10 \+ 4 tokens does not fit the KV cache .* 13 tokens"):
        Work(lengths=ONE_LENGTH, prompt_tokens=10, cache_tokens=13)


@pytest.mark.parametrize("kind", ["pipeline", "april"])
def test_scoring_delays_groups_and_loses_none(kind):
    """The leases of groups that are being scored stay with their actor."""
    config = planned(schedule={"kind": kind}, emulation={"train_token_seconds": 2e-4})
    scored = simulated(config, arrival_seconds=0.05)
    assert "superseded" not in {name for name, num in scored.tokens.items() if num}
    assert scored.throughput(SKIP) == pytest.approx(simulated(config).throughput(SKIP), rel=0.1)


def test_a_paced_engine_takes_as_long_per_token_without_its_pauses_as_an_engine_at_full_speed():
    speeds = MeasuredSpeeds(decode=Line(0.01, 0.0, 1, 64), train=Line(0.0, 2e-4, 1, 100_000))
    config = planned(engine={"pace": True}, placement={"actors": 1}, emulation={"accelerators": 0})
    run = simulate(config, speeds, Work(lengths=LENGTHS, sync_seconds=0.05))
    assert run.delay_seconds > 0.001
    assert run.seconds_per_token == pytest.approx(0.01, rel=0.02)


def test_measured_groups_are_drawn_whole_and_in_the_course_of_the_run():
    random = np.random.default_rng(0)
    early, late = [[1, 2, 3, 2]] * 300, [[40, 50, 60, 50]] * 300
    lengths = Lengths.of_groups([*early, *late])
    assert lengths.mean == pytest.approx(50), "the newer half"
    assert lengths.draw(random, 100, 4).tolist() == early[:100]
    assert lengths.draw(random, 5, 4, first=1000).tolist() == late[:5]
    other_size = lengths.draw(random, 50, 8, first=1000)
    assert other_size.shape == (50, 8)
    assert set(other_size.ravel()) == {40, 50, 60}
    assert lengths.scaled(2.0, 100).draw(random, 1, 4, first=1000).tolist() == [[80, 100, 100, 100]]
    many = Lengths.of_groups([[1, 1], [9, 9]] * 5000)
    assert not many.is_course
    assert len(many.groups) <= 4096


def test_groups_whose_completions_are_alike_are_complete_sooner():
    """With the same lengths of completions, a group is complete with its longest one."""
    config = planned(
        rollouts={"group_size": 4}, trainer={"groups_per_step": 16}, emulation={"train_token_seconds": 5e-5}
    )
    groups = np.random.default_rng(1).integers(1, 400, size=(2000, 1))
    alike = Lengths.of_groups(np.repeat(groups, 4, axis=1).tolist())
    apart = Lengths.of(groups.ravel().tolist())
    assert simulated(config, lengths=alike).mean_lag(SKIP) < 0.9 * simulated(config, lengths=apart).mean_lag(SKIP)
