"""Emulated accelerators: the least times by hand, waits that are exact on average, and what real work took beyond."""

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest

from pipelinerl_core.config import RunConfig
from pipelinerl_core.emulation import accelerators as emulation
from pipelinerl_core.emulation.accelerators import EmulatedClock, EmulatedLearner, EmulatedSpeeds
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.models.resolve import build_config
from tests.builders import completion_of, engine_request
from tests.models import tiny_model


def config(kind="pipeline", actors=1, accelerators=6, generators=2, **changes):
    emulated = {"accelerators": accelerators, "generators": generators, "token_seconds": 0.001, "saturation": 50}
    return build_config(
        {
            "schedule": {"kind": kind},
            "placement": {"actors": actors},
            "emulation": {**emulated, "train_token_seconds": 0.0004, **changes},
        }
    )


@pytest.mark.parametrize(
    ("settings", "num_running", "milliseconds"),
    [
        # pipeline: 2 of 6 generate. Below 50 sequences on each a step takes as long as for 50.
        ({}, 1, 50),
        ({}, 100, 50),
        ({}, 101, 51),
        ({}, 400, 200),
        # two actors have one accelerator each
        ({"actors": 2}, 50, 50),
        ({"actors": 2}, 200, 200),
        # four actors have half of one: 25 sequences on half an accelerator are 50 on a whole one
        ({"actors": 4}, 25, 50),
        ({"actors": 4}, 60, 120),
        # in turn: all 6 generate
        ({"kind": "conventional"}, 300, 50),
        ({"kind": "conventional"}, 301, 51),
        ({"kind": "conventional"}, 1200, 200),
        ({"kind": "april", "actors": 2}, 600, 200),
        ({"saturation": 1}, 7, 4),
    ],
)
def test_a_decode_step_takes_t0_h_over_u_of_the_share_of_an_accelerator(settings, num_running, milliseconds):
    assert EmulatedSpeeds.of(config(**settings)).decode_seconds(num_running) * 1e3 == pytest.approx(milliseconds)


def test_an_optimizer_step_is_spread_over_the_accelerators_that_train():
    assert EmulatedSpeeds.of(config()).train_seconds(10_000) == pytest.approx(1.0)  # 10,000 x 0.4 ms / 4
    in_turn = EmulatedSpeeds.of(config("conventional"))
    assert in_turn.train_seconds(10_000) == pytest.approx(4.0 / 6)


def test_pipeline_generates_as_the_paper_says_and_trains_at_the_same_time():
    # r_pipe = min(U(H) * I / t0, T / tau) with 100 and 300 sequences in flight on 2 accelerators of saturation 100
    speeds = EmulatedSpeeds.of(config(saturation=100))
    for running, tokens_per_second in ((100, 0.5 * 2 / 0.001), (300, 1.0 * 2 / 0.001)):
        assert running / speeds.decode_seconds(running) == pytest.approx(tokens_per_second)


def test_nothing_is_emulated_unless_accelerators_are_given():
    learner = object()
    assert emulation.emulated_clock(RunConfig()) is None
    assert emulation.emulated_learner(learner, RunConfig()) is learner
    assert isinstance(emulation.emulated_clock(config()), EmulatedClock)
    assert isinstance(emulation.emulated_learner(learner, config()), EmulatedLearner)


async def finish(engine, seed, max_tokens):
    return await completion_of(engine, engine_request(str(seed), seed=seed, max_tokens=max_tokens))


def engine_of(clock=None, slots=3):
    engine = EmbeddedEngine(tiny_model(), slots=slots, max_len=128, eos_token_ids=[])
    if clock is not None:
        engine.set_clock(clock)
    return engine


def generate(clock, *, slots=3, max_tokens=40, num=5):
    async def main():
        engine = engine_of(clock, slots)
        return await asyncio.gather(*(finish(engine, seed, max_tokens) for seed in range(num)))

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_an_emulated_engine_samples_the_same_tokens():
    clock = EmulatedClock(EmulatedSpeeds.of(config(token_seconds=4e-5)))
    for real, emulated in zip(generate(None), generate(clock), strict=True):
        assert real.token_ids.tolist() == emulated.token_ids.tolist()
        assert real.rollout_logprobs.tolist() == emulated.rollout_logprobs.tolist()


