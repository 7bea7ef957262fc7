"""The example of docs/agents.md: the official openai client as an agent program. An actor dies in an episode."""

import json
import signal
import subprocess
import sys
from functools import partial

import pytest

from tests.integration.pipeline import assert_closes, committed_steps, make_run, role, trained_groups
from tests.integration.test_environment_run import trained_rows
from tests.integration.test_tutorial_environment import page
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

pytest.importorskip("openai", reason="the client comes with the packages for vLLM")
STEPS, GROUPS = 4, 2


def settings(directory):
    command = [sys.executable, str(directory / "guess_agent.py")]
    return (
        f"trainer.steps={STEPS}",
        f"trainer.groups_per_step={GROUPS}",
        "rollouts.group_size=4",
        "engine.concurrency=16",
        "environment.kind=command",
        f"environment.command={json.dumps(command)}",
        'environment.preload=["openai", "openai.resources.chat.completions"]',
        "environment.programs=4",
        "environment.reward=posted",
        "environment.call_seconds=120",
        "environment.turn_tokens=4",
        "prompts.kind=file",
        f"prompts.path={directory}/guess.jsonl",
        f"prompts.held_out_path={directory}/held_out.jsonl",
        "rollouts.max_tokens=48",
        "placement.lease_seconds=10",
        "store.partial_seconds=0.2",
        "eval.num_prompts=0",
    )


def test_the_episodes_of_a_dead_actor_are_continued_by_restarted_programs(tmp_path, prepared_model):
    for name, text in page("agents.md")[0].items():
        (tmp_path / name).write_text(text)
    subprocess.run([sys.executable, "tasks.py"], cwd=tmp_path, check=True)
    url, log = f"file://{tmp_path}/run", tmp_path / "roles.log"
    make_run(url, *settings(tmp_path))
    waiting = partial(wait_for, seconds=200)
    with role("hub", url, log) as hub, role("trainer", url, log) as trainer:
        with role("actor", url, log, "--name", "first") as first:
            waiting(lambda: committed_steps(url) >= 1, "step 1")
            waiting(lambda: any((tmp_path / "run" / "partials").rglob("[0-9]*.arrow")), "the log")
            first.send_signal(signal.SIGKILL)
            first.wait(timeout=60)
        with role("actor", url, log, "--name", "second") as second:
            assert trainer.wait(timeout=400) == 0, log.read_text()[-3000:]
            assert second.wait(timeout=60) == 0
        assert hub.wait(timeout=60) == 0
    groups = trained_groups(url)
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    rows = [row.rollout for row in trained_rows(url)]
    assert max(row.num_turns for row in rows) > 1
    assert {component.name for component in rows[0].reward_components} == {"reward", "guesses"}
    assert all(row.error is None for row in rows)
    assert_closes(url)
