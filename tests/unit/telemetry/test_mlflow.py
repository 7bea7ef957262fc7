"""The MLflow tracker against a real SQLite store (creating one takes seconds).

Tests read back what the tracker writes through the private client of the tracker, and let calls of that client fail:
a second client takes seconds too.
"""

import fcntl
import json
import logging
import socket
import threading
import time
from pathlib import Path

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.mlflow_run import open_tracker
from pipelinerl_core.telemetry import mlflow as tracking
from pipelinerl_core.telemetry.datasets import run_datasets
from pipelinerl_core.telemetry.mlflow import (
    LOGGED_TAG,
    RUN_TAG,
    URL_TAG,
    MlflowTracker,
    RunTag,
    run_page,
    tracking_uri,
)
from pipelinerl_core.types import NO_STEP, LoggedStep
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    uri = tracking_uri("", str(tmp_path_factory.mktemp("root")))
    MlflowTracker(uri, "warm", "warm").close()
    return uri


def history(tracker, key):
    return [(point.step, point.value) for point in tracker._client.get_metric_history(tracker.run_id, key)]


def run_of(tracker):
    return tracker._client.get_run(tracker.run_id)


def test_metrics_parameters_and_tags_arrive_without_secrets(uri):
    config = {"trainer": {"steps": 3}, "hub": {"token": "hunter2"}}
    tracker = MlflowTracker(uri, "e", "one", tags={"url": "s3://k:hunter2@b/x"}, config=config)
    tracker.log(1, {"reward/mean": 0.25}, at=1_750_000_000.5)
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    run = run_of(tracker)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"trainer.steps": "3", "hub.token": "[redacted]"}
    assert run.data.tags[RUN_TAG] == "one"
    assert "hunter2" not in str(run.data)
    assert sorted(history(tracker, "reward/mean")) == [(1, 0.25), (2, 0.5)]
    first = min(tracker._client.get_metric_history(tracker.run_id, "reward/mean"), key=lambda point: point.step)
    assert first.timestamp == 1_750_000_000_500


def test_a_changed_setting_of_a_resumed_run_is_a_tag_because_parameters_cannot_be_changed(uri):
    MlflowTracker(uri, "e", "more", config={"trainer": {"steps": 3, "ranks": 1}}).close()
    resumed = MlflowTracker(uri, "e", "more", config={"trainer": {"steps": 6, "ranks": 1}})
    data = run_of(resumed).data
    resumed.close()
    assert data.params == {"trainer.steps": "3", "trainer.ranks": "1"}
    assert {key: value for key, value in data.tags.items() if "resumed" in key} == {
        "pipelinerl.resumed.trainer.steps": "6"
    }
    again = MlflowTracker(uri, "e", "more", config={"trainer": {"steps": 3, "ranks": 1}})
    assert run_of(again).data.tags["pipelinerl.resumed.trainer.steps"] == "3"
    again.close()


def test_a_resumed_run_is_the_same_run_and_has_its_last_logged_step(uri):
    tracker = MlflowTracker(uri, "e", "two", config={"a": 1})
    assert tracker.logged == NO_STEP
    for step in (1, 2):
        tracker.log(step, {"train/loss": float(step)}, weights_digest=f"digest of {step}")
    tracker.log(7, {"eval/accuracy": 1.0})
    tracker.close("KILLED")
    assert run_of(tracker).info.status == "KILLED"
    by_id = MlflowTracker(uri, "e", "two", run_id=tracker.run_id, config={"a": 1, "b": 2})
    assert (by_id.run_id, by_id.logged) == (tracker.run_id, LoggedStep(2, "digest of 2"))
    assert run_of(by_id).info.status == "RUNNING"
    by_id.close()
    by_name = MlflowTracker(uri, "e", "two")
    by_name.close()
    assert by_name.run_id == tracker.run_id


def test_the_copy_of_a_run_that_is_still_there_gets_an_mlflow_run_of_its_own(uri):
    original = MlflowTracker(uri, "e", "copied", tags={URL_TAG: "s3://bucket/copied"})
    original.log(1, {"reward/mean": 0.25}, weights_digest="d")
    original.close()
    tags, copies = {URL_TAG: "file:///drill/copied"}, []
    for _ in range(2):
        copy = MlflowTracker(
            uri,
            "e",
            "copied",
            run_id=original.run_id,
            tags=tags,
            is_own=lambda of: of[URL_TAG] != "s3://bucket/copied",
        )
        copy.log(1, {"reward/mean": 0.5}, weights_digest="d")
        copy.close()
        copies.append(copy.run_id)
    assert copies[0] == copies[1] != original.run_id
    assert run_of(original).data.tags[URL_TAG] == "s3://bucket/copied"
    assert history(original, "reward/mean") == [(1, 0.25)]
    moved = MlflowTracker(uri, "e", "copied", run_id=original.run_id, tags=tags)  # the original was removed
    moved.close()
    assert moved.run_id == original.run_id


