"""The browser of rollouts: what is selected, in which order, on which page; texts of a model cannot make a page."""

import re
from dataclasses import replace

import numpy as np
import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.report.facts import TrainedRollout
from pipelinerl_core.report.rollouts_page import (
    COLOURS,
    PAGE_ROLLOUTS,
    WantedRollouts,
    chosen,
    listing_of,
    rollout_page,
    rollouts_page,
)
from pipelinerl_core.report.samples import plain_text, token_texts
from pipelinerl_core.report.trace import TracedRun, parse_place
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.records import commit_key
from pipelinerl_core.types import WeightSpan
from tests.synthetic_run import (
    TRAINER_EPOCH,
    Shape,
    make_rollout,
    put_batch,
    put_record,
    text_of_ids,
    trained_rollout,
    training_row,
    write_run,
)

HOSTILE = "<script>alert(1)</script>&\x1b[31m"


def row(index: int, **changes) -> TrainedRollout:
    values = {
        "step": 7, "group_id": index // 4, "rollout_index": index % 4, "actor": "actor-0", "reward": index / 10,
        "outcome": "scored", "finish_reason": "stop" if index % 2 else "length",
        "prompt_token_ids": np.array([65, 66 + index]), "completion_token_ids": np.full(1 + index % 5, 97),
        "weight_spans": (WeightSpan(6 - index % 3, 0, 1 + index % 5),), "loss_mask": np.ones(1 + index % 5, np.bool_),
        "loss_mask_trained": np.ones(1 + index % 5, np.bool_), "task": "{}", "source": "a" if index < 5 else "b",
        "advantage": -float(index),
    }  # fmt: skip
    return trained_rollout(**values | changes)


ROWS = [row(index) for index in range(10)]


def names(wanted: WantedRollouts, rows=ROWS) -> list[int]:
    return [each.group_id * 4 + each.rollout_index for each in chosen(rows, wanted, text_of_ids)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, list(range(10))),
        ({"sort": "-reward"}, list(range(9, -1, -1))),
        ({"sort": "length"}, [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]),
        ({"sort": "advantage"}, list(range(9, -1, -1))),
        ({"sort": "-lag"}, [2, 5, 8, 1, 4, 7, 0, 3, 6, 9]),
        ({"reward": "0.3..0.5"}, [3, 4, 5]),
        ({"reward": "..0.1"}, [0, 1]),
        ({"reward": "0.8.."}, [8, 9]),
        ({"reward": "0.4"}, [4]),
        ({"finish_reason": "length", "source": "b"}, [6, 8]),
        ({"outcome": "error"}, []),
        ({"text": "ag"}, [5]),  # prompts are AB, AC, ...; upper and lower case are equal
    ],
)
def test_rollouts_are_selected_and_sorted(wanted, expected):
    assert names(WantedRollouts(**wanted)) == expected


def test_a_rollout_without_a_reward_is_in_no_range_and_sorts_first():
    rows = [replace(ROWS[0], reward=None), *ROWS[1:3]]
    assert names(WantedRollouts(sort="reward"), rows) == [0, 1, 2]
    assert names(WantedRollouts(reward="..5"), rows) == [1, 2]


@pytest.mark.parametrize(
    "wanted",
    [
        {"sort": "size"},
        {"page": "0"},
        {"page": "9" * 5000},
        {"page": "x"},
        {"step": "-1"},
        {"reward": "a..b"},
        {"step": "9" * 20},
        {"beside": "all"},
        {"step": "all", "beside": "3"},
    ],
)
def test_a_wrong_selection_is_refused(wanted):
    with pytest.raises(ConfigError):
        WantedRollouts(**wanted).check()


def test_a_long_step_has_pages_which_keep_the_selection():
    rows = [row(index) for index in range(3 * PAGE_ROLLOUTS)]
    wanted = WantedRollouts(step="7", sort="-reward", source="b", page="2")
    page = rollouts_page("r", [6, 7, 9], [listing_of(rows, wanted)], wanted, text_of_ids)
    assert f"{3 * PAGE_ROLLOUTS - 5:,} of {3 * PAGE_ROLLOUTS} rollouts" in page
    assert page.count('<div class="rollout">') == PAGE_ROLLOUTS
    assert '<a href="?step=7&amp;sort=-reward&amp;source=b">previous</a>' in page
    assert '<a href="?step=7&amp;sort=-reward&amp;source=b&amp;page=3">next</a>' in page
    assert '<a href="?step=6&amp;sort=-reward&amp;source=b">step 6</a>' in page
    assert '<a href="?step=9&amp;sort=-reward&amp;source=b">step 9</a>' in page
    wanted = WantedRollouts(step="7", page="99")
    beyond = rollouts_page("r", [7], [listing_of(rows, wanted)], wanted, text_of_ids)
    assert "No rollout of step 7 is selected" in beyond
    assert '<a href="?step=7&amp;page=3">previous</a>' in beyond


