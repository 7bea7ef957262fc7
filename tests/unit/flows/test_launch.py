"""What a command prints when its flow fails."""

from contextlib import nullcontext

import pytest
from prefect.exceptions import CrashedRun

from pipelinerl.flows.cli import launch
from pipelinerl.flows.cli.console import exit_codes
from pipelinerl_core.config import load_config
from pipelinerl_core.errors import ConfigError, StoreError


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
