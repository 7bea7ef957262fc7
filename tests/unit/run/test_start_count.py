"""A flow run that is started again and again goes on for as long as it commits steps in between."""

import logging

import pytest

from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.run.start_count import count_start
from pipelinerl_core.storage.object_store import open_store

LIMIT = 2


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/run"


def commit(url, step):
    open_store(url).put(f"commits/{step:08d}.1.json", b"{}")


def starts(url, run_counts, flow_run_id="one"):
    for run_count in run_counts:
        count_start(url, flow_run_id, run_count, LIMIT)


def test_a_run_fails_by_name_after_the_maximum_of_starts_without_a_new_commit(url, caplog):
    starts(url, [1])
    commit(url, 3)
    with caplog.at_level(logging.WARNING):
        starts(url, [2, 3, 4])
    said = "no new commit after step 3; restart 2 of 2"
    assert [record.getMessage() for record in caplog.records] == [said.replace("restart 2", "restart 1"), said]
    with pytest.raises(
        PipelineRLError, match=r"given up: .* after step 3, after 2 restarts \(placement.max_resumes=2\)"
    ):
        starts(url, [5])


def test_a_run_goes_on_for_as_long_as_commits_are_made(url):
    for life in range(20):
        starts(url, [2 * life + 1, 2 * life + 2])
        commit(url, life)


def test_crashes_before_the_first_commit_count_too(url):
    starts(url, [1, 2, 3])
    with pytest.raises(PipelineRLError, match="before the first commit"):
        starts(url, [4])


def test_after_giving_up_a_start_by_hand_and_another_flow_run_count_anew(url):
    for flow_run_id in ("one", "two"):
        starts(url, [1, 2, 3], flow_run_id)
        for first in (4, 7):
            with pytest.raises(PipelineRLError, match="given up"):
                starts(url, [first], flow_run_id)
            starts(url, [first + 1, first + 2], flow_run_id)


def test_a_run_that_is_new_to_an_old_flow_run_has_all_its_tries(url):
    starts(url, [9, 10, 11])  # a comparison, which has been started again for the runs before
    with pytest.raises(PipelineRLError, match="given up"):
        starts(url, [12])
