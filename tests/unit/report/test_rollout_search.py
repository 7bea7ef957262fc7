"""The browser over all steps: conditions in SQL, over a run of which most steps are compacted."""

import re
import time

import pytest
from tokenizers import Tokenizer

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.report import rollout_search
from pipelinerl_core.report.live_page import LivePage
from pipelinerl_core.report.query.reader import RunReader
from pipelinerl_core.report.rollout_search import search
from pipelinerl_core.report.rollouts_page import PAGE_ROLLOUTS, SORTS, WantedRollouts
from pipelinerl_core.storage.object_store import open_store
from tests.unit.report.query_case import GROUPS, SIZE, STEPS, TRAINED, write_query_run


@pytest.fixture(scope="module")
def store(prepared_model, tmp_path_factory):
    store = open_store(str(tmp_path_factory.mktemp("root") / "r-1"))
    with pytest.MonkeyPatch.context() as patch:
        write_query_run(store, Tokenizer.from_file(str(prepared_model / "tokenizer.json")), patch)
    return store


stored_rows = RunReader.stored_rows


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, TRAINED),
        ({"where": "task->>'level' = '2'"}, STEPS * SIZE),
        ({"where": "prompt_id = '9+9+9='", "sort": "step"}, STEPS * SIZE),
        ({"where": "step in (3, 20) -- two steps"}, 2 * GROUPS * SIZE),
        ({"step": "20", "where": "true"}, GROUPS * SIZE),
        ({"reward": "1"}, STEPS * (GROUPS - 1 + 1) - 1),  # an error has no reward; level 2 pays for empty completions
        ({"reward": "..0.5", "finish_reason": "length"}, STEPS * GROUPS),
        ({"outcome": "error"}, 1),
        ({"source": "'; drop table rows"}, 0),
        ({"text": "7,12,20", "where": "step = 4"}, GROUPS),
    ],
    ids=str,
)
def test_rollouts_of_all_steps_are_found(store, wanted, expected):
    matches = search(store, WantedRollouts(**{"step": "all"} | wanted))
    assert matches.num_selected == expected
    assert len(matches.keys) == min(expected, PAGE_ROLLOUTS)


@pytest.mark.parametrize("sort", [sign + name for name in SORTS for sign in ("", "-")])
def test_every_order_of_a_step_is_an_order_of_all_steps(store, sort):
    assert search(store, WantedRollouts(step="all", sort=sort)).num_selected == TRAINED


def test_pages_follow_each_other_in_order(store):
    pages = [search(store, WantedRollouts(step="all", sort="-step", page=str(page))).keys for page in (1, 2)]
    steps = [key[0] for page in pages for key in page]
    assert steps == sorted(steps, reverse=True)
    assert len({key for page in pages for key in page}) == 2 * PAGE_ROLLOUTS


@pytest.mark.parametrize("where", [
    "rewrd > 1", "1; select 1", "reward > (", "read_text('/etc/hostname') = ''", "true) or (fate <> 'x'",
    "true); select 5 as total where (true",
])  # fmt: skip
def test_a_wrong_condition_is_one_line_of_the_page(store, where):
    page = LivePage(store, None).rollouts_page(WantedRollouts(step="all", where=where))
    (problem,) = re.findall('<p class="empty">(.*?)</p>', page)
    assert problem.startswith("SQL: ")
    assert "\n" not in problem


def test_a_search_has_a_deadline(store, monkeypatch):
    monkeypatch.setattr(rollout_search, "SECONDS", 0.3)
    slow = "(select sum(a.range * b.range) from range(1000000) a, range(1000000) b) > 0"
    with pytest.raises(ConfigError, match="takes longer than"):
        search(store, WantedRollouts(step="all", where=slow))
    monkeypatch.setattr(RunReader, "stored_rows", lambda reader: time.sleep(0.5) or stored_rows(reader))
    with pytest.raises(ConfigError, match="takes longer than"):  # the time passes before DuckDB begins
        search(store, WantedRollouts(step="all", where=slow))


def test_the_page_shows_the_rows_of_all_steps_and_two_steps_side_by_side(store):
    live = LivePage(store, None)
    page = live.rollouts_page(WantedRollouts(step="all", sort="-step", where="task->>'level' = '3'"))
    assert f"{STEPS * SIZE} rollouts" in page
    assert page.count('<div class="rollout">') == PAGE_ROLLOUTS
    assert f"step {STEPS}, advantage" in page
    page = live.rollouts_page(WantedRollouts(step="3", beside="20", reward="1"))
    left, right = page.split("<section>")[1:]
    assert re.search(r'<a href="rollouts/(\d+)', left)[1] in {"8", "9", "10", "11"}
    assert re.search(r'<a href="rollouts/(\d+)', right)[1] in {"76", "77", "78", "79"}
    assert "Rollouts of step 3 and step 20" in page
