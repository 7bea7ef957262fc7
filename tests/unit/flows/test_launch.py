"""What a command prints when its flow fails."""

from contextlib import nullcontext
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import CrashedRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed

from pipelinerl.flows.cli import launch, training
from pipelinerl.flows.cli.console import exit_codes
from pipelinerl_core.errors import ConfigError, PipelineRLError, StoreError, TrainingDiverged
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.jobs import new_job
from pipelinerl_core.run.locate import remember_latest


@pytest.mark.parametrize(("error", "num_lines"), [(StoreError("disk"), 1), (ConfigError("parity gate: 0.3"), 0)])
def test_only_a_failure_that_another_start_may_survive_names_the_command_to_continue(error, num_lines, monkeypatch):
    def fail():
        raise error

    printed = []
    monkeypatch.setattr(launch, "_prefect_server", lambda config, root: nullcontext())
    with pytest.raises(type(error)):
        launch._run(fail, load_config("quickstart"), "/runs", lambda: printed.append("continue with"))
    assert len(printed) == num_lines


def test_a_run_that_an_outage_of_the_store_has_ended_is_one_line_and_an_exit_code_of_its_own(monkeypatch, capsys):
    def crash():
        raise CrashedRun("the store s3://bucket/runs/r-1 does not answer. `pipelinerl resume r-1` continues the run")

    monkeypatch.setattr(launch, "_prefect_server", lambda config, root: nullcontext())
    with pytest.raises(SystemExit) as ended, exit_codes():
        launch._run(crash, load_config("quickstart"), "/runs", lambda: pytest.fail("the message says how"))
    assert ended.value.code == 4
    assert capsys.readouterr().err.startswith("pipelinerl: StoreUnavailable: the store s3://bucket/runs/r-1 does not")


def test_a_run_that_diverged_has_an_exit_code_of_its_own(capsys):
    with pytest.raises(SystemExit) as ended, exit_codes():
        raise TrainingDiverged("step 3: nan")
    assert ended.value.code == 5
    assert capsys.readouterr().err == "pipelinerl: TrainingDiverged: step 3: nan\n"


def test_the_command_to_continue_names_the_run_of_this_command_and_not_the_newest_run(monkeypatch, capsys, tmp_path):
    remember_latest(f"file://{tmp_path}/of-another-command")

    def interrupted(job, *, is_checked, on_open):
        on_open(SimpleNamespace(run_id="of-this-command", store=SimpleNamespace(url="file:///r")))
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_prefect_server", lambda config, root: nullcontext())
    monkeypatch.setattr(launch, "_with_body", lambda flow, name, body: lambda **_: body())
    monkeypatch.setattr(launch, "_say_ended", lambda how: None)
    monkeypatch.setattr(launch, "train_run", interrupted)
    with pytest.raises(SystemExit) as ended:
        launch.run_training(new_job("quickstart", (), str(tmp_path)))
    assert ended.value.code == 130
    assert f"continue with: pipelinerl resume of-this-command --root {tmp_path}" in capsys.readouterr().err


def fail():
    raise StoreError("disk")


@pytest.mark.parametrize(
    ("body", "is_failed"),
    [(lambda: {"steps": 3}, False), (lambda: Completed(data={"steps": 3}), False), (fail, True)],
)
@pytest.mark.parametrize("end", ["no answer", "an error of the engine"])
def test_without_the_server_the_result_or_the_error_of_the_flow_counts(monkeypatch, body, is_failed, end):
    def run_by_prefect(*, run_body):
        result = run_body()
        assert end != "no answer", "Prefect would wait for the server"
        raise httpx.ConnectError(f"could not set the state of {result}")

    flow = SimpleNamespace(fn=lambda: None, with_options=lambda flow_run_name: Prepared())

    class Prepared:
        def __call__(self):
            return run_by_prefect(run_body=self.fn)

    monkeypatch.setattr(launch, "server_answers", lambda seconds: end != "no answer")
    run = launch._with_body(flow, "r-1", body)
    if is_failed:
        with pytest.raises(StoreError, match="disk"):
            run()
    else:
        assert run() == {"steps": 3}


def test_a_flow_that_no_server_takes_is_one_line(monkeypatch):
    flow = SimpleNamespace(fn=lambda: None, with_options=lambda flow_run_name: prepared)

    def prepared():
        raise httpx.ConnectError("refused")

    with pytest.raises(PipelineRLError, match="the Prefect server does not answer: refused"):
        launch._with_body(flow, "r-1", dict)()


def test_the_summary_of_a_complete_run_without_a_report_is_a_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(training, "check_all", lambda *_, **__: [])
    monkeypatch.setattr(launch, "run_training", lambda job: {"run_id": "r-1", "steps": 3})
    training.carry_out(new_job("quickstart", (), str(tmp_path)), as_json=False)
    assert capsys.readouterr().out == "r-1: 3 steps; no report, see the log\n"


def test_work_pools_without_a_server_are_refused_before_a_model_is_downloaded(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "check_all", lambda *_, **__: pytest.fail("checks and downloads come later"))
    job = new_job("math-7b-16gpu", (), str(tmp_path))
    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(ConfigError, match="needs a Prefect server"):
        training.carry_out(job, as_json=False)
