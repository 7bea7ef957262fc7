"""The shape of the repository: names that say something, links that lead somewhere."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [path for room in ("pipelinerl_core", "flows", "tasks") for path in (ROOT / room).rglob("*.py")]
VAGUE = {"util", "utils", "helper", "helpers", "common", "misc"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_name_of_a_module_says_something(path):
    assert path.stem not in VAGUE


def test_every_page_that_the_documents_name_is_there():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in page.read_text().split("](")[1:]:
            link = target.split(")")[0].split("#")[0]
            if link and not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
