"""The exit code of a trainer whose ranks have failed, and the log of each failed rank."""

import logging
import subprocess
from types import SimpleNamespace

import pytest

from pipelinerl_core.roles.trainer.rank_processes import RankProcesses
from pipelinerl_core.run.records import RendezvousRecord

RENDEZVOUS = RendezvousRecord(epoch=0, where="file:/x", size=4, per_node=4, device="cpu", seconds=1.0)


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [
        ((None, 0, None), None),
        ((None, -9, 0), 1),
        ((2, 1, -6), 2),  # a rank refuses its configuration: no restart can help, whichever rank ends last
    ],
)
def test_the_highest_code_of_the_ranks_is_the_code_of_the_trainer(monkeypatch, caplog, codes, wanted):
    ranks = iter([SimpleNamespace(poll=lambda code=code: code) for code in codes])
    commands = []

    def start(command, **_):
        commands.append(command)
        return next(ranks)

    monkeypatch.setattr(subprocess, "Popen", start)
    processes = RankProcesses("url")
    processes.start(range(1, 4), RENDEZVOUS)
    with caplog.at_level(logging.ERROR):
        assert [processes.log_failures(), processes.log_failures()] == [wanted, wanted]
    assert len(caplog.records) == sum(bool(code) for code in codes)
    assert [command[command.index("--rank") + 1] for command in commands] == ["1", "2", "3"]