def test_a_run_that_was_deleted_in_the_ui_is_replaced_by_a_new_one(uri):
    deleted = MlflowTracker(uri, "e", "deleted")
    deleted.close()
    deleted._client.delete_run(deleted.run_id)
    again = MlflowTracker(uri, "e", "deleted", run_id=deleted.run_id)
    again.log(1, {"reward/mean": 0.25}, weights_digest="d")
    again.close()
    assert again.run_id != deleted.run_id
    assert history(again, "reward/mean") == [(1, 0.25)]


def test_new_runs_of_one_name_have_mlflow_runs_of_their_own_and_a_start_that_failed_leaves_none(uri, monkeypatch):
    config = load_config("quickstart", [f"tracking.mlflow_uri={uri}"])

    def start(url):
        tracker, _ = open_tracker(config, f"file://{url}", None, "flow-run", {})
        tracker.close("KILLED")
        return tracker

    first = start("/alice/swept")
    ids = [start(url).run_id for url in ("/alice/swept", "/bob/swept")]  # none has a step yet
    assert ids[0] == first.run_id != ids[1]
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    ids.append(start("/bob/swept").run_id)
    monkeypatch.undo()
    first._client.log_batch(first.run_id, tags=[RunTag(LOGGED_TAG, "{}")])
    ids.append(start("/alice/swept").run_id)
    assert len(set(ids)) == 4


def test_metrics_that_are_logged_again_with_the_same_time_are_stored_once(uri):
    for _ in range(2):  # the first start has written the metrics, and was killed before it heard of this
        tracker = MlflowTracker(uri, "e", "again")
        for step in range(40):
            tracker.log(step, {f"m{index}": float(step) for index in range(30)}, at=1_750_000_000.0 + step)
        tracker.close()
    assert len(history(tracker, "m7")) == 40


def test_a_resume_connects_later_and_writes_the_metrics_logged_before(uri):
    first = MlflowTracker(uri, "e", "later")
    first.close()
    tracker = MlflowTracker(uri, "e", "later", run_id=first.run_id, is_required=False)
    tracker.log(1, {"x": 1.0})
    tracker.close()
    assert history(tracker, "x") == [(1, 1.0)]
    assert run_of(tracker).info.status == "FINISHED"


def test_metrics_that_are_fed_at_the_end_are_written(uri):
    tracker = MlflowTracker(uri, "e", "fed")
    left = [1, 2, 3]

    def feed():
        tracker.log(left[0], {"x": float(left.pop(0))})
        return not left

    tracker.close("FINISHED", feed)
    assert [step for step, _ in history(tracker, "x")] == [1, 2, 3]


def test_more_metrics_than_fit_one_batch_arrive(uri):
    tracker = MlflowTracker(uri, "e", "many")
    for step in range(60):
        tracker.log(step, {f"m{index}": float(index) for index in range(20)})
    tracker.close()
    assert len(history(tracker, "m7")) == 60


def test_an_artifact_lies_beside_the_database(uri):
    tracker = MlflowTracker(uri, "e", "artifact")
    tracker.log_artifact("report.html", b"<p>")
    tracker.close()
    assert tracker._client.list_artifacts(tracker.run_id)[0].path == "report.html"
    assert uri.removeprefix("sqlite:///").rpartition("/")[0] in run_of(tracker).info.artifact_uri


def test_losing_mlflow_later_is_warned_of_once_and_made_up_for(uri, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "_FLUSH_SECONDS", 0.1)
    tracker = MlflowTracker(uri, "e", "away")
    real = tracker._client.log_batch

    def refuse(*args, **kwargs):
        raise ConnectionError("down, token=hunter2 at http://u:hunter2@host")

    monkeypatch.setattr(tracker._client, "log_batch", refuse)
    with caplog.at_level(logging.WARNING):
        tracker.log(1, {"x": 1.0})
        wait_for(lambda: tracker.num_failures >= 3, "three failures")
    assert len([record for record in caplog.records if "could not write" in record.message]) == 1
    monkeypatch.setattr(tracker._client, "log_batch", real)
    tracker.log(2, {"x": 2.0})
    tracker.close()
    assert tracker.num_lost == 0
    assert sorted(history(tracker, "x")) == [(1, 1.0), (2, 2.0)]


