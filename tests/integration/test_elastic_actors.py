"""`pipelinerl actor` joins a run that is under way; SIGTERM hands its open groups over to the others."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.storage.object_store import open_store
from tests.integration.pipeline import ROOT, TOKEN, assert_closes, committed_steps, make_run, role
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(1500)]

STEPS = 160
SETTINGS = [
    f"trainer.steps={STEPS}",
    "trainer.groups_per_step=16",
    "store.partial_seconds=0.3",
    "eval.num_prompts=0",
    "placement.lease_seconds=60",  # an expired lease is a group that is sampled again
]


def join(url, name, log, token=TOKEN):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PIPELINERL_TOKEN": token}
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "pipelinerl.flows.cli", "actor", url, "--name", name],
            cwd=ROOT, env=environment, stdout=stream, stderr=stream,
        )  # fmt: skip


def refusal(url, log, token):
    log.write_text("")
    assert join(url, "nobody", log, token).wait(timeout=60) == 2
    return log.read_text()


def test_actors_come_and_go_and_nothing_is_lost(tmp_path, prepared_model):
    url, log, refused = f"file://{tmp_path}/run", tmp_path / "roles.log", tmp_path / "refused.log"
    make_run(url, *SETTINGS)
    assert "this run is not live" in refusal(url, refused, TOKEN)
    with role("hub", url, log), role("trainer", url, log) as trainer:
        wait_for((tmp_path / "run" / "hub.json").exists, "the hub")
        assert "PIPELINERL_TOKEN is not set" in refusal(url, refused, "")
        first = second = join(url, "first", log)
        try:
            wait_for(lambda: committed_steps(url) >= 3, "step 3", seconds=120)
            second = join(url, "second", log)
            wait_for(lambda: (tmp_path / "run" / "rollouts" / "second").exists(), "groups of the second", seconds=120)
            first.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            assert first.wait(timeout=60) == 0
            assert time.monotonic() - begun < 30
            assert trainer.wait(timeout=800) == 0, log.read_text()[-3000:]
            assert second.wait(timeout=60) == 0
        finally:
            for process in (first, second):
                process.kill()
                process.wait(timeout=10)
    audit = assert_closes(url)
    assert audit["tokens"]["superseded"] == 0  # what the first had told of was in its log
    commits = counted_commit_keys(open_store(url))
    last = read_commit(open_store(url), commits[STEPS])
    assert {key.rpartition("/")[0] for key in last.actors} == {"first", "second"}
