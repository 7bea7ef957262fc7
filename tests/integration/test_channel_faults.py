"""The channel can fail: losing every third message and restarting the hub once changes no trained row.

max_lag=0 and the deterministic engine make a run a function of its configuration, so two runs can be compared row by
row, log-probabilities included.
"""

import asyncio
import itertools
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.roles.actor.loop import Actor, ActorParts
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.roles.runtime.inference import build_codec, build_engine
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.roles.trainer.main import Trainer
from pipelinerl_core.rollouts.player import SingleTurns
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import take_over
from pipelinerl_core.weights.memory import shm_directory
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.integration.pipeline import BIT_FOR_BIT, SIX_STEPS, TOKEN, committed_steps, make_run, role, trained_rows
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

STEPS = 6
OVERRIDES = (*SIX_STEPS, *BIT_FOR_BIT)


def every_third() -> Callable[[str], bool]:
    counter = itertools.count(1)
    return lambda direction: next(counter) % 3 == 0


def lossy(role_name: str, store, faults: Callable[[str], bool] | None) -> Callable[..., HubLink]:
    """The link of a role; a short retry keeps the test short."""

    def link(registration) -> HubLink:
        return HubLink(
            store,
            token=TOKEN,
            role=role_name,
            name="trainer" if role_name == "trainer" else "actor-0",
            registration=registration,
            faults=faults,
            retry_seconds=0.1,
        )

    return link


def run_actor(url: str, engine: EmbeddedEngine, stop: threading.Event, faults: Callable[[str], bool] | None) -> None:
    async def main() -> None:
        context = open_run(url)
        epoch = int(time.time())
        scorer = build_scorer(context.config)
        segments = SegmentWriter(
            context.store, actor="actor-0", epoch=epoch, run_id=context.run_id, max_seconds=0.3, max_bytes=10**6
        )
        parts = ActorParts(
            engine=engine,
            players={"": SingleTurns(engine, scorer, build_codec(context.config), context.config)},
            subscriber=WeightSubscriber(context.store),
            segments=segments,
            store=context.store,
        )

        try:
            actor = Actor(
                context.config,
                parts,
                run_id=context.run_id,
                name="actor-0",
                epoch=epoch,
                link=lossy("actor", context.store, faults),
            )
            await actor.run(stop)
        finally:
            await scorer.close()
            await engine.close()

    asyncio.run(main())


def run_all(url: str, log: Path, faults: Callable[[str], bool] | None, *, restart_hub: bool) -> None:
    torch.set_num_threads(1)
    config = make_run(url, *OVERRIDES)
    engine, learner = build_engine(config), build_alone(config)  # transformers loads models in one thread at a time
    stop = threading.Event()
    failures: list[BaseException] = []

    def actor() -> None:
        try:
            run_actor(url, engine, stop, faults)
        except BaseException as error:  # noqa: BLE001 (handed to the test's thread)
            failures.append(error)

    def trainer() -> None:
        try:
            context = open_run(url)
            store = context.store
            epoch, commits = take_over(store)
            Trainer(context, learner, epoch, link=lossy("trainer", store, faults)).run(commits, stop)
        except BaseException as error:  # noqa: BLE001 (handed to the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=target) for target in (trainer, actor)]
    try:
        with role("hub", url, log) as hub:
            for thread in threads:
                thread.start()
            if restart_hub:
                wait_for(lambda: committed_steps(url) >= 2 or bool(failures), "step 2", seconds=200)
                hub.kill()
                hub.wait()
            else:
                join(threads)
        if restart_hub:
            with role("hub", url, log):
                join(threads)
    finally:
        stop.set()
        join(threads)
        shutil.rmtree(shm_directory(Path(url).name), ignore_errors=True)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timeout=200)


@pytest.mark.timeout(1200)
def test_losing_every_third_message_and_the_hub_changes_no_trained_row(tmp_path, monkeypatch, prepared_model):
    monkeypatch.setenv("PIPELINERL_TOKEN", TOKEN)
    clean, faulty = str(tmp_path / "clean"), str(tmp_path / "faulty")
    run_all(clean, tmp_path / "clean.log", None, restart_hub=False)
    run_all(faulty, tmp_path / "faulty.log", every_third(), restart_hub=True)
    expected, actual = trained_rows(clean), trained_rows(faulty)
    assert sorted(expected) == sorted(actual) == list(range(1, STEPS + 1))
    for step in expected:
        assert actual[step] == expected[step], f"step {step}"
    assert sum(len(rows) for rows in expected.values()) == STEPS * 4 * 4
