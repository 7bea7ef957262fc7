"""The shape of the repository: names that say something, links that lead somewhere."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [path for room in ("pipelinerl_core", "flows", "tasks") for path in (ROOT / room).rglob("*.py")]
VAGUE = {"util", "utils", "helper", "helpers", "common", "misc"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_name_of_a_module_says_something(path):
    assert path.stem not in VAGUE


def test_every_page_that_the_documents_name_is_there():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in page.read_text().split("](")[1:]:
            link = target.split(")")[0].split("#")[0]
            if link and not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_file_of_the_repository_that_the_documents_name_is_there():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`(?:[^`\n]* )?([\w.-]+/[\w./-]+\.(?:py|md|toml|ya?ml|json|txt))`", page.read_text()):
            places = (ROOT, ROOT / "pipelinerl_core", page.parent)
            assert any((place / name).exists() for place in places), f"{page.name}: {name}"


def imported(path):
    """First parts of the names that a module imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_the_metadata_of_the_wheel_names_the_imported_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *optional["vllm"], *optional["math"], *optional["sql"]]
    declared = {re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    elsewhere = {"verifiers", "openai", "httpx"}  # verifiers_episode.py runs under another interpreter
    parts = {"pydantic_core", "botocore"}  # of pydantic and s3fs, which pin them
    own = {"pipelinerl", "pipelinerl_core", *sys.stdlib_module_names, "vllm", "deepspeed"}
    installed = packages_distributions()
    for path in MODULES:
        for name in set(imported(path)) - own - parts - elsewhere:
            packages = {package.lower().replace("_", "-") for package in installed.get(name, [name])}
            assert packages & declared, f"{path.relative_to(ROOT)} imports {name}"
