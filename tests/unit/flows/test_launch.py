"""What a command prints when its flow fails."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from prefect.exceptions import CrashedRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from pipelinerl.flows.cli import launch, training
from pipelinerl.flows.cli.console import exit_codes
from pipelinerl_core.config import load_config
from pipelinerl_core.errors import ConfigError, StoreError, TrainingDiverged
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


def test_the_command_to_continue_names_the_run_of_this_command_and_not_the_newest_one(monkeypatch, capsys, tmp_path):
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


def test_a_flow_run_of_a_command_has_no_random_name():
    assert launch._with_body(launch.train, "quickstart", dict).flow_run_name == "quickstart"


def test_work_pools_without_a_server_are_refused_before_a_model_is_downloaded(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "check_all", lambda *_, **__: pytest.fail("checks and downloads come later"))
    job = new_job("math-7b-16gpu", (), str(tmp_path))
    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(ConfigError, match="needs a Prefect server"):
        training.carry_out(job, as_json=False)