class Watched(EmulatedClock):
    """Measures the steps alone, up to the end of the last one, without what they overran."""

    def start(self):
        super().start()
        self.began = time.perf_counter()

    def rest_seconds(self, num_running, delay_seconds):
        rest_seconds = super().rest_seconds(num_running, delay_seconds)
        self.worked_seconds = time.perf_counter() - self.began - self.overrun_seconds
        return rest_seconds


def test_the_mean_decode_step_is_within_3_percent_of_the_emulated_step():
    speeds = EmulatedSpeeds.of(config(token_seconds=1.2e-4))  # 6 ms: a sleep alone would end some 10 % late
    clock = Watched(speeds)
    generate(clock, slots=2, num=2, max_tokens=100)
    assert clock.worked_seconds / 100 == pytest.approx(speeds.decode_seconds(2), rel=0.03)


def test_a_pace_comes_on_top_and_a_swap_is_no_part_of_a_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(emulation, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))
    clock = EmulatedClock(EmulatedSpeeds.of(config()))
    clock.start()
    now[0] += 0.010  # real work; 50 ms are emulated
    assert clock.rest_seconds(1, 0.0) == pytest.approx(0.040)
    now[0] += 0.041 + 0.010  # the sleep ended 1 ms late
    assert clock.rest_seconds(1, 0.020) == pytest.approx(0.059)
    now[0] += 0.059 + 0.010
    clock.extend(0.005)
    assert clock.rest_seconds(1, 0.0) == pytest.approx(0.045)
    assert clock.overrun_seconds == 0.0
    now[0] += 0.045 + 0.070  # 20 ms too long: made up for by the next step
    assert clock.rest_seconds(1, 0.0) == 0.0
    assert clock.overrun_seconds == 0.0
    now[0] += 0.010
    assert clock.rest_seconds(1, 0.0) == pytest.approx(0.020)
    now[0] += 0.020 + 0.120  # 70 ms too long, 20 ms more than a step: those are overrun
    assert clock.rest_seconds(1, 0.0) == 0.0
    assert clock.overrun_seconds == pytest.approx(0.020)
    now[0] += 5.0  # the engine stood still
    clock.start()
    now[0] += 0.010
    assert clock.rest_seconds(1, 0.0) == pytest.approx(0.040)
    assert clock.overrun_seconds == pytest.approx(0.020)


def test_overrun_is_logged_once_a_minute_with_its_share(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(emulation, "time", SimpleNamespace(monotonic=lambda: now[0]))
    overrun = emulation.Overrun("decoding")
    with caplog.at_level(logging.WARNING):
        for _ in range(130):
            now[0] += 1.0
            overrun.add(late_seconds=0.1, emulated_seconds=0.4)
        assert [record.getMessage() for record in caplog.records] == [
            "emulation: real decoding took 25 % longer than emulated"
        ] * 2
        caplog.clear()
        for _ in range(130):
            now[0] += 1.0
            overrun.add(late_seconds=0.0, emulated_seconds=0.4)
    assert len(caplog.records) <= 1
    assert overrun.seconds == pytest.approx(13.0)


class Learner:
    version = 6

    def __init__(self, work):
        self._work = work

    def step(self, rows):
        self._work()
        self.version += 1
        return {"train/tokens": 1000.0}


@pytest.mark.parametrize(("real_seconds", "lasts", "overrun"), [(0.02, 0.1, 0.0), (0.25, 0.25, 0.15)])
def test_an_optimizer_step_waits_only_where_real_work_was_faster(monkeypatch, real_seconds, lasts, overrun):
    now = [100.0]

    def pass_time(seconds):
        now[0] += seconds

    fake = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0], sleep=pass_time)
    monkeypatch.setattr(emulation, "time", fake)
    learner = EmulatedLearner(Learner(lambda: pass_time(real_seconds)), EmulatedSpeeds.of(config()))
    stats = learner.step([])  # 1,000 tokens on four accelerators: 0.1 s
    assert stats["time/compute_seconds"] == pytest.approx(lasts)
    assert now[0] == pytest.approx(100.0 + lasts)
    assert learner._overrun.seconds == pytest.approx(overrun)
    assert learner.version == 7