def test_samples_of_the_machine_without_room_are_left_out_and_the_run_ends_as_finished(uri, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "SAMPLE_SECONDS", 0.0)
    asked = []
    tracker = MlflowTracker(uri, "e", "room", machine=lambda: asked.append(1) or {"system/x": 1.0})
    wait_for(lambda: asked, "a sample")
    back = be_away(tracker, monkeypatch, "log_batch")
    tracker.log(1, {"x": 1.0})  # what cannot be written
    monkeypatch.setattr(type(tracker), "room", property(lambda self: 0))
    num_asked, num_failures = len(asked), tracker.num_failures
    wait_for(lambda: tracker.num_failures >= num_failures + 3, "an outage")
    assert len(asked) <= num_asked + 1
    back()
    tracker.close()
    assert (tracker.num_lost, tracker._client.get_run(tracker.run_id).info.status) == (0, "FINISHED")


def be_away(tracker, monkeypatch, *names):
    """The server is away; returns what brings it back."""
    real = {name: getattr(tracker._client, name) for name in names}

    def refuse(*args, **kwargs):
        raise ConnectionError("down")

    for name in names:
        monkeypatch.setattr(tracker._client, name, refuse)
    return lambda: [setattr(tracker._client, name, call) for name, call in real.items()]


def test_a_server_that_is_away_at_the_end_is_waited_for(uri, monkeypatch):
    monkeypatch.setattr(tracking, "_CLOSE_RETRY_SECONDS", 0.05)
    tracker = MlflowTracker(uri, "e", "end")
    come_back = be_away(tracker, monkeypatch, "log_batch", "log_artifact")
    tracker.log(1, {"x": 1.0})
    tracker.log_artifact("report.json", b"{}")
    timer = threading.Timer(0.5, come_back)
    timer.start()
    tracker.close()
    timer.join()
    assert (tracker.num_lost, history(tracker, "x")) == (0, [(1, 1.0)])
    assert run_of(tracker).info.status == "FINISHED"
    assert [artifact.path for artifact in tracker._client.list_artifacts(tracker.run_id)] == ["report.json"]


