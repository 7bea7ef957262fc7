"""Threads that are interrupted between two statements, as the interpreter does, and not only where they wait.

`install` must run before the modules of the project are imported: it compiles the modules of the roles with a call of
`_may_preempt` before each statement.
"""

import ast
import builtins
import contextlib
import gc
import importlib
import random
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from greenlet import getcurrent

from tests.simulation import primitives

_PACKAGES = tuple(f"pipelinerl_core.{name}." for name in ("roles", "channel", "rollouts", "ledger", "weights"))
_MODULES = ("pipelinerl_core.data.partials", "pipelinerl_core.data.segments")
_NAME = "__may_preempt__"
_SHARE = 0.003  # of the statements

_rng = random.Random(0)
_share = 0.0
_is_paused = False


def begin(seed: int, *, is_preemptive: bool) -> None:
    """Begin a run."""
    global _share
    _rng.seed(seed)
    _share = _SHARE if is_preemptive else 0.0


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, no thread is interrupted and no random number drawn: a run with a trace is the run without."""
    global _is_paused
    _is_paused = True
    try:
        yield
    finally:
        _is_paused = False


def _may_preempt() -> None:
    if not _share or _is_paused or _rng.random() > _share:
        return
    world = primitives._WORLD
    task = world.current if world is not None else None
    if world is None or task is None or world.is_over or not task.process.is_alive or getcurrent() is not task.glet:
        return
    if _rng.random() < 0.5:
        world.pause()
    else:
        world.park(0.02 * _rng.random())


class _Instrument(ast.NodeTransformer):
    """Puts the call before the statements of functions and of blocks in them."""

    def visit_FunctionDef(self, node: Any) -> Any:
        self.generic_visit(node)
        has_docstring = ast.get_docstring(node, clean=False) is not None
        node.body = [*node.body[:has_docstring], *_preemptible(node.body[has_docstring:])]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body = _preemptible(node.body)
        return node

    visit_For = visit_While = visit_With = visit_If  # noqa: N815


def _preemptible(body: list[ast.stmt]) -> list[ast.stmt]:
    return [part for statement in body for part in (_call(statement), statement)]


def _call(statement: ast.stmt) -> ast.stmt:
    call = ast.Expr(ast.Call(ast.Name(_NAME, ast.Load()), [], []))
    return ast.fix_missing_locations(ast.copy_location(call, statement))


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        tree = _Instrument().visit(ast.parse(self.get_data(path)))
        return compile(tree, path, "exec", dont_inherit=True)


def install() -> None:
    """Compile the modules of the roles with interruptions, and import the simulation."""
    original = SourceFileLoader.get_code
    setattr(builtins, _NAME, _may_preempt)

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        is_interrupted = fullname.startswith(_PACKAGES) or fullname in _MODULES
        return (_Loader.get_code if is_interrupted else original)(self, fullname)  # type: ignore[arg-type]

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    importlib.import_module("tests.simulation.run")
    gc.freeze()  # a full collection need not visit the objects of imported modules
