"""A whole run with a mixture: every process is killed, and the resumed run has the same order. Real processes."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.report.live_view import format_status, run_status
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.run.locate import create_run
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import EvalRecord, eval_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.replay import replay_run
from tests.integration.pipeline import assert_closes, committed_steps, role, trained_groups, trained_rows
from tests.synthetic_run import build_report, render_report
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 12
GROUPS = 8
PAGE = Path(__file__).parents[2] / "docs" / "mixtures.md"
SMALL = [
    "rollouts.group_size=4",
    f"trainer.steps={STEPS}",
    f"trainer.groups_per_step={GROUPS}",
    "engine.concurrency=32",
    "eval.num_prompts=6",
    "placement.lease_seconds=10",
    "store.partial_seconds=0.2",
    "mixture.broken.weight=10",
    "mixture.broken.prompts.kind=environment",
]
BROKEN = """
import os

class Broken:
    weights = {"right": 1.0}

    def task(self, index):
        return {"raises": index % 2}

    def held_out(self, count):
        return [{}] * count

    async def play(self, task, ask, seed):
        if task.get("raises"):  # fails at once, while the death of a process takes three starts to fail an episode
            raise ValueError("this task is broken")
        await ask([{"role": "user", "content": "1+1="}])
        os._exit(3)

    def score(self, task, transcript):
        return {"right": 1.0}
"""


def example(language):
    """The example of the page in a language."""
    return PAGE.read_text().partition(f"```{language}\n")[2].partition("```")[0]


def make_mixture(directory, url):
    """A run with the mixture of the page and a part whose episodes raise or end their process."""
    for name, text in (("own.py", example("python")), ("broken.py", BROKEN), ("mine.toml", example("toml"))):
        (directory / name).write_text(text)
    rows = [
        f'{{"prompt": "{first}+{other}=", "answer": {first + other}}}' for first in range(8) for other in range(8)
    ]
    (directory / "own.jsonl").write_text("\n".join(rows))
    files = [
        f"mixture.own.prompts.path={directory}/own.jsonl",
        f"mixture.own.reward.function={directory}/own.py:near",
        f"mixture.broken.environment.path={directory}/broken.py:Broken",
    ]
    config = load_config(str(directory / "mine.toml"), [*SMALL, *files])
    return create_run(url, config, flow_run_id="", mlflow=None)


def run_roles(url, log, until=None):
    with role("hub", url, log) as hub, role("trainer", url, log) as trainer, role("actor", url, log) as actor:
        if until is not None:
            wait_for(lambda: committed_steps(url) >= until, f"step {until}", seconds=300)
            for process in (hub, trainer, actor):
                process.send_signal(signal.SIGKILL)
            return
        assert trainer.wait(timeout=500) == 0, log.read_text()[-3000:]
        assert actor.wait(timeout=60) == 0
        assert hub.wait(timeout=60) == 0


def test_a_mixture_that_is_killed_and_resumed_has_the_same_order_and_a_broken_part_stops_nothing(
    tmp_path, prepared_model
):
    url, log = f"file://{tmp_path}/run", tmp_path / "roles.log"
    run = make_mixture(tmp_path, url)
    run_roles(url, log, until=3)
    run_roles(url, log)
    with role("evaluator", url, log) as evaluator:
        assert evaluator.wait(timeout=300) == 0, log.read_text()[-3000:]

    order = run.config.mixture_order()
    rows = [row for rows in trained_rows(url, ["group_id", "source", "prompt_id", "env"]).values() for row in rows]
    assert {row["source"] for row in rows} == {"sums", "guess", "own"}
    assert all(row["source"] == order.turn(row["group_id"]).part for row in rows), "the order depends on the number"
    groups = trained_groups(url)
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    assert_closes(url)
    assert {step.verdict for step in replay_run(url, None, None)} == {"equal"}

    store = open_store(url)
    commits = [read_commit(store, key) for key in counted_commit_keys(store).values()]
    fates = Counter((order.turn(fate.group_id).part, fate.fate) for commit in commits for fate in commit.fates)
    assert fates["broken", "failed"] == sum(num for (part, _), num in fates.items() if part == "broken") > 0
    parts = run_status(store)["parts"]
    counted = {(part, fate): parts[part][f"groups_{fate}"] for part, fate in fates}
    assert counted == fates, "the totals continue after the resume"
    assert "mixture: broken 9%: held-out" not in format_status(store, run_status(store))
    assert "mixture: broken 9%: groups 0 trained" in format_status(store, run_status(store))

    report = build_report(store)
    assert set(report["parts"]) == set(run.config.mixture)
    evals = {name: read_record(store, eval_key(STEPS, name), EvalRecord) for name in ("", *run.config.mixture)}
    assert evals["broken"].known_accuracy is None
    assert "ended" in evals["broken"].error
    known = {name: evals[name].accuracy for name in ("sums", "guess", "own")}
    assert evals[""].accuracy == pytest.approx((5 * known["sums"] + 3 * known["guess"] + 2 * known["own"]) / 10)
    page = render_report(store)
    assert all(f">{name}<" in page for name in run.config.mixture)
