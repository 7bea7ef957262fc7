"""placement.share_gpu=turns with real roles on a CPU: engine and learner never compute at the same time."""

import asyncio
import shutil
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pipelinerl_core.engine.embedded.decoder import SlotDecoder
from pipelinerl_core.roles.actor.main import run_actor
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.trainer.main import train
from pipelinerl_core.run.context import open_run
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.weights.memory import shm_directory
from tests.integration.pipeline import (
    SIX_STEPS,
    TOKEN,
    assert_closes,
    committed_steps,
    make_run,
    role,
    start_role,
    trained_groups,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TURNS = ("placement.share_gpu=turns", "checkpoint.every_seconds=1", "placement.lease_seconds=4")


@pytest.fixture
def url(tmp_path, prepared_model):
    yield f"file://{tmp_path}/turns-{time.time_ns()}"
    for directory in tmp_path.glob("turns-*"):
        shutil.rmtree(shm_directory(directory.name), ignore_errors=True)


class Events:
    """(kind, begin, end) of decoder passes and of steps; the bytes of keys and values during each step."""

    def __init__(self, monkeypatch):
        self.intervals, self.cache_bytes, self._decoders = [], [], []
        passes, step, build = SlotDecoder._forward, TorchLearner.step, SlotDecoder.__init__

        def built(decoder, *arguments, **options):
            self._decoders.append(decoder)
            build(decoder, *arguments, **options)

        def passed(decoder, *arguments):
            with self._interval("pass"):
                return passes(decoder, *arguments)

        def stepped(learner, rows):
            with self._interval("step"):
                self._look()
                metrics = step(learner, rows)
                self._look()
                return metrics

        monkeypatch.setattr(SlotDecoder, "__init__", built)
        monkeypatch.setattr(SlotDecoder, "_forward", passed)
        monkeypatch.setattr(TorchLearner, "step", stepped)

    @contextmanager
    def _interval(self, kind):
        begin = time.monotonic()
        yield
        self.intervals.append((kind, begin, time.monotonic()))

    def _look(self):
        stores = [store for each in self._decoders for store in (each.memory.keys, each.memory.values)]
        self.cache_bytes.append(sum(tensor.nbytes for store in stores for tensor in store.values()))


def test_no_pass_of_the_engine_overlaps_a_step_and_its_cache_is_free_meanwhile(url, tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_TOKEN", TOKEN)
    torch.set_num_threads(1)
    make_run(url, *SIX_STEPS, *TURNS)
    events, stop, failures = Events(monkeypatch), threading.Event(), []

    def trainer():
        context = open_run(url)
        train(context, stop, RoleMonitor("trainer", "trainer", context.run_id))

    def actor():
        context = open_run(url)
        asyncio.run(run_actor(context, "actor-0", stop, RoleMonitor("actor", "actor-0", context.run_id)))

    def guarded(target):
        try:
            target()
        except BaseException as error:  # noqa: BLE001 (handed to the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in (trainer, actor)]
    with role("hub", url, tmp_path / "hub.log"):
        try:
            for thread in threads:
                thread.start()
                wait_for(lambda: failures or committed_steps(url) >= 0, "the first commit")
            for thread in threads:
                thread.join(timeout=120)
        finally:
            stop.set()
    assert (failures, [thread.is_alive() for thread in threads]) == ([], [False, False])
    in_order = sorted(events.intervals, key=lambda interval: interval[1])
    assert [kind for kind, _, _ in in_order].count("step") == 6
    for (_, _, end), (_, begin, _) in pairwise(in_order):
        assert end <= begin
    assert events.cache_bytes == [0] * 12
    assert len(trained_groups(url)) == 6 * 4
    assert_closes(url)


def holder(url: str) -> int:
    """Process that has the turn; 0: none."""
    inode = (shm_directory(Path(url).name) / "turn").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" not in fields and fields[5].endswith(f":{inode}"):
            return int(fields[4])
    return 0


def test_a_run_goes_on_after_each_role_was_killed_in_its_turn(url, tmp_path):
    make_run(url, *SIX_STEPS, *TURNS, "trainer.steps=14")
    log = tmp_path / "roles.log"
    roles = {}
    with role("hub", url, log):
        try:
            for name in ("trainer", "actor"):
                roles[name] = start_role(name, url, log)
                wait_for(lambda: committed_steps(url) >= 0, "the first commit")
            for killed, step in (("trainer", 3), ("actor", 8)):
                wait_for(lambda step=step: committed_steps(url) >= step, f"step {step}", process=roles["actor"])
                process = roles[killed]
                wait_for(lambda process=process: holder(url) == process.pid, f"turn of the {killed}", pause=0.001)
                process.kill()
                process.wait(timeout=10)
                roles[killed] = start_role(killed, url, log)
            assert roles["trainer"].wait(timeout=240) == 0, log.read_text()[-3000:]
            assert roles["actor"].wait(timeout=60) == 0
        finally:
            for process in roles.values():
                process.kill()
                process.wait(timeout=10)
    groups = trained_groups(url)
    assert len(groups) == len(set(groups)) == 14 * 4
    assert_closes(url)
