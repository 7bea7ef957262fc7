"""What the train flow starts, and when it does not; roles that are only names."""

import getpass
import logging
import socket
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from prefect.exceptions import Pause

from pipelinerl.flows import environment, train_flow
from pipelinerl.tasks import preflight
from pipelinerl.tasks.run_watch import RunWatch
from pipelinerl_core.config.sections import EvalConfig
from pipelinerl_core.errors import ConfigError, DeadlineExceeded, Fenced, StoreError, StoreUnavailable
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.context import open_run, resume_overrides
from pipelinerl_core.run.drain import ask_to_drain
from pipelinerl_core.run.jobs import Job
from pipelinerl_core.run.records import eval_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision import role_problems, supervise
from pipelinerl_core.supervision.supervise import RoleFailed
from tests.fakes import MemoryStore
from tests.synthetic_run import Shape, write_run


class RunRoles:
    """Takes note of who is started; a trainer that drains ends, as it does within seconds."""

    during_evaluation = staticmethod(lambda: None)
    newest: "RunRoles"

    def __init__(self, run, on_wait) -> None:
        self.started: list[str] = []
        self.ended: set[str] = set()
        self.is_stopped = False
        RunRoles.newest = self

    def wait_for_machine(self) -> bool:
        return False

    def start(self, name: str) -> None:
        self.started.append(name)

    def wait_until(self, name, condition, seconds) -> None: ...

    def wait(self, seconds: float) -> None:
        self.ended.add("trainer")

    def evaluate(self, version: str) -> None:
        self.started.append(version)
        if version == "first":
            self.during_evaluation()

    def has_ended(self, name: str) -> bool:
        return name in self.ended

    def stop(self, *, keep_evaluator: bool = False) -> None:
        self.is_stopped = not keep_evaluator


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(train_flow, "RunRoles", RunRoles)
    config = load_config("quickstart", ["placement.actors=2", "eval.num_prompts=10"])
    return SimpleNamespace(store=MemoryStore(), config=config, run_id="a-run-of-this-test")


def started(run) -> list[str]:
    train_flow.run_roles(run, Watch(is_complete=False))
    assert RunRoles.newest.is_stopped
    return RunRoles.newest.started


def test_a_run_starts_everybody_and_is_evaluated_twice(run):
    assert started(run) == ["hub", "trainer", "evaluator", "first", "actor-0", "actor-1", "last"]


@pytest.mark.parametrize(
    "settings", [["eval.on=actors"], ["eval.subset=0"], ["trainer.steps=19"], ["engine.kind=vllm"]], ids=str
)
def test_no_evaluator_is_started_beside_training(run, settings):
    run.config = load_config("quickstart", ["placement.actors=1", "eval.num_prompts=10", *settings])
    assert started(run) == ["hub", "trainer", "first", "actor-0", "last"]


def test_no_actor_is_started_for_a_trainer_that_has_ended_during_the_first_evaluation(run, monkeypatch):
    monkeypatch.setattr(RunRoles, "during_evaluation", lambda self: self.ended.add("trainer"))
    assert started(run) == ["hub", "trainer", "evaluator", "first", "last"]


def test_no_actor_is_started_after_a_drain_during_the_first_evaluation(run, monkeypatch):
    monkeypatch.setattr(RunRoles, "during_evaluation", lambda self: ask_to_drain(run.store, by="this test"))
    assert started(run) == ["hub", "trainer", "evaluator", "first"]


def test_a_drain_that_a_resume_has_kept_is_not_evaluated_first(run):
    ask_to_drain(run.store, by="this test")
    assert started(run) == ["hub", "trainer", "evaluator"]


class Watch(MagicMock):
    """Of a run with its last commit, or without."""

    def __init__(self, is_complete: bool) -> None:
        super().__init__(committed_step=20 if is_complete else 7)
        self.is_complete.return_value = is_complete

    def _get_child_mock(self, **given):
        return MagicMock(**given)


