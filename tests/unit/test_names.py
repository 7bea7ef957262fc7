"""A value has a noun that says its content: no value is named `one`, `found` or `what` (CONTRIBUTING.md)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {"one", "found", "what"}
CHECKED = ("pipelinerl_core", "flows", "tasks", "pipelinerl", "tests", "benchmarks")


def bindings(tree: ast.AST) -> Iterator[tuple[str | None, int]]:
    """Name and line of every variable and parameter."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                yield name, node.lineno


def forbidden(code: str) -> list[tuple[int, str]]:
    return sorted((line, name) for name, line in bindings(ast.parse(code)) if name in FORBIDDEN)


@pytest.mark.parametrize("folder", CHECKED)
def test_no_value_has_a_name_that_says_nothing(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    places = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths
        for line, name in forbidden(path.read_text(encoding="utf-8"))
    ]
    assert not places, "name each value by a noun that says its content:\n" + "\n".join(places)


@pytest.mark.parametrize(
    "code",
    [
        "one = 1",
        "one, other = pair",
        "for one in rows: pass",
        "[one for one in rows]",
        "lambda one: 1",
        "def f(*, what): pass",
        "def f(*what): pass",
        "if (found := f()): pass",
        "with f() as found: pass",
        "try: f()\nexcept ValueError as found: pass",
        "match f():\n    case [found, *_]: pass",
    ],
)
def test_every_kind_of_binding_is_checked(code):
    assert forbidden(code)


def test_uses_attributes_and_texts_are_not_bindings():
    assert not forbidden("f(row.one, what=1)\nrow.found = 'one'  # what\n")
