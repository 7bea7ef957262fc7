"""An actor's start whose environment cannot be loaded: the user's fault, or the host's."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from pipelinerl_core.errors import ConfigError, EnvironmentFailed, EnvironmentNotStarted
from pipelinerl_core.roles.actor import main
from tests.builders import small_config


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (EnvironmentFailed("No module named 'gym'"), ConfigError),
        (EnvironmentNotStarted("the process did not start ([Errno 11])"), EnvironmentNotStarted),
    ],
)
def test_only_what_the_environment_says_itself_is_a_wrong_configuration(monkeypatch, error, raised):
    task = SimpleNamespace(environments=SimpleNamespace(check=AsyncMock(side_effect=error)), close=AsyncMock())
    monkeypatch.setattr(main, "build_task", lambda *_: task)
    monkeypatch.setattr(main, "stored_code", lambda *_: None)
    config = small_config()
    with pytest.raises(raised, match=str(error)[:10]):
        asyncio.run(main._open_task(SimpleNamespace(config=config), next(iter(config.parts)), SimpleNamespace()))
    task.close.assert_awaited_once()
