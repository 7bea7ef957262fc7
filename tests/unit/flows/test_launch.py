"""What a command prints when its flow fails."""

from contextlib import nullcontext

import pytest

from pipelinerl.flows.cli import launch
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
