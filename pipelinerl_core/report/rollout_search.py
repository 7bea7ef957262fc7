"""Finds trained rollouts over all steps of a run, by a condition in SQL, for the browser of rollouts."""

import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report.query.database import Database
from pipelinerl_core.report.rollouts_page import PAGE_ROLLOUTS, WantedRollouts

SECONDS = 20.0
"""Longest duration of a statement, of which a search has two, and of the wait for another search."""
_LOCK = threading.Lock()  # for the memory of one search
_SORTS = MappingProxyType(
    {
        "order": "step, position",
        "step": "step",
        "reward": "reward",
        "length": "num_tokens",
        "advantage": "advantage",
        "lag": "lag",
    }
)
"""Names of `rollouts_page.SORTS` -> SQL."""


class Matches(NamedTuple):
    """The rollouts of a page of the browser."""

    keys: list[tuple[int, int, int]]
    """(step, group_id, rollout_index), in order."""
    num_selected: int
    """On all pages."""


def search(store: ObjectStore, wanted: WantedRollouts) -> Matches:
    """The rollouts of the wanted page; one search of this process at a time.

    Raises ConfigError for an error in `where`, without the package duckdb, and after SECONDS; StoreError.
    """
    begin = (wanted.number - 1) * PAGE_ROLLOUTS
    direction = "desc nulls last" if wanted.sort.startswith("-") else "asc nulls first"
    order = f"{_SORTS[wanted.sort.removeprefix('-')]} {direction}, step, position"
    selected = f"from rollouts where {' and '.join(_conditions(wanted))}"
    page = f"{selected} order by {order} limit {PAGE_ROLLOUTS} offset {begin}"
    if not _LOCK.acquire(timeout=SECONDS):
        raise ConfigError("other searches are running: try again in a minute")
    try:
        with Database([store]) as database:
            database.check_condition(wanted.where or "true")
            total = database.first(f"select count(*) as total {selected}", SECONDS)
            rows = database.table(f"select step, group_id, rollout_index {page}", SECONDS).to_pylist()
    finally:
        _LOCK.release()
    keys = [(row["step"], row["group_id"], row["rollout_index"]) for row in rows]
    return Matches(keys, total["total"] if total else 0)


def _conditions(wanted: WantedRollouts) -> Iterator[str]:
    yield "fate = 'trained'"
    if wanted.where:
        yield f"(\n{wanted.where}\n)"  # on lines of its own: it may end with a comment
    if wanted.step != "all":
        yield f"step = {int(wanted.step)}"
    texts: Mapping[str, str] = {
        "outcome": wanted.outcome, "finish_reason": wanted.finish_reason, "source": wanted.source
    }  # fmt: skip
    for column, text in texts.items():
        if text:
            yield f"{column} = {quoted(text)}"
    if wanted.reward:
        low, high = wanted.reward_range()
        yield f"reward between {low:.9g}::float - 1e-6 and {high:.9g}::float + 1e-6".replace("inf", "'inf'")
    if wanted.text:
        yield f"contains(lower(concat_ws(chr(10), prompt, completion, task::varchar)), lower({quoted(wanted.text)}))"


def quoted(text: str) -> str:
    """The text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"
