"""The log of a flow run on a Prefect server has the warnings of the roles that the flow run supervises."""

import json
import subprocess
import sys

import pytest

from tests.integration.pipeline import ROOT
from tests.integration.prefect_server import Prefect, await_

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import os, sys, threading
from pathlib import Path
from pipelinerl.flows.environment import set_defaults

set_defaults()
from pipelinerl.flows.train_flow import show_supervision
from prefect import flow, task
from pipelinerl_core.supervision.role_logs import RoleLog
from pipelinerl_core.supervision.role_problems import RoleProblems
from pipelinerl_core.supervision.supervise import supervise_role

ROLE = '''
for number in range(500):
    print(f"2026-11-21 03:00:00,000 WARNING r: group {number} is late", flush=True)
print("2026-11-21 03:00:00,000 INFO r: all is well")
'''

@task
def role():
    log = RoleLog(Path(sys.argv[1]) / "actor-0.log", 1 << 20, RoleProblems("actor-0").add)
    command = [sys.executable, "-I", "-S", "-c", ROLE]
    supervise_role(command, env=dict(os.environ), log=log, max_restarts=0, stop=threading.Event(), name="actor-0")

@flow
def train():
    show_supervision()
    role()

train()
"""


@pytest.fixture
def prefect(tmp_path):
    (tmp_path / "prefect").mkdir()
    server = Prefect(tmp_path / "prefect")
    try:
        await_(server.is_healthy, "the Prefect server", 120)
        yield server
    finally:
        server.stop()


def test_the_log_of_the_flow_run_has_a_repeated_warning_of_a_role_once(prefect, tmp_path):
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=prefect.environment, cwd=ROOT, check=True, timeout=200
    )
    (flow_run,) = prefect.runs()
    wanted = {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}, "sort": "TIMESTAMP_ASC"}

    def lines() -> list[tuple[int, str]]:
        return [(line["level"], line["message"]) for line in prefect.ask("/logs/filter", wanted)]

    await_(lambda: any("ended after" in text for _, text in lines()), "the end of the role", 60)
    assert [text for level, text in lines() if level == 30] == ["actor-0: r: group 0 is late"]
    assert any("its log has 500 warnings and 0 errors" in text for _, text in lines()), json.dumps(lines())
