"""The generated pages are those of the code, and the site of the documentation names every page."""

import tomllib
from pathlib import Path

import pytest

from infra.reference import PAGES
from pipelinerl.flows.cli.config import every_key

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_that_of_the_code(page):
    assert (ROOT / "docs" / page).read_text() == PAGES[page](), "run make docs-reference"


def test_the_bounds_of_a_key_are_in_words():
    bounds = {entry["key"]: entry["bounds"] for entry in every_key()}
    assert bounds["trainer.steps"] == "at least 1"
    assert bounds["prompts.held_out_share"] == "at least 0, below 1"
    assert bounds["model.path"] == ""


def pages_of(entries: list) -> list[str]:
    pages = []
    for entry in entries:
        for value in entry.values():
            pages += pages_of(value) if isinstance(value, list) else [value]
    return pages


def test_the_site_has_every_page_once():
    named = pages_of(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(named) == len(set(named))
    assert set(named) == {page for page in written if not page.startswith("adr/")}