def raising(error: BaseException):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [RoleFailed("exit code 1\n  | log"), RuntimeError("x"), DeadlineExceeded("stalled")]
)
@pytest.mark.parametrize("broken", ["wait", "evaluate"])
def test_after_the_last_commit_no_error_of_a_role_ends_the_run(run, monkeypatch, caplog, broken, error):
    monkeypatch.setattr(RunRoles, broken, lambda self, arg: None if arg == "first" else raising(error)())
    with pytest.raises(type(error)):
        train_flow.run_roles(run, Watch(is_complete=False))
    assert RunRoles.newest.is_stopped
    caplog.clear()
    monkeypatch.setattr(RunRoles, "has_ended", lambda self, name: broken == "evaluate" and "actor-1" in self.started)
    train_flow.run_roles(run, Watch(is_complete=True))
    assert RunRoles.newest.is_stopped
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("all steps are committed, but ")
    assert line.endswith(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    assert ("last" in RunRoles.newest.started) == (broken == "wait")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Fenced("another process has taken over this run")])
def test_an_interruption_and_a_newer_start_end_a_complete_run_too(run, monkeypatch, error):
    monkeypatch.setattr(RunRoles, "wait", raising(error))
    with pytest.raises(type(error)):
        train_flow.run_roles(run, Watch(is_complete=True))


@pytest.mark.parametrize("started_by", ["a worker", None])
def test_a_worker_starts_a_complete_run_again_after_an_outage_of_the_store(monkeypatch, started_by):
    monkeypatch.setattr(train_flow, "is_deployed", lambda: bool(started_by))
    with (
        pytest.raises(StoreUnavailable) if started_by else nullcontext(),
        train_flow.unless_complete(Watch(is_complete=True), "the report", "write it"),
    ):
        raise StoreUnavailable("503")


@pytest.fixture
def complete(tmp_path, monkeypatch):
    """A synthetic run with all commits and evaluations."""
    write_run(open_store(str(tmp_path / "r-1")), Shape(steps=2))
    monkeypatch.setattr(train_flow, "RunRoles", RunRoles)
    monkeypatch.setattr(RunWatch, "finish", lambda self, report: self.finished.append(report))
    monkeypatch.setattr(RunWatch, "finished", [], raising=False)
    monkeypatch.setattr(RunWatch, "_show_logs", lambda self: None)
    monkeypatch.setattr(train_flow, "write_reports", lambda run: {"run_id": "r-1", "steps": 2, "wall_seconds": 1.0})
    RunRoles.newest = None
    return open_run(f"file://{tmp_path}/r-1")


def test_a_resume_of_a_complete_run_repeats_the_last_evaluation_only_if_its_record_is_missing(complete):
    tracker = MagicMock(logged=None)
    assert train_flow.train_opened(complete, tracker)["wall_seconds"] == 1.0
    assert RunRoles.newest is None
    complete.store.delete([eval_key(2)])
    complete = replace(complete, config=complete.config.model_copy(update={"eval": EvalConfig(num_prompts=10)}))
    train_flow.train_opened(complete, tracker)
    assert RunRoles.newest.started == ["last"]
    assert RunRoles.newest.is_stopped


def test_a_complete_run_without_a_report_is_complete(complete, monkeypatch, caplog):
    monkeypatch.setattr(train_flow, "write_reports", raising(StoreError("report.html: disk quota")))
    tracker = MagicMock(logged=None)
    assert train_flow.train_opened(complete, tracker) == {"run_id": "synthetic", "steps": 2}
    assert RunWatch.finished == [None]
    assert tracker.close.call_args.args[0] == "FINISHED"
    (line,) = [record.getMessage() for record in caplog.records if record.name == train_flow.logger.name]
    remedy = "`pipelinerl report synthetic` writes it"
    assert line == f"all steps are committed, but the report failed; {remedy}. StoreError: report.html: disk quota"


@pytest.mark.parametrize("is_over", [True, False])
def test_a_complete_run_that_is_started_again_is_counted_and_passes_no_check(complete, monkeypatch, is_over):
    if not is_over:
        complete.store.delete([key for key in complete.store.list("commits") if key.startswith("commits/00000002")])
    checks = []
    monkeypatch.setattr(train_flow, "flow_run", SimpleNamespace(id="f-1", run_count=9, tags=[]))
    monkeypatch.setattr(train_flow, "count_start", lambda *_: checks.append("count"))
    monkeypatch.setattr(train_flow, "preflight", lambda *_, **__: checks.append("preflight"))
    monkeypatch.setattr(train_flow, "open_tracker", lambda *_: (MagicMock(), None))
    monkeypatch.setattr(train_flow, "name_flow_run", lambda *_, **__: None)
    monkeypatch.setattr(train_flow, "hub_token", lambda run: "x" * 32)
    train_flow.open_at(complete.store.url, complete.config, {})
    assert checks == (["count"] if is_over else ["count", "preflight"])


