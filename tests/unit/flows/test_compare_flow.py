"""How long a planned run of a comparison continues, and how many runs of a sweep run at the same time."""

import math
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from threading import Event
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from prefect.exceptions import Pause

from pipelinerl.flows import compare_flow
from pipelinerl.flows.cli import comparing, launch
from pipelinerl.tasks.placement import RUN_THREAD, RunRoles, RunThread
from pipelinerl_core.comparison.budget import Budget
from pipelinerl_core.comparison.plan import Wanted, plan_comparison, plan_sweep
from pipelinerl_core.comparison.results import Results
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.run.locate import create_run, run_url
from pipelinerl_core.run.mlflow_run import NoTracker
from pipelinerl_core.supervision import checks
from tests.builders import ManualClock

ARMS = (Arm("keep", ("engine.kv=keep",)), Arm("drain", ("engine.kv=drain",)))


@pytest.mark.parametrize(
    ("reached", "completed", "levels"),
    [
        ([True], [True], [0.57]),
        ([True, True], [False, True], [0.57, 0.62]),
        ([True, False], [False, True], [0.57, 0.62]),  # the last step
        ([False], [False], [0.57]),  # drained: the comparison does not start it again
    ],
)
def test_a_run_that_was_stopped_below_the_target_is_continued(monkeypatch, reached, completed, levels):
    plan = plan_comparison(Wanted(source="quickstart", arms=ARMS, target=0.5, seeds=(0,)))
    tried, answers, done = [], iter(reached), iter(completed)

    def train_to(url, config, labels, target, enough_reward, *, is_checked):
        tried.append(enough_reward)
        return next(answers)

    monkeypatch.setattr(compare_flow, "train_to", train_to)
    monkeypatch.setattr(compare_flow, "is_complete", lambda *_: next(done))
    monkeypatch.setattr(compare_flow, "get_run_logger", MagicMock())
    compare_flow.compared_run.fn("memory://r", plan.runs[0].config, {}, 0.5, plan.rewards_to_stop())
    assert tried == pytest.approx(levels)


class Runs:
    """In place of processes: each run ends at the third look, with the error that its name has."""

    def __init__(self, errors):
        self.errors, self.running, self.most, self.started, self.stopped = errors, {}, 0, [], []

    def role(self, plan, run, *_, **__):
        role = MagicMock()
        role.begin = lambda: self.begin(run.run_id)
        role.has_ended = lambda: self.look(run.run_id)
        role.stop = lambda: self.stopped.append(self.running.pop(run.run_id, None))
        role.check.side_effect = self.errors.get(run.arm)
        return role

    def begin(self, run_id):
        self.started.append(run_id)
        self.running[run_id] = 0
        self.most = max(self.most, len(self.running))

    def look(self, run_id):
        if run_id not in self.running:
            return True
        self.running[run_id] += 1
        if self.running[run_id] < 3:
            return False
        del self.running[run_id]
        return True


