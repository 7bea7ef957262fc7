"""Status and live view: what they say, and where they write it."""

import io
import os
import socket

import psutil
import pytest
from rich.console import Console

from pipelinerl_core.report import live_view
from pipelinerl_core.report.live_view import LiveView, format_status, run_status, sparkline, status_line, status_of
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.records import HUB_KEY
from tests.builders import hub_record
from tests.fakes import MemoryStore
from tests.synthetic_run import START, Shape, build_report, put_record, write_run

LIVE = {
    "newest_version": 4,
    "tokens_per_second": 9812.0,
    "swap_pause_seconds": 0.008,
    "lengths": {"generated": {"num_tokens": 10, "first_third": 3, "last_third": 3, "length_sum": 90}},
    "actors": {"actor-0": {"running": 12, "waiting": 3, "concurrency": 16, "engine_version": 4}},
}


def hub(beat):
    return hub_record(beat=beat, live=LIVE)


@pytest.fixture
def follower():
    """Committed through step 3 of 10."""
    store = MemoryStore()
    write_run(store, Shape(steps=10))
    store.delete(key for step in range(4, 11) for key in store.list("commits") if f"/{step:08d}." in key)
    store.delete(["evals/00000010.json"])
    follower = RunFollower(store)
    follower.refresh()
    return follower


def test_a_live_run_shows_the_hub_and_its_pace(follower):
    status = status_of(follower, hub(beat=START), silent_seconds=1.0)
    assert status["state"] == "running"
    assert status["eta_seconds"] == pytest.approx(7 * 0.8)  # seven steps of 0.8 s
    assert status["actors"] == {"actor-0": {"engine_version": 4, "running": 12, "waiting": 3, "concurrency": 16}}
    assert status["length_bias"]["classes"]["generated"]["mean_length"] == 9.0
    line = status_line(status)
    assert line.startswith("step 3/10  reward ")
    assert "9,812 tokens/s  pause 8.0 ms" in line
    assert line.endswith("eta 0:06")


def test_the_time_between_two_starts_is_not_in_the_estimate(follower):
    for step in (2, 3):
        key = follower.commits.keys_by_step[step]
        commit = follower.commits[step]
        put_record(follower.store, key, commit.model_copy(update={"committed_at": commit.committed_at + 900}))
    follower = RunFollower(follower.store)
    follower.refresh()
    assert status_of(follower, hub(beat=START))["eta_seconds"] == pytest.approx(7 * 0.8)


def test_the_estimate_starts_at_the_second_step_without_the_start_of_the_engines(follower):
    commits = follower.commits.newest(4)
    first = commits[1].model_copy(update={"committed_at": commits[0].committed_at + 60})
    second = commits[2].model_copy(update={"committed_at": first.committed_at + 0.8})
    assert live_view._eta([commits[0], first], 10, 1) is None
    assert live_view._eta([commits[0], first, second], 10, 1) == pytest.approx(8 * 0.8)


def test_the_estimate_of_a_conventional_run_counts_whole_phases(follower):
    times = [0.0, 10.0, 10.1, 20.0, 20.1, 30.0, 30.1]  # two steps follow each wait for groups
    last = follower.last
    paced = [last.model_copy(update={"step": step, "committed_at": at}) for step, at in enumerate(times)]
    assert live_view._eta(paced, 10, 2) == pytest.approx(20.0)
    assert live_view._steps_per_phase({"schedule": {"kind": "conventional", "steps_per_phase": 2}}) == 2
    assert live_view._steps_per_phase({"schedule": {"kind": "pipeline", "steps_per_phase": 2}}) == 1


def test_a_hub_without_a_heartbeat_is_shown_as_stopped(follower):
    status = status_of(follower, hub(beat=START), silent_seconds=60.0)
    assert status["state"] == "stopped"
    assert status["eta_seconds"] is None
    assert status["hub"]["silent_seconds"] == 60
    assert set(status["actors"]) == {"actor-0/1", "actor-1/1"}, "from the last commit"
    assert set(status["length_bias"]["classes"]) == {"generated", "trained"}