@pytest.mark.parametrize("refuses", ["refuse_if_live", "preflight"])
def test_a_resume_that_is_refused_changes_nothing_for_the_roles(complete, monkeypatch, refuses):
    def refuse(*_, **__):
        raise ConfigError("refused")

    complete.store.delete([key for key in complete.store.list("commits") if key.startswith("commits/00000002")])
    monkeypatch.setattr(train_flow, "flow_run", SimpleNamespace(id="f-1", run_count=1, tags=[]))
    monkeypatch.setattr(train_flow, "count_start", lambda *_: None)
    monkeypatch.setattr(train_flow, "preflight", lambda *_, **__: None)
    monkeypatch.setattr(train_flow, refuses, refuse)
    job = Job(preset="r", overrides=("trainer.steps=60",), root="", config=complete.config, run=complete)
    with pytest.raises(ConfigError, match="refused"):
        train_flow.open_job(job, is_checked=False)
    assert resume_overrides(complete.store) == ()


def test_the_flow_run_is_tagged_after_its_run_exists(tmp_path, monkeypatch):
    url, config = f"file://{tmp_path}/r-1", load_config("quickstart", ["tracking.tags=exp42"])
    tags = ["pipelinerl", "exp42", "team:alice", "pipelinerl.run:r-0"]
    monkeypatch.setattr(train_flow, "flow_run", SimpleNamespace(id="f-1", run_count=1, tags=tags))
    monkeypatch.setattr(train_flow, "pinned", lambda config: config)
    monkeypatch.setattr(train_flow, "open_tracker", lambda *_: (MagicMock(), None))
    monkeypatch.setattr(train_flow, "hub_token", lambda run: "x" * 32)
    named = []

    def name_flow_run(run_id, parameters, tags, *, is_new):
        assert open_store(url).exists("run.json")
        named.append((run_id, dict(parameters), tags, is_new))

    monkeypatch.setattr(train_flow, "name_flow_run", name_flow_run)
    labels = {"preset": "quickstart"}
    train_flow.open_at(url, config, labels, is_checked=True, parameters={"root": f"file://{tmp_path}"})
    assert named == [("r-1", {"root": f"file://{tmp_path}"}, ("exp42", "team:alice"), True)]
    record = open_run(url).record
    assert record.config["tracking"]["tags"] == ["exp42", "team:alice"]
    assert record.preset == "quickstart"
    assert record.owner == f"{getpass.getuser()}@{socket.gethostname()}"


@pytest.mark.parametrize("tags", [["pipelinerl.run:r-1"], ["pipelinerl.run:another"], []])
def test_a_retry_on_a_host_without_the_run_is_refused_if_the_run_was_created(tmp_path, monkeypatch, tags):
    monkeypatch.setattr(train_flow, "flow_run", SimpleNamespace(tags=tags))
    url = f"file://{tmp_path}/runs/r-1"
    with pytest.raises(ConfigError) if tags == ["pipelinerl.run:r-1"] else nullcontext() as refused:
        train_flow.refuse_lost_run(url)
    assert list(tmp_path.iterdir()) == []
    if refused:
        said = (
            f"{url}: an earlier start of this flow run has created this run, but host {socket.gethostname()} has no"
        )
        assert str(refused.value).startswith(said)
        write_run(open_store(url), Shape(steps=2))
        train_flow.refuse_lost_run(url)


def test_a_flow_run_of_a_worker_does_not_fail_because_the_server_is_away_at_its_end(monkeypatch):
    monkeypatch.setattr(train_flow, "train_run", lambda job: {"steps": 3})
    monkeypatch.setattr(train_flow, "server_answers", lambda seconds: False)
    with pytest.raises(Pause):
        train_flow.train.fn()


def test_log_lines_of_flows_and_tasks_reach_the_flow_run():
    shown = environment._DEFAULTS["PREFECT_LOGGING_EXTRA_LOGGERS"].split(",")
    train_flow.show_supervision()
    for module in (preflight, train_flow, supervise, role_problems):
        assert any(module.logger.name.startswith(f"{name}.") for name in shown)
        assert module.logger.isEnabledFor(logging.INFO)