def test_metrics_that_a_stopped_run_could_not_write_are_written_by_the_next_start(uri, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "_CLOSE_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "_STOP_SECONDS", 0.2)
    tracker = MlflowTracker(uri, "e", "stopped")
    come_back = be_away(tracker, monkeypatch, "log_batch")
    tracker.log(1, {"x": 1.0})
    tracker.close("KILLED")
    assert tracker.num_lost == 1
    assert "`pipelinerl resume` of the run writes them" in caplog.text
    tracker._writer.join(60)  # its last look
    come_back()
    resumed = MlflowTracker(uri, "e", "stopped", run_id=tracker.run_id)
    for step in (1, 2):
        resumed.log(step, {"x": float(step)})
    resumed.close()
    assert sorted(history(resumed, "x")) == [(1, 1.0), (2, 2.0)]


def test_a_server_that_is_not_there_is_a_configuration_error_without_the_wait_for_an_answer():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    message = r"tracking\.mlflow_uri=http://127\.0\.0\.1:\d+: MLflow cannot be reached or used \(API request to "
    with pytest.raises(ConfigError, match=message):  # after the limit of the wait it would be "no answer within"
        MlflowTracker(f"http://127.0.0.1:{port}", "e", "r")


def test_a_server_that_never_answers_is_a_configuration_error_within_ten_seconds(monkeypatch):
    assert tracking._CONNECT_SECONDS < 10
    monkeypatch.setattr(tracking, "_CONNECT_SECONDS", 2.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ConfigError, match=r"no answer within 2 s.* set tracking\.mlflow_uri=none"):
            MlflowTracker(f"http://127.0.0.1:{silent.getsockname()[1]}", "e", "r")


def test_closing_twice_leaves_no_thread(uri):
    before = set(threading.enumerate())
    tracker = MlflowTracker(uri, "e", "twice")
    tracker.close()
    tracker.close("FAILED")
    assert run_of(tracker).info.status == "FINISHED"
    assert set(threading.enumerate()) <= before


def test_the_default_is_a_database_under_a_local_root():
    assert tracking_uri("", "/data/runs") == "sqlite:////data/runs/mlflow.db"
    assert tracking_uri("", "file:///data/runs") == "sqlite:////data/runs/mlflow.db"
    assert tracking_uri("none", "/data/runs") is None
    assert tracking_uri("http://h:5000", "/data/runs") == "http://h:5000"
    assert run_page("sqlite:////data/runs/mlflow.db", "7", "x") is None
    assert run_page("http://h:5000/", "7", "x").startswith("http://h:5000/#/experiments/7/runs/x?")


def test_the_default_for_a_remote_root_is_a_database_in_the_users_data_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert tracking_uri("", "s3://bucket/runs") == f"sqlite:///{tmp_path}/data/pipelinerl/mlflow.db"
    assert (tmp_path / "data" / "pipelinerl").is_dir()
    (tmp_path / "mlflow.db").touch()
    assert tracking_uri("", str(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"
    with monkeypatch.context() as of_another_user:
        of_another_user.setattr("os.access", lambda path, mode: False)
        assert tracking_uri("", str(tmp_path)) == f"sqlite:///{tmp_path}/data/pipelinerl/mlflow.db"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tracking_uri("", "s3://bucket/runs") == f"sqlite:///{tmp_path}/.local/share/pipelinerl/mlflow.db"


def test_tables_are_shown_by_mlflow_and_a_newer_table_takes_the_place_of_an_older_table(uri, monkeypatch, tmp_path):
    monkeypatch.setattr(tracking, "_CLOSE_RETRY_SECONDS", 0.05)
    tracker = MlflowTracker(uri, "e", "table")
    come_back = be_away(tracker, monkeypatch, "log_batch", "log_artifact", "get_run")
    tracker.log_table("rollouts.json", ["step", "text"], [[1, "a"]])
    tracker.log_table("rollouts.json", ["step", "text"], [[1, "a"], [2, "b"]])
    timer = threading.Timer(0.5, come_back)
    timer.start()
    tracker.close()
    timer.join()
    tracker.log_table("rollouts.json", ["step", "text"], [])  # after its end: nothing happens
    resumed = MlflowTracker(uri, "e", "table", run_id=tracker.run_id)
    resumed.log_table("rollouts.json", ["step", "text"], [[1, "a"], [2, "b"], [3, "c"]])
    resumed.close()
    tags = run_of(resumed).data.tags
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "rollouts.json", "type": "table"}]
    path = resumed._client.download_artifacts(resumed.run_id, "rollouts.json", str(tmp_path))
    assert json.loads(Path(path).read_text()) == {
        "columns": ["step", "text"],
        "data": [[1, "a"], [2, "b"], [3, "c"]],
    }


def test_an_artifact_that_mlflow_does_not_take_is_given_up_soon(uri, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "_CLOSE_RETRY_SECONDS", 0.05)
    tracker = MlflowTracker(uri, "e", "refused")
    be_away(tracker, monkeypatch, "log_artifact")
    tracker.log(1, {"x": 1.0})
    tracker.log_artifact("report.json", b"{}")
    tracker.close()
    assert "has refused the artifact report.json 3 times" in caplog.text
    assert (run_of(tracker).info.status, history(tracker, "x")) == ("FINISHED", [(1, 1.0)])


def test_datasets_are_recorded_once(uri):
    datasets = run_datasets(load_config("quickstart"))
    for _ in range(2):
        tracker = MlflowTracker(uri, "e", "data", datasets=datasets)
        tracker.close()
    inputs = run_of(tracker).inputs.dataset_inputs
    recorded = sorted(
        (dataset_input.tags[0].value, dataset_input.dataset.name, dataset_input.dataset.digest)
        for dataset_input in inputs
    )
    assert recorded == sorted((note.context, note.name, note.digest) for note in datasets)


def test_the_machine_is_asked_now_and_then_and_may_fail(uri, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "SAMPLE_SECONDS", 0.3)
    answers = iter([{"system/x": 1.0}])
    tracker = MlflowTracker(uri, "e", "machine", machine=lambda: next(answers))
    wait_for(lambda: "system metrics are off after an error" in caplog.text, "the failure in the log")
    tracker.log(1, {"x": 1.0})
    tracker.close()
    assert [value for _, value in history(tracker, "system/x")] == [1.0]
    assert history(tracker, "x") == [(1, 1.0)], "the writer goes on"


def test_one_process_at_a_time_creates_the_tables_of_a_database_file(tmp_path, monkeypatch):
    uri, entered = f"sqlite:///{tmp_path}/mlflow.db", []

    def create():
        with tracking._creation(uri):
            entered.append(True)

    with (tmp_path / "mlflow.db.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(tracking, "_CREATION_SECONDS", 0.0)
        with pytest.raises(TimeoutError, match=r"mlflow\.db\.lock"):
            create()
        monkeypatch.setattr(tracking, "_CREATION_SECONDS", 60.0)
        waiting = threading.Thread(target=create)
        waiting.start()
        time.sleep(0.3)
        assert entered == []
    waiting.join(60)
    assert entered == [True]
