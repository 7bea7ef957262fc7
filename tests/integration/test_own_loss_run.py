"""docs/algorithms.md, "A loss and advantages of your own": trains on two ranks, survives a kill and a changed file,
replays to the bit."""

import logging
import re
import signal

import pytest

from pipelinerl_core.errors import EXIT_CONFIG
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.locate import create_run
from pipelinerl_core.run.user_code import warn_of_changed_code
from pipelinerl_core.tools.replay import replay_run
from tests.integration.pipeline import ROOT, SIX_STEPS, assert_closes, committed_steps, role
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs" / "algorithms.md").read_text().partition("## A loss and advantages of your own")[2]
OWN = (
    "loss.kind=custom",
    "loss.function=my_loss.py:loss",
    "loss.options.bound=3",
    "loss.advantage=custom",
    "loss.advantage_function=my_loss.py:advantages",
    "trainer.ranks=2",
)


def test_an_own_loss_trains_replays_and_resumes(prepared_model, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "my_loss.py").write_text(code)
    url, log = f"file://{tmp_path}/runs/own", tmp_path / "roles.log"
    run = create_run(url, load_config("quickstart", (*SIX_STEPS, *OWN)), flow_run_id="", mlflow=None)
    with role("hub", url, log), role("trainer", url, log) as trainer, role("actor", url, log):
        wait_for(lambda: committed_steps(url) >= 2, "step 2", seconds=240)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(timeout=30)
        (tmp_path / "my_loss.py").write_text("def loss(tokens): return 1 / 0")
        with caplog.at_level(logging.WARNING):
            warn_of_changed_code(open_run(url))
        with role("trainer", url, log) as trainer:
            assert trainer.wait(timeout=300) == 0, log.read_text()[-3000:]
    assert {text.partition(" ")[0] for text in caplog.messages} == {"my_loss.py"}
    assert set(run.record.code) == {"loss.function", "loss.advantage_function"}
    assert_closes(url)
    assert [step.verdict for step in replay_run(url, None, None)] == ["equal"] * 6


LATE = """
def loss(tokens):
    if len(tokens.lags_M) and int(tokens.lags_M.max()) > 0:
        raise ValueError("a stale token")
    return -tokens.advantages_M * tokens.trainer_logprobs_M
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_an_own_loss_that_fails_during_training_is_one_line_and_is_not_retried(
    prepared_model, tmp_path, monkeypatch, ranks
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late.py").write_text(LATE)
    url, log = f"file://{tmp_path}/runs/late", tmp_path / "trainer.log"
    own = ("loss.kind=custom", "loss.function=late.py:loss", f"trainer.ranks={ranks}")
    create_run(url, load_config("quickstart", (*SIX_STEPS, *own)), flow_run_id="", mlflow=None)
    others = tmp_path / "others.log"
    with role("hub", url, others), role("actor", url, others), role("trainer", url, log) as trainer:
        assert trainer.wait(timeout=240) == EXIT_CONFIG, log.read_text()[-3000:]
    assert log.read_text().splitlines()[-1] == "loss.function=late.py:loss: ValueError: a stale token (late.py:4)"
