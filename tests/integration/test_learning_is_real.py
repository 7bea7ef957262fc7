"""Learning is real: the reward teaches, and rewards that belong to other prompts teach nothing.

Both arms train on the same prompts from a file, with the same seeds; in one of them the answers are shuffled across
prompts. Accuracy is measured on true held-out sums by the evaluator's own function.
"""

import asyncio
import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from pipelinerl_core.config import RunConfig
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.runtime.evaluation import build_set, measure
from pipelinerl_core.roles.runtime.inference import build_engine
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.versions import find_commit
from pipelinerl_core.weights.memory import shm_directory
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.integration.pipeline import TOKEN, committed_steps, make_run, role
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.campaign]

STEPS = 60
NUM_PROMPTS = 4_000


def write_prompts(path: Path, config: RunConfig, *, shuffled: bool) -> None:
    """Training sums with their answers, or with those of other prompts."""
    prompts = [build_source(config).prompt(index) for index in range(NUM_PROMPTS)]
    answers = [prompt.task["answer"] for prompt in prompts]
    if shuffled:
        random.Random(0).shuffle(answers)
    rows = [{"prompt": prompt.text, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    path.write_text("\n".join(json.dumps(row) for row in rows))


def train(directory: Path, config: RunConfig, *, shuffled: bool) -> str:
    """Run hub, trainer and actor to the last step; returns the URL of the run."""
    url = str(directory / f"learning-{directory.name}-{os.getpid()}")
    directory.mkdir()
    write_prompts(directory / "prompts.jsonl", config, shuffled=shuffled)
    make_run(
        url,
        f"trainer.steps={STEPS}",
        "prompts.kind=file",
        f"prompts.path={directory}/prompts.jsonl",
        "reward.kind=sums",
    )
    log = directory / "log"
    with role("hub", url, log), role("trainer", url, log), role("actor", url, log):
        wait_for(lambda: committed_steps(url) >= STEPS, f"step {STEPS}", seconds=400)
        time.sleep(1)
    shutil.rmtree(shm_directory(url.rpartition("/")[2]), ignore_errors=True)
    return url


def accuracy(url: str, version: str, config: RunConfig) -> float:
    """On true held-out sums."""

    async def measured() -> float:
        context = open_run(url)
        engine, held_out = build_engine(config), build_set(config)
        try:
            manifest = find_commit(context, version).manifest
            assert manifest is not None
            await engine.swap(WeightSubscriber(context.store).fetch(manifest))
            record = await measure(engine, held_out, slots=256, num_prompts=1000)
            return record.accuracy
        finally:
            await held_out.task.close()
            await engine.close()

    return asyncio.run(measured())


@pytest.mark.timeout(1200)
def test_true_rewards_teach_and_shuffled_rewards_do_not(tmp_path, monkeypatch, prepared_model):
    monkeypatch.setenv("PIPELINERL_TOKEN", TOKEN)
    config = load_config("quickstart")
    true = train(tmp_path / "true", config, shuffled=False)
    shuffled = train(tmp_path / "shuffled", config, shuffled=True)
    start = accuracy(true, "first", config)
    assert accuracy(true, "last", config) > start + 0.08
    assert accuracy(shuffled, "last", config) < start + 0.05
