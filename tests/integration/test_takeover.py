"""An actor that dies leaves its unfinished groups in the log; another one goes on from there. Real processes."""

import json
import signal
import time

import pyarrow as pa
import pytest

from pipelinerl_core.data.codec import from_segment, structs_of
from pipelinerl_core.data.partials import PartialReader
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import Origin, PreviousHolder
from tests.integration.pipeline import assert_closes, committed_steps, make_run, role, trained_groups
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 24
GROUPS = 8
SETTINGS = [
    f"trainer.steps={STEPS}",
    f"trainer.groups_per_step={GROUPS}",
    "placement.lease_seconds=10",
    "store.partial_seconds=0.2",
    "eval.num_prompts=0",
]


def trained(url):
    """Every trained row, as a dictionary."""
    store = open_store(url)
    for key in counted_commit_keys(store).values():
        for entry in read_commit(store, key).batches:
            batches = from_segment(store.get(entry.name))
            table = pa.Table.from_batches(batches)
            origins = [row for batch in batches for row in structs_of(batch.column("origins"), Origin)]
            for row, origin in zip(table.to_pylist(), origins, strict=True):
                yield {**row, "origins": origin}


@pytest.mark.parametrize("way", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.campaign)])
def test_unfinished_groups_are_continued_by_another_actor_from_the_tokens_they_had(tmp_path, prepared_model, way):
    # An actor that waits for the trainer at the moment of its end leaves nothing to continue; then comes another run.
    assert any(num_taken_over(tmp_path / str(number), way) > 0 for number in range(4))


def num_taken_over(directory, way):
    """Tokens that the second actor took over in one run, each of them compared with the log of the first."""
    url, log = f"file://{directory}/run", directory / "roles.log"
    directory.mkdir()
    make_run(url, *SETTINGS)
    with role("hub", url, log) as hub, role("trainer", url, log) as trainer:
        with role("actor", url, log, "--name", "first") as first:
            wait_for(lambda: committed_steps(url) >= 5, "step 5", seconds=150)
            wait_for(lambda: any((directory / "run" / "partials").rglob("[0-9]*.arrow")), "the log")
            first.send_signal(way)
            first.wait(timeout=60)
            gone_at = time.time()
        # Else the run may end with other groups before those of the first are anybody's again.
        wait_for(lambda: num_leased(directory / "run", gone_at) == 0, "the end of its leases", seconds=120)
        with role("actor", url, log, "--name", "second") as second:
            assert trainer.wait(timeout=600) == 0, log.read_text()[-3000:]
            assert second.wait(timeout=60) == 0
        assert hub.wait(timeout=60) == 0
    groups = trained_groups(url)
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    reader = PartialReader(open_store(url))
    num_taken = 0
    for row in trained(url):
        if not row["origins"]:
            continue
        (origin,) = row["origins"]
        assert (origin.actor, row["actor"], row["attempt"]) == ("first", "second", 1)
        logged = reader.read_continuations(row["group_id"], [PreviousHolder("first", origin.epoch, 0)])[
            row["rollout_index"]
        ]
        known = origin.num_tokens
        assert logged.token_ids.tolist() == row["completion_token_ids"][:known]
        assert logged.rollout_logprobs.tolist() == row["rollout_logprobs"][:known]
        num_taken += known
    check_ledger(url, way)
    assert assert_closes(url)["taken_over_tokens"] == num_taken
    return num_taken


def num_leased(run, after):
    """Groups that the hub believes to be somebody's, when it says so after that time; else -1."""
    record = json.loads((run / "hub.json").read_text())
    return record["live"]["leased"] if record["beat"] > after else -1


def check_ledger(url, way):
    store = open_store(url)
    commits = counted_commit_keys(store)
    commit = read_commit(store, commits[max(commits)])
    tokens = commit.tokens
    assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated")
    (first,) = (sample for key, sample in commit.actors.items() if key.startswith("first/"))
    if way == signal.SIGTERM:
        assert tokens["superseded"] == 0  # everything it had told of was in the log
    else:
        assert tokens["superseded"] < first.num_tokens / 2  # what it sampled after its last write