@pytest.fixture
def carry_out(monkeypatch, tmp_path):
    """Carries out six runs, two at a time; returns the results, the runs and the lines of the log."""
    logger = MagicMock()
    monkeypatch.setattr(compare_flow, "get_run_logger", lambda: logger)
    monkeypatch.setattr(compare_flow, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(compare_flow, "write_comparison", lambda results, dropped, **_: results.write(dropped))
    monkeypatch.setattr(compare_flow, "is_complete", lambda *_: True)

    def start(budget_minutes=math.inf, **errors):
        runs = Runs({f"learner.lr={rate}": error for rate, error in errors.items()})
        monkeypatch.setattr(compare_flow, "_role_of", runs.role)
        plan = plan_sweep("quickstart", ["learner.lr=1,2,3", "seed=0,1"], limit=2)
        plan = replace(plan, wanted=replace(plan.wanted, budget_minutes=budget_minutes))
        results = Results(plan, str(tmp_path))
        try:
            compare_flow.run_all(plan, results, str(tmp_path), {})
        except KeyboardInterrupt:
            results.failed["all"] = "interrupted"
        return results, runs, [call.args for call in logger.warning.mock_calls]

    return start


def test_never_more_runs_than_the_limit_and_a_failed_run_does_not_end_the_others(carry_out):
    errors = {"2": ValueError("bad"), "3": PipelineRLError("the trainer ended\nlog")}
    results, runs, _ = carry_out(**errors)
    assert (runs.most, len(set(runs.started)), runs.running) == (2, 6, {})
    reasons = sorted(results.failed.values())
    assert reasons == ["PipelineRLError: the trainer ended"] * 2 + ["ValueError: bad"] * 2


def test_a_run_that_cannot_be_started_or_is_paused_does_not_end_the_others(carry_out, monkeypatch):
    begin = Runs.begin

    def begin_or_fail(self, run_id):
        if run_id.startswith("learner.lr-1-"):
            raise ConnectionError("http://bob:S3cret@h does not answer")
        begin(self, run_id)

    monkeypatch.setattr(Runs, "begin", begin_or_fail)
    results, runs, _ = carry_out(**{"2": Pause()})
    assert (len(runs.started), runs.running, runs.stopped) == (4, {}, [])
    remedy = "; the same command continues the run"
    (failed, stopped) = sorted(set(results.failed.values()))
    assert failed.startswith("ConnectionError: http://")
    assert failed.endswith(f"@h does not answer{remedy}")
    assert "S3cret" not in failed
    assert stopped == f"stopped before its end{remedy}"


def test_the_wait_for_a_slot_is_no_time_of_a_run_and_not_of_the_budget(carry_out, monkeypatch):
    clock = ManualClock()
    look, role = Runs.look, Runs.role

    def slow_look(self, run_id):
        clock.now += 100.0
        return look(self, run_id)

    def waiting_role(self, plan, run, *_, **__):
        waiting = role(self, plan, run)
        waiting.is_running = lambda: self.running[run.run_id] == 2  # it waits until the third look, which is its end
        return waiting

    monkeypatch.setattr(Runs, "look", slow_look)
    monkeypatch.setattr(Runs, "role", waiting_role)
    monkeypatch.setattr(compare_flow, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(compare_flow, "Budget", partial(Budget, clock=clock))
    # Two runs at a time: 600 s in all, of which they run for 200.
    results, _, _ = carry_out(budget_minutes=800 / 60)
    assert [seconds for _, seconds in results.spent()] == [200.0] * 6


def test_a_stop_ends_the_tools_that_runs_wait_for_and_no_role(monkeypatch):
    monkeypatch.setattr(compare_flow, "STOP_SECONDS", 10.0)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep) as tool, subprocess.Popen(sleep, process_group=0) as own:
        try:
            compare_flow._stop([MagicMock(has_ended=lambda: tool.poll() is not None)])
            assert (tool.poll(), own.poll()) == (-signal.SIGKILL, None)
        finally:
            tool.kill()
            own.kill()


def test_an_interrupt_stops_the_runs_that_run(carry_out):
    results, runs, _ = carry_out(**{"1": KeyboardInterrupt()})
    assert results.failed == {"all": "interrupted"}
    assert runs.running == {}
    assert len(runs.started) < 6


def test_a_run_that_was_drained_has_no_result_and_is_named(carry_out, monkeypatch):
    monkeypatch.setattr(compare_flow, "is_complete", lambda *_: False)
    results, _, _ = carry_out()
    assert set(results.failed.values()) == {"stopped before its end; the same command continues the run"}


def test_the_warning_about_the_disk_counts_every_run_that_is_missing(carry_out, monkeypatch):
    monkeypatch.setattr(checks, "model_size", lambda path: 1_000_000_000)
    monkeypatch.setattr(checks, "_free", lambda directory: 5_000_000_000)
    _, _, ((_, line),) = carry_out()
    assert "5.0 GB free, but 6 runs need up to" in line


def test_a_stop_interrupts_the_waits_of_a_run_once(monkeypatch):
    roles = RunRoles(MagicMock())
    stop = Event()
    token = RUN_THREAD.set(RunThread(stop, is_alone=False))
    try:
        roles.wait(0)
        stop.set()
        with pytest.raises(KeyboardInterrupt):
            roles.wait(0)
        roles.wait(0)  # while its roles stop
    finally:
        RUN_THREAD.reset(token)


def test_a_suspended_sweep_stops_its_runs_and_starts_no_other(carry_out, monkeypatch):
    reasons = iter(["", "the flow run is suspended"])
    monkeypatch.setattr(compare_flow, "Inquiry", lambda: SimpleNamespace(why_drain=lambda: next(reasons)))
    held = MagicMock(side_effect=KeyboardInterrupt)  # Pause of Prefect
    monkeypatch.setattr(compare_flow, "hold", held)
    _, runs, _ = carry_out()
    assert (len(runs.started), len(runs.stopped), runs.running) == (2, 2, {})
    held.assert_called_once_with("0 of 6 runs")


def test_a_comparison_of_a_deployment_creates_its_root(monkeypatch, tmp_path):
    root = tmp_path / "new"
    for name in ("label_flow_run", "run_all", "write_comparison", "log_comparison", "show_comparison"):
        monkeypatch.setattr(compare_flow, name, lambda *_: {})
    existed = []
    monkeypatch.setattr(
        compare_flow, "open_comparison", lambda *_, is_required: existed.append(root.is_dir()) or (NoTracker(), None)
    )
    compare_flow.compare_runs(plan_sweep("quickstart", ["seed=0,1"]), str(root))
    assert existed == [True]


def test_a_comparison_needs_mlflow_while_a_run_of_it_does_not_exist(monkeypatch, tmp_path):
    for name in ("label_flow_run", "run_all", "write_comparison", "log_comparison", "show_comparison"):
        monkeypatch.setattr(compare_flow, name, lambda *_: {})
    needed = []
    monkeypatch.setattr(
        compare_flow, "open_comparison", lambda *_, is_required: needed.append(is_required) or (NoTracker(), None)
    )
    plan = plan_sweep("quickstart", ["seed=0,1"])
    for run in plan.runs:
        compare_flow.compare_runs(plan, str(tmp_path))
        create_run(run_url(str(tmp_path), run.run_id), run.config, flow_run_id="f", mlflow=None)
    compare_flow.compare_runs(plan, str(tmp_path))
    assert needed == [True, True, False]


def test_the_check_of_a_comparison_knows_whether_its_first_run_exists(monkeypatch, tmp_path):
    known = []
    monkeypatch.setattr(comparing, "check_all", lambda config, root, *, run: known.append(run and run.run_id) or [])
    monkeypatch.setattr(launch, "run_comparison", lambda plan, root: {})
    plan = plan_sweep("quickstart", ["seed=0,1"])
    comparing.carry_out(plan, str(tmp_path))
    first = plan.runs[0]
    create_run(run_url(str(tmp_path), first.run_id), first.config, flow_run_id="f", mlflow=None)
    comparing.carry_out(plan, str(tmp_path))
    assert known == [None, first.run_id], "only a run that does not exist needs MLflow"


def test_a_run_with_a_flow_run_of_its_own_waits_for_the_end_of_an_earlier_start(monkeypatch):
    waited = []
    monkeypatch.setattr(compare_flow, "await_earlier_start", waited.append)
    monkeypatch.setattr(compare_flow, "open_at", lambda *_, **__: (None, None))
    monkeypatch.setattr(compare_flow, "train_opened", lambda *_: None)
    config = plan_sweep("quickstart", ["seed=0,1"]).runs[0].config
    compare_flow.compared_run.fn("memory://r", config)
    assert waited == ["memory://r"]
    token = RUN_THREAD.set(RunThread(Event(), is_alone=True))
    try:
        compare_flow.compared_run.fn("memory://r", config)
    finally:
        RUN_THREAD.reset(token)
    assert waited == ["memory://r"]
