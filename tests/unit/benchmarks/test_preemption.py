"""The benchmark of preemptions: its traces, its table, and roles that are killed and kept away."""

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.preemption import _TRACES, preempt, process_of, table, with_notice
from pipelinerl_core.planning.preemptions import read_trace
from pipelinerl_core.planning.simulator import Preemption
from tests.builders import small_config
from tests.waiting import wait_for

ROLE = "pipelinerl_core.roles.trainer.main"
SUPERVISOR = f"""
import subprocess, sys
while True:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)", "{ROLE}"])
"""


def test_the_traces_of_the_repository_are_read_with_another_notice(tmp_path):
    config = small_config(placement={"actors": 16}, schedule={"max_lag": 16})
    for path in _TRACES.glob("*.csv"):
        trace = read_trace(with_notice(path, 10.0, tmp_path), config, 0.0)
        assert {event.notice_seconds for event in trace} == {10.0}
        assert len(trace) == path.read_text().count("\n") - 1 >= 5


@pytest.mark.parametrize("notice", [0.0, 0.2])
def test_a_role_is_ended_and_its_successor_stands_still_until_a_machine_is_back(notice):
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR])
    try:
        old = wait_for(lambda: [p for p in psutil.Process(supervisor.pid).children() if ROLE in p.cmdline()], ROLE)[0]
        begun = time.time()
        preempt(supervisor.pid, Preemption(0.4, "trainer", 2.0, notice), begun)
        assert time.time() >= begun + 2.4
        new = process_of(supervisor.pid, "trainer")
        assert new.pid != old.pid
        assert sum(new.cpu_times()[:2]) < 0.1  # it has been stopped right after its start
    finally:
        for process in [*psutil.Process(supervisor.pid).children(), supervisor]:
            process.kill()
        supervisor.wait(10)


def test_the_table_has_predicted_and_measured_goodput():
    figures = {"actor_preemptions": 3, "trainer_preemptions": 1, "hub_preemptions": 0, "actors_there": 0.9}
    figures |= {"trainer_there": 0.98, "goodput": 0.95}
    row = {"trace": "a", "end": "kill -9", "predicted": figures}
    measured = {"goodput": 0.96, "lost": 0, "trained_twice": 0}
    document = {"cores": 2, "load_average": 0.1, "machine": "x86_64", "rows": [row, row | {"measured": measured}]}
    text = table(document)
    assert "| a | kill -9 | 3 actor, 1 trainer, 0 hub | 90.0% | 98.0% | 0.950 | - | - | - |" in text
    assert "| 0.950 | 0.960 | 0 | 0 |" in text
