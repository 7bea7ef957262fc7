"""A report of emulated speeds says so, and how far real work fell behind them."""

import pytest

from pipelinerl_core.emulation.report_lines import emulation
from pipelinerl_core.messages import ActorSample
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.run.records import RUN_KEY, RunRecord
from tests.synthetic_run import START, Shape, build_report, make_commit, put_record, render_report, write_run


def settings(kind="pipeline"):
    emulated = {"accelerators": 4, "generators": 1, "train_token_seconds": 0.0003}
    config = {"schedule": {"kind": kind}, "emulation": emulated}
    return build_config(config).model_dump(mode="json")


def commit(step, *, compute_seconds, tokens, overrun):
    sample = ActorSample(
        at=START,
        engine_version=step,
        running=1,
        waiting=0,
        concurrency=1,
        num_tokens=1,
        running_seconds=1.0,
        counters={"emulation_overrun_seconds": overrun},
    )
    metrics = {"time/compute_seconds": compute_seconds, "train/tokens": tokens}
    changes = {"metrics": metrics, "actors": {"actor-0/1": sample, f"actor-1/{step}": sample}}
    return make_commit(step).model_copy(update=changes)


COMMITS = [
    commit(1, compute_seconds=1.0, tokens=10_000.0, overrun=0.25),  # 10,000 x 0.3 ms / 3 = 1 s
    commit(2, compute_seconds=2.502, tokens=20_000.0, overrun=0.5),  # half a second too long, 2 ms are no matter
]


def test_real_speed_has_no_emulation():
    assert emulation(build_config({}).model_dump(mode="json"), COMMITS) is None
    assert emulation({}, []) is None


def test_accelerators_are_split_or_taken_in_turn():
    figures = emulation(settings(), COMMITS)
    assert (figures["generators"], figures["trainers"]) == (1, 3)
    assert "4 accelerators (1 generate, 3 train)" in figures["note"]
    figures = emulation(settings("conventional"), COMMITS)
    assert (figures["generators"], figures["trainers"]) == (4, 4)
    assert "4 accelerators (in turn)" in figures["note"]


def test_overruns_are_summed_over_actor_epochs_and_over_steps():
    figures = emulation(settings(), COMMITS)
    assert figures["decode_overrun_seconds"] == pytest.approx(0.5 + 0.25 + 0.5)  # actor-1 was restarted
    assert figures["train_overrun_seconds"] == pytest.approx(0.5)
    assert "1.2 s longer than that in decoding and 0.5 s in training" in figures["note"]


def test_report_and_page_show_the_emulation_and_the_page_shows_the_note_at_the_top(store):
    run = write_run(store, Shape(steps=3))
    assert build_report(store)["emulation"] is None
    assert "Speeds are emulated" not in render_report(store)
    config = {**run.config, "emulation": settings()["emulation"]}
    put_record(store, RUN_KEY, RunRecord.model_validate({**run.model_dump(), "config": config}))
    assert build_report(store)["emulation"]["accelerators"] == 4
    page = render_report(store)
    assert page.index("Speeds are emulated: 4 accelerators") < page.index("<h1>")
