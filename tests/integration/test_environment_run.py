"""Whole runs with an environment: an actor dies within its episodes, another one continues them. Real processes."""

import json
import signal

import numpy as np
import pytest

from pipelinerl_core.data.codec import decode_batch, from_segment
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.replay import replay_run
from tests.integration.pipeline import assert_closes, committed_steps, make_run, role, trained_groups
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 12
GROUPS = 8
SETTINGS = [
    f"trainer.steps={STEPS}",
    f"trainer.groups_per_step={GROUPS}",
    "environment.path=builtin:guess",
    "environment.options.plain=true",
    "environment.options.turns=4",
    "environment.turn_tokens=8",
    "prompts.kind=environment",
    "rollouts.max_tokens=64",
    "placement.lease_seconds=4",  # the second actor needs longer to start
    "store.partial_seconds=0.2",
    "eval.num_prompts=0",
]


BRANCHES = """
def user(text):
    return {"role": "user", "content": text}


class Branches:
    weights = {"digits": 1.0}

    def task(self, index):
        return {"number": index, "kind": "sub-agent" if index % 2 else "compacts"}

    def held_out(self, count):
        return [self.task(index) for index in range(count)]

    async def play(self, task, ask, seed):
        start = [user(f"{task['number'] % 10}+1=")]
        first = await ask(start)
        if task["kind"] == "compacts":
            second = await ask([*start, first.message, user("2+2=")])
            third = await ask([user("3="), second.message, user("4=")])
            last = await ask([user("3="), second.message, user("4="), third.message, user("1=")])
        else:
            agent = [user("5+5=")]
            answer = await ask(agent)
            await ask([*agent, answer.message, user("6=")])
            last = await ask([*start, first.message, user("7=")])
        return first.text + last.text

    def score(self, task, transcript):
        return {"digits": sum(letter.isdigit() for letter in transcript) / max(1, len(transcript))}
"""
NUM_BRANCHES = {"compacts": 1, "sub-agent": 2}


def trained_rows(url):
    store = open_store(url)
    for key in counted_commit_keys(store).values():
        for entry in read_commit(store, key).batches:
            for batch in from_segment(store.get(entry.name)):
                yield from decode_batch(batch)


@pytest.mark.parametrize(
    "components",
    [
        pytest.param({"solved", "guesses", "legal"}, id="guess", marks=pytest.mark.campaign),
        pytest.param({"digits"}, id="branches"),
    ],
)
def test_episodes_of_a_dead_actor_are_continued_and_the_run_closes_and_replays(tmp_path, prepared_model, components):
    # An actor that waits for the trainer at the moment of its end leaves nothing to continue; then comes another run.
    assert any(num_taken_over(tmp_path / str(number), components) > 0 for number in range(3))


def num_taken_over(tmp_path, components):
    """Tokens that the second actor took over in one run, which is checked in full."""
    tmp_path.mkdir()
    url, log = f"file://{tmp_path}/run", tmp_path / "roles.log"
    (tmp_path / "branches.py").write_text(BRANCHES)
    own = [f"environment.path={tmp_path}/branches.py:Branches", "environment.options={}"]
    make_run(url, *SETTINGS, *(own if components == {"digits"} else []))
    with role("hub", url, log) as hub, role("trainer", url, log) as trainer:
        with role("actor", url, log, "--name", "first") as first:
            wait_for(lambda: committed_steps(url) >= 3, "step 3", seconds=200)
            wait_for(lambda: any((tmp_path / "run" / "partials").rglob("[0-9]*.arrow")), "the log")
            first.send_signal(signal.SIGKILL)
            first.wait(timeout=60)
        with role("actor", url, log, "--name", "second") as second:
            assert trainer.wait(timeout=600) == 0, log.read_text()[-3000:]
            assert second.wait(timeout=60) == 0
        assert hub.wait(timeout=60) == 0
    groups = trained_groups(url)
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    rows = list(trained_rows(url))
    assert max(row.rollout.num_turns for row in rows) > 1
    for row in rows:
        between = np.ones(row.rollout.num_tokens, bool)
        for turn in row.rollout.turn_spans or ((0, row.rollout.num_tokens),):
            between[turn[0] : turn[1]] = False
        assert not row.loss_mask[between].any()
        assert (row.rollout.loss_mask == ~between).all()
    assert {component.name for component in rows[0].rollout.reward_components} == components
    if components == {"digits"}:
        for rollout in (row.rollout for row in rows):
            task = json.loads(rollout.task)
            assert task["number"] == rollout.group_id
            assert len(rollout.branch_starts) == NUM_BRANCHES[task["kind"]]
            assert rollout.num_turns == 4
    assert {step.verdict for step in replay_run(url, None, None)} == {"equal"}
    return assert_closes(url)["taken_over_tokens"]