def test_a_hub_whose_process_on_this_host_has_ended_is_stopped_at_once(follower):
    alive = {"pid": os.getpid(), "process_started_at": psutil.Process().create_time()}
    for process, state in ((alive, "running"), ({**alive, "process_started_at": 1.0}, "stopped")):
        record = hub_record(beat=START, live=LIVE, host=socket.gethostname(), **process)
        assert status_of(follower, record)["state"] == state


def test_a_finished_run_has_the_totals_of_its_last_commit_and_no_slots(store):
    write_run(store, Shape(steps=4))
    put_record(store, HUB_KEY, hub(beat=live_view.time.time()))
    status = run_status(store)
    assert status["actors"] == {}
    assert status["ledger"] == build_report(store)["ledger"]


def test_a_complete_run_is_finished_and_its_status_reads_well(store):
    write_run(store, Shape(steps=4))
    put_record(store, HUB_KEY, hub(beat=START))
    assert run_status(store)["state"] == "finished"
    text = format_status(store, run_status(store))
    assert text.startswith("synthetic: finished, step 4/4  reward ")
    assert "held-out 0.870 of " in text
    assert "tokens: generated " in text
    assert "lengths: mean length of " in text
    assert "; bias 1.00" in text


def test_off_a_terminal_the_view_prints_a_plain_line_every_five_seconds(follower, monkeypatch):
    clock = {"now": 100.0}
    monkeypatch.setattr(live_view.time, "monotonic", lambda: clock["now"])
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=20)
    with LiveView(console, 10) as view:
        view.update(None, follower)
        store = follower.store
        store.delete([key for key in store.list("commits") if "/00000003." in key])
        follower.refresh()
        clock["now"] += 4
        view.update(None, follower)  # too early
        assert len(out.getvalue().splitlines()) == 1
        clock["now"] += 2
        view.update(None, follower)
        view.update(None, follower)  # nothing new
    lines = out.getvalue().splitlines()
    assert [line[:9] for line in lines] == ["step 3/10", "step 2/10"]
    assert "\x1b" not in out.getvalue()


def test_off_a_terminal_a_step_has_a_line_a_minute(follower, monkeypatch):
    clock = {"now": 100.0}
    monkeypatch.setattr(live_view.time, "monotonic", lambda: clock["now"])
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=False, width=20), 10) as view:
        for number in range(13):  # the speed, which a progress text stands for here, changes with each update
            view.update(None, follower, f"speed {number}")
            clock["now"] += 10
    assert [line.rpartition("speed ")[2] for line in out.getvalue().splitlines()] == ["0", "6", "12"]


def test_on_a_terminal_the_view_draws_progress_actors_and_history(follower):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with LiveView(console, 10) as view:
        view.update(hub(beat=live_view.time.time()), follower)
    text = out.getvalue()
    assert "step 3/10" in text
    assert "12/16 slots" in text
    assert "0.120" in text


def test_the_view_writes_to_stderr_only(follower, capsys):
    with LiveView(None, 10) as view:
        view.update(None, follower)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 3/10" in captured.err


def test_sparkline_grows_with_the_value():
    assert sparkline([0.0, 0.5, 1.0], marks=" -#") == " -#"
    assert sparkline([0.0, 4.0], marks=" #") == " #", "rewards above 1 are scaled to the largest"


def test_equal_rewards_are_reported_first_after_three_steps():
    store = MemoryStore()
    write_run(store, Shape(steps=4, reward=0.0))
    follower = RunFollower(store)
    follower.refresh()
    assert status_line(status_of(follower, None)).startswith(
        "all rewards were equal (0.000): nothing was learned;  step 4/4"
    )
    store.delete([key for key in store.list("commits") if "/00000004." in key])
    follower.refresh()
    assert status_of(follower, None)["warning"] == "all rewards of 3 steps are equal (0.000): nothing is learned"
    store.delete([key for key in store.list("commits") if "/00000003." in key])
    follower.refresh()
    assert status_of(follower, None)["warning"] is None
    out = io.StringIO()
    write_run(store, Shape(steps=4, reward=0.0))
    follower.refresh()
    with LiveView(Console(file=out, force_terminal=True, width=120), 4) as view:
        view.update(None, follower)
    assert out.getvalue().index("nothing was learned") < out.getvalue().index("step 4/4")
