"""A run that publishes adapters alone: it closes, goes on after a crash, and gives the model back."""

import pytest
from safetensors.torch import load_file

from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.roles.trainer.retrain import replay_steps
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.run.records import ADAPTERS_FILE
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.export import export
from pipelinerl_core.tools.replay import replay_run
from pipelinerl_core.weights.checkpoint import load_checkpoint
from tests.integration.pipeline import assert_closes, committed_steps, make_run, role
from tests.models import published_by
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 12
SETTINGS = [
    f"trainer.steps={STEPS}",
    "trainer.groups_per_step=8",
    "engine.concurrency=32",
    "weights.transport=object_store",
    "weights.durable_every=1",
    "checkpoint.every_seconds=1000",
    "learner.lora_rank=8",
    "learner.lr=1e-3",
    "eval.num_prompts=0",
]


def test_a_run_of_adapters_closes_goes_on_replays_and_gives_the_model_back(tmp_path, prepared_model):
    url, log = f"file://{tmp_path}/run", tmp_path / "roles.log"
    config = make_run(url, *SETTINGS, "weights.content=adapters")
    with role("hub", url, log), role("actor", url, log):
        with role("trainer", url, log):
            wait_for(lambda: committed_steps(url) >= 2, "step 2", seconds=120)
        with role("trainer", url, log) as trainer:  # the first was killed
            assert trainer.wait(timeout=240) == 0, log.read_text()[-3000:]
    assert_closes(url)
    store = open_store(url)
    commits = counted_commit_keys(store)
    read = [read_commit(store, commits[step]) for step in range(STEPS + 1)]
    assert {entry.name for commit in read for entry in commit.manifest.files} == {ADAPTERS_FILE}
    assert max(swap.version for commit in read for swap in commit.swaps) >= 2
    assert {step.verdict for step in replay_run(url, None, None)} == {"equal"}
    # As if the run had published merged weights: trained again, the same model comes out, to the last bit.
    merged = build_alone(
        config.model_copy(update={"weights": config.weights.model_copy(update={"content": "merged"})})
    )
    merged.load_state(*load_checkpoint(store, 0, read[0].epoch))
    losses = [step.metrics["train/loss"] for step in replay_steps(store, merged, commits, STEPS)]
    assert losses == [commit.metrics["train/loss"] for commit in read[1:]]
    export(url, tmp_path / "model")
    exported, wanted = load_file(tmp_path / "model" / "model.safetensors"), published_by(merged)
    assert exported.keys() == wanted.keys()
    assert all((tensor == wanted[name]).all() for name, tensor in exported.items())
