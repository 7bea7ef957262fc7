"""When a run that stands still is ended, by a clock of its own."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock
from uuid import UUID

import pytest
from prefect.client.schemas.actions import ArtifactCreate
from pydantic import BaseModel, model_serializer

from pipelinerl.tasks import run_watch, suspension
from pipelinerl.tasks.run_watch import FAILURE_LINES, STALL_SECONDS, RunWatch
from pipelinerl_core.errors import DeadlineExceeded, StoreError
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.drain import drained_by, wants_drain
from pipelinerl_core.run.records import RoleRecord, role_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.supervise import RoleFailed
from tests.ports import free_port
from tests.synthetic_run import Shape, put_record, write_run

STEP_SECONDS = STALL_SECONDS / 3


class Clock:
    """Both clocks of module time, moved by the test."""

    def __init__(self) -> None:
        self.now = time.time()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (run_watch, suspension):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(run_watch, "Alarms", MagicMock())
    monkeypatch.setattr(run_watch, "create_progress_artifact", lambda *_, **__: None)
    return clock


@pytest.fixture
def watch(tmp_path, clock) -> RunWatch:
    """Of a run whose commits and tokens stay as they are."""
    write_run(open_store(str(tmp_path / "r-1")), Shape(steps=2))
    watch = RunWatch(open_run(f"file://{tmp_path}/r-1"), MagicMock(logged=None, page=""))
    look(watch, clock, 60.0)
    return watch


def look(watch: RunWatch, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    watch.poll()


def trainer_turns(watch: RunWatch, start_beat: float) -> None:
    record = RoleRecord(
        run_id="r-1", role="trainer", name="trainer", host="h", pid=1, url="http://h:1", started_at=0.0,
        beat=start_beat, start_beat=start_beat,
    )  # fmt: skip
    put_record(watch._run.store, role_key("trainer", "trainer"), record)


def test_a_run_without_a_commit_or_a_token_is_ended(watch, clock):
    look(watch, clock, STALL_SECONDS - 1)
    with pytest.raises(DeadlineExceeded, match="no commit and no token for 1200 s at step 2"):
        look(watch, clock, 2)


def test_a_trainer_that_trains_steps_again_may_take_its_time_and_then_has_the_whole_limit(watch, clock):
    for _ in range(20):
        trainer_turns(watch, clock.now)
        look(watch, clock, STEP_SECONDS)
    look(watch, clock, STALL_SECONDS - 1)  # it has come to its work, and beats no more
    with pytest.raises(DeadlineExceeded):
        look(watch, clock, 2)


def test_a_trainer_that_hangs_in_a_repeated_step_is_noticed(watch, clock):
    trainer_turns(watch, clock.now)
    look(watch, clock, 2)
    look(watch, clock, STALL_SECONDS - 1)
    with pytest.raises(DeadlineExceeded):
        look(watch, clock, 2)


@pytest.mark.parametrize("step_seconds", [-3600.0, 3600.0])
def test_a_trainer_whose_clock_is_set_during_repeated_steps_is_not_ended(watch, clock, step_seconds):
    for number in range(20):
        trainer_turns(watch, 1e9 + (step_seconds if number > 10 else 0.0) + number)
        look(watch, clock, STEP_SECONDS)


def test_a_store_that_does_not_answer_ends_nothing(watch, clock):
    store = MagicMock(get=MagicMock(side_effect=StoreError("503")))
    watch._run = SimpleNamespace(store=store, config=watch._run.config)
    look(watch, clock, STALL_SECONDS + 1)


def test_equal_rewards_of_the_first_steps_are_one_warning_with_an_example(tmp_path, clock, caplog):
    write_run(open_store(str(tmp_path / "r-1")), Shape(steps=3, reward=0.0))
    watch = RunWatch(open_run(f"file://{tmp_path}/r-1"), MagicMock(logged=None, page=""))
    look(watch, clock, 60.0)
    warnings = [record.getMessage() for record in caplog.records if "all rewards" in record.getMessage()]
    assert len(warnings) == 1
    assert "all rewards of 3 steps are equal (0.000): nothing is learned. reward.kind=sums: 1 if" in warnings[0]
    assert ', reference "' in warnings[0]


@pytest.mark.parametrize(
    ("reward", "limit", "overrides", "drains"),
    [
        (0.0, 1, {}, True),  # as 3
        (0.0, 4, {}, True),
        (0.0, 5, {}, False),
        (0.0, 0, {}, False),
        (None, 3, {}, False),
        (0.0, 3, {"entropy_bonus": 0.1}, False),  # which trains the model, too
    ],
)
def test_a_run_whose_first_rewards_are_all_equal_drains_after_the_steps_of_its_key(
    tmp_path, clock, reward, limit, overrides, drains
):
    store = open_store(str(tmp_path / "r-1"))
    write_run(store, Shape(steps=6, reward=reward))
    record = json.loads(store.get("run.json"))
    record["config"]["trainer"]["equal_reward_steps"] = limit
    record["config"]["loss"] |= overrides
    store.put("run.json", json.dumps(record).encode())
    commits = {key: store.get(key) for key in store.list("commits")}
    store.delete(list(commits)[3:])
    watch = RunWatch(open_run(f"file://{tmp_path}/r-1"), MagicMock(logged=None, page=""))
    assert not wants_drain(store)
    for key in list(commits)[3:5]:
        store.put(key, commits[key])
    look(watch, clock, 60.0)
    assert wants_drain(store) == drains
    if drains:
        assert drained_by(store) == f"trainer.equal_reward_steps={limit}"
        store.delete(["control.json"])
        look(RunWatch(open_run(f"file://{tmp_path}/r-1"), MagicMock(logged=None, page="")), clock, 60.0)
        assert not wants_drain(store), "a resume goes on"


def test_nothing_that_fails_at_the_end_fails_the_run_and_each_failure_is_a_line(tmp_path, watch, monkeypatch, caplog):
    tracker = MagicMock(logged=None, page="", close=MagicMock(side_effect=RuntimeError("no MLflow")))
    watch._tracker = tracker
    record = watch._run.record.model_copy(update={"mlflow_uri": f"http://127.0.0.1:{free_port()}"})
    watch._run = replace(watch._run, record=record)
    for name in ("create_table_artifact", "create_markdown_artifact"):
        monkeypatch.setattr(run_watch, name, MagicMock(side_effect=ConnectionError("no server")))
    with watch:
        assert watch.is_complete()
        watch.finish({"run_id": "r-1", "steps": 2})
    remedy = "failed; `pipelinerl resume synthetic` repeats this"
    lines = [record.getMessage() for record in caplog.records]
    assert lines.pop(1).startswith(f"models and traces of the MLflow run {remedy}: API request to http")
    assert lines == [
        f"files of the MLflow run {remedy}: no object 'report.json' in file://{tmp_path}/r-1",
        f"artifacts of the flow run {remedy}: no server",
        f"end of the MLflow run {remedy}: no MLflow",
    ]


def test_a_run_whose_flow_run_is_suspended_drains_and_a_server_without_answer_is_asked_once_a_minute(
    watch, clock, monkeypatch
):
    answers = iter([ConnectionError("no server"), "", "the flow run is suspended"])
    asked = []

    def why_drain():
        asked.append(clock.now - start)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    start = clock.now
    monkeypatch.setattr(suspension, "why_drain", why_drain)
    for _ in range(80):
        look(watch, clock, 1.0)
    assert [round(seconds) for seconds in asked] == [5, 65, 70]
    assert watch.is_held
    assert drained_by(watch._run.store) == "Prefect: the flow run is suspended"


def test_the_link_to_the_metrics_is_made_once_also_if_the_first_attempt_fails(watch, clock, monkeypatch):
    made = MagicMock(side_effect=[ConnectionError("no server"), None])
    monkeypatch.setattr(run_watch, "create_link_artifact", made)
    watch._tracker.page = "http://mlflow/run"
    for _ in range(4):
        look(watch, clock, run_watch.PROGRESS_SECONDS)
    assert [call.args for call in made.call_args_list] == [("http://mlflow/run",)] * 2


def test_a_failure_is_an_artifact_with_the_log_of_the_role_and_the_command_that_continues(
    tmp_path, watch, monkeypatch
):
    for name, lines in {
        "trainer": [f"line {n}" for n in range(40)] + ["https://me:hunter2@host"],
        "actor-0": ["newer"],
    }.items():
        (tmp_path / f"{name}.log").write_text("\n".join(lines))
    monkeypatch.setattr(run_watch, "log_directory", lambda *_: tmp_path)
    monkeypatch.setattr(run_watch, "create_table_artifact", MagicMock())
    made = MagicMock()
    monkeypatch.setattr(run_watch, "create_markdown_artifact", made)
    with pytest.raises(RoleFailed), watch:
        raise RoleFailed(
            "trainer: ended with exit code 1; see ```its log```. Last lines of trainer.log:\n  | line 39"
        )
    ((text,), options) = made.call_args
    assert options["key"] == "synthetic-failure"
    assert "\n\n    trainer: ended with exit code 1; see ```its log```\n\n2 of 2 steps are committed." in text
    assert f"`pipelinerl resume {watch._run.store.url}`" in text, "on any host, with any root"
    assert text.count("    line ") == FAILURE_LINES - 1
    assert "newer" not in text
    assert "hunter2" not in text
    made.reset_mock()
    with pytest.raises(KeyboardInterrupt), watch:
        raise KeyboardInterrupt
    assert not made.called


def test_ctrl_c_in_a_serializer_of_pydantic_is_ctrl_c(caplog):
    class Interrupted(BaseModel):
        @model_serializer
        def interrupt(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_watch._quietly("artifact", Interrupted().model_dump)
    run_watch._quietly("artifact", lambda: 1 / 0)
    assert "artifact failed" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, RoleFailed])
def test_the_progress_of_a_run_that_was_cancelled_or_failed_is_that_of_its_last_commit(
    tmp_path, clock, monkeypatch, error
):
    store = open_store(str(tmp_path / "r-1"))
    write_run(store, Shape(steps=4))
    last = {key: store.get(key) for key in store.list("commits") if "00000004" in key}
    store.delete(list(last))
    watch = RunWatch(open_run(store.url), MagicMock(logged=None, page=""))
    shown = []
    monkeypatch.setattr(
        run_watch, "create_progress_artifact", lambda percent, **_: shown.append(percent) or UUID(int=1)
    )
    monkeypatch.setattr(run_watch, "update_progress_artifact", lambda _, percent: shown.append(percent))
    for name in ("create_table_artifact", "create_markdown_artifact"):
        monkeypatch.setattr(run_watch, name, MagicMock())

    def train():
        with watch:
            look(watch, clock, 60.0)
            for key, content in last.items():
                store.put(key, content)
            raise error

    with pytest.raises(error):
        train()
    assert shown == [75.0, 100.0]


def test_a_run_is_complete_with_its_last_commit(tmp_path, clock):
    store = open_store(str(tmp_path / "r-1"))
    write_run(store, Shape(steps=3))
    (last,) = [key for key in store.list("commits") if "00000003" in key]
    content = store.get(last)
    store.delete([last])
    watch = RunWatch(open_run(store.url), MagicMock(logged=None, page=""))
    assert not watch.is_complete()
    store.put(last, content)
    assert watch.is_complete(), "although no further reading is due"


@pytest.mark.parametrize("run_id", ["Half.Rate_lr1e-4-s0-deadbeef", "mine", "r-1"])
def test_prefect_accepts_the_keys_of_a_run_of_any_name(watch, run_id):
    watch._run = SimpleNamespace(run_id=run_id)
    assert ArtifactCreate(key=watch._key("progress")).key.endswith("-progress")
