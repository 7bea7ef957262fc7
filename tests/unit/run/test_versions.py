"""Which weight versions stay in the object store."""

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import commit_key
from pipelinerl_core.run.versions import find_commit, find_commits, retained
from tests.builders import put_commit, put_epoch, run_record, weight_manifest


def config_of(weights, **sections):
    sections = {"trainer": {"steps": 1000}, "eval": {"num_prompts": 0}} | sections
    return build_config({"weights": weights, **sections})


def test_by_default_the_newest_twenty_versions_stay_with_the_first_and_the_last():
    config = config_of({})
    assert retained(config, range(501)) == {0, *range(481, 501)}
    assert retained(config, range(1001)) == {0, *range(981, 1001)}
    assert retained(config, []) == set()


def test_versions_of_checkpoints_do_not_displace_those_of_durable_every():
    config = config_of({"durable_every": 50, "keep": 4})
    stored = {*range(0, 501, 50), *range(300, 501, 7)}
    assert retained(config, stored) == {0, 350, 400, 450, 500, 482, 489, 496}


def test_a_version_that_an_evaluator_has_to_read_stays():
    evaluated = {"eval": {"num_prompts": 10, "every_steps": 100, "on": "own"}}
    assert retained(config_of({"keep": 4}, **evaluated), range(399)) == {0, 200, 300, *range(395, 399)}


def test_zero_keeps_all_versions():
    assert retained(config_of({"keep": 0}), range(300)) == set(range(300))


def test_a_number_too_small_for_readers_is_refused():
    with pytest.raises(ConfigError, match=r"weights\.keep=3: .* Set weights\.keep=4 or more, or 0"):
        config_of({"keep": 3})


def test_a_removed_version_is_not_found(store):
    put_epoch(store, 2)
    for step in range(4):
        put_commit(store, step, 2, manifest=weight_manifest(step, key=f"weights/{step:08d}.2"))
        if step != 1:
            store.put(f"weights/{step:08d}.2/manifest.json", b"{}")
    # Another trainer, whose commits do not count, has stored the version, too.
    store.put("weights/00000001.1/manifest.json", b"{}")
    config = config_of({})
    run = RunContext(store=store, record=run_record(config), config=config, token="")
    assert [find_commit(run, name).step for name in ("first", "2", "last")] == [0, 2, 3]
    assert [commit.step for commit in find_commits(run, "all")] == [0, 2, 3]
    with pytest.raises(ConfigError, match=r"--version 1: not durable .*weights\.keep=20"):
        find_commit(run, "1")


def test_the_last_version_is_found_without_the_commits_of_versions_that_are_not_stored(store):
    put_epoch(store, 2)
    for step in range(4):
        put_commit(store, step, 2, manifest=weight_manifest(step, key=f"weights/{step:08d}.2"))
    store.put("weights/00000001.2/manifest.json", b"{}")
    store.put(commit_key(3, 2), b"damaged")
    config = config_of({})
    run = RunContext(store=store, record=run_record(config), config=config, token="")
    assert find_commit(run, "last").step == 1


def test_due_versions_are_the_ends_and_those_that_training_evaluates(store):
    put_epoch(store, 2)
    for step in range(8):
        put_commit(store, step, 2, manifest=weight_manifest(step, key=f"weights/{step:08d}.2"))
        store.put(f"weights/{step:08d}.2/manifest.json", b"{}")
    config = config_of({}, eval={"num_prompts": 10, "every_steps": 3, "on": "own"})
    run = RunContext(store=store, record=run_record(config), config=config, token="")
    assert [commit.step for commit in find_commits(run, "due")] == [0, 3, 6, 7]