def test_no_text_of_others_becomes_html():
    hostile = replace(ROWS[0], source=HOSTILE, finish_reason=HOSTILE, task='{"<script>": "<script>"}')
    wanted = WantedRollouts(step="7", text=HOSTILE, source=HOSTILE, outcome=HOSTILE)
    for page in (
        rollouts_page(HOSTILE, [7], [listing_of([hostile], wanted)], wanted, lambda _: HOSTILE, HOSTILE),
        rollouts_page(
            "r", [7], [listing_of([hostile], WantedRollouts(step="7"))], WantedRollouts(step="7"), lambda _: HOSTILE
        ),
    ):
        assert "<script>" not in page


@pytest.fixture
def run(store):
    """Step 3 trained a rollout of an environment with two turns, of which a token was masked."""
    write_run(store, Shape(steps=5))
    commit = read_commits(store)[3]
    own = make_rollout(group_id=900, spans=[(0, 0, 2), (2, 2, 6)], prompt="3+4+8=", completion="7+8=5")
    others = [replace(own, rollout_index=index, reward=0.0) for index in (1, 2)]
    rows = [training_row(each, oldest_version=1, advantage=0.5) for each in (own, *others)]
    fates = (commit.fates[0].model_copy(update={"group_id": 900}),)
    put_record(store, commit_key(3, TRAINER_EPOCH), commit.model_copy(
        update={"batches": put_batch(store, 3, TRAINER_EPOCH, rows), "fates": fates}))  # fmt: skip
    return TracedRun(store)


@pytest.mark.parametrize("colours", COLOURS)
def test_a_rollout_has_its_trace_and_each_token_its_figures(run, colours):
    page = rollout_page(run, parse_place("900.0"), colours)
    assert '<a href="../rollouts?step=3">step 3</a>' in page
    assert '<a href="900.1">900.1</a> (0)' in page
    titles = re.findall(r'<span class="([^"]*)" title="([^"]*)"', page)
    assert [title for _, title in titles][:3] == [
        "0: version 0, log-probability -0.500, no advantage",
        "1: version 0, log-probability -0.500, no advantage",
        "2: version 2, log-probability -0.500, advantage 0.5",
    ]
    tints = [look.split()[0] for look, _ in titles]
    expected = {"version": ["v0", "v0", "v2"], "log-probability": ["v0"] * 3, "ratio": ["v0"] * 3,
                "advantage": ["v1", "v1", "v2"]}  # fmt: skip
    assert ("no ratio is stored" in page) == (colours == "ratio")
    assert tints[:3] == expected[colours]
    assert ["stale" in look for look, _ in titles][:3] == [True, True, False]


def test_an_unknown_rollout_or_colour_is_an_error_of_one_line(run):
    with pytest.raises(ConfigError, match="has no rollout 9"):
        rollout_page(run, parse_place("900.9"), "version")
    with pytest.raises(ConfigError, match="colours must be"):
        rollout_page(run, parse_place("900.0"), "red")


def test_characters_of_several_tokens_are_shown_and_each_token_has_what_it_adds():
    data = "Ответ: 答 🙂".encode()
    decode = lambda ids: bytes(ids).decode(errors="replace")  # noqa: E731 - a token is a byte
    texts = token_texts(np.frombuffer(data, np.uint8), decode)
    assert "".join(texts) == plain_text(np.frombuffer(data, np.uint8), decode) == data.decode()
    assert texts[:3] == ["", data[:2].decode(), ""]
    assert token_texts(np.frombuffer(data[:-1], np.uint8), decode)[-1] == "\N{REPLACEMENT CHARACTER}"
    words = lambda ids: " ".join("ab"[token_id] for token_id in ids)  # noqa: E731 - no space before the first
    assert token_texts(np.array([0, 1, 0]), words) == ["a", " b", " a"]
