"""A user's code inside a child process: loaded from a file's text or a module, its failures as one line, its numbers
checked.

The code of a file arrives as text, because actors on other hosts use the copy that is stored with the run.
"""

import ast
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from numbers import Rational, Real
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat

from pipelinerl_core.ranges import COMPONENT_NAME, MAX_COMPONENTS, MAX_REWARD

_TAKEN_NAMES = ("mean", "std")
"""Metrics reward/mean and reward/std describe the reward itself."""


class Invalid(Exception):
    """A user's code cannot be used, or returned a wrong value; the message is complete."""


def load(location: str, code: str | None, kind: str) -> Any:
    """The object that `location` names, FILE.py:NAME or package.module:NAME, and its module's file.

    code: text of FILE.py; None for a module. kind: "function" or "class", for messages. Returns (object, file).
    Raises Invalid, or any exception of the loaded code.
    """
    place, _, name = location.rpartition(":")
    module = _imported(place, kind) if code is None else _executed(Path(place).name, code)
    loaded = getattr(module, name, None)
    if loaded is None:
        is_kind = inspect.isclass if kind == "class" else inspect.isfunction
        own = [
            member for member, value in vars(module).items() if is_kind(value) and value.__module__ == module.__name__
        ]
        defined = ", ".join(sorted(member for member in own if member[0] != "_"))
        plural = "Classes" if kind == "class" else "Functions"
        raise Invalid(f"no {kind} {name} there. {plural}: {defined or 'none'}")
    return loaded, getattr(module, "__file__", None) or ""


def _imported(location: str, kind: str) -> ModuleType:
    try:
        return import_module(location)
    except ModuleNotFoundError as error:
        raise Invalid(
            f"no module named {error.name}. Install the module on every host of the run, or name a file: "
            f"FILE.py:{kind.upper()}"
        ) from None


_CODE = "__pipelinerl_code__"
"""Attribute of a module: the text that has been executed to its end."""


def _executed(file_name: str, code: str) -> ModuleType:
    """The module that a file's text defines, once in a process. Tracebacks name the file."""
    known = sys.modules.get(f"user_code_{Path(file_name).stem}")
    if known is not None and (known.__file__, getattr(known, _CODE, None)) == (file_name, code):
        return known
    module = ModuleType(f"user_code_{Path(file_name).stem}")
    module.__file__ = file_name
    sys.modules[module.__name__] = module
    try:
        exec(compile(code, file_name, "exec"), module.__dict__)  # the user's own program
    except ModuleNotFoundError as error:
        raise Invalid(
            f"{file_name} imports {error.name}, which is not installed. The run stores {file_name} alone: install "
            "other modules on every host of the run"
        ) from None
    _import_inner(code)
    setattr(module, _CODE, code)
    return module


def _import_inner(code: str) -> None:
    """Import what functions of a file import: a process that is sealed afterwards cannot load large libraries.

    A module that cannot be imported is left to the function, which may do without it.
    """
    for node in ast.walk(ast.parse(code)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            with suppress(Exception):  # any exception of the module
                import_module(name)


def keywords(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """The parameters that are given by name -> whether they are required; and whether any other name is accepted."""
    parameters = inspect.signature(function).parameters.values()
    named = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def is_own(file_name: str, file: str) -> bool:
    """Whether the name of a frame's file is the user's: `file`, or the name of a stored file, without directory."""
    return file_name == file or file_name[0] not in "/<"


def failure_line(error: BaseException, file: str = "") -> str:
    """Type, first line of the message, and file and line of an exception: the innermost in the user's file, if any.

    file: of the user's module. The code of a stored file is compiled under a name without directory. An Invalid has
    its message only. A group, as asyncio.TaskGroup raises, is told as its first exception.
    """
    frames = traceback.extract_tb(error.__traceback__)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        frames += traceback.extract_tb(error.__traceback__)
    try:
        message = (str(error).splitlines() or [""])[0]
    except Exception:  # noqa: BLE001  (an exception class of the user has a __str__ that raises)
        message = ""
    if isinstance(error, Invalid):
        return message[:500]
    own = [frame for frame in frames if is_own(frame.filename, file)]
    shown = (own or [frame for frame in frames if frame.filename[0] != "<"] or frames)[-1]
    name, line = shown.filename, shown.lineno
    if isinstance(error, SyntaxError) and error.filename:  # of a loaded file, which has no frame
        name, line, message = error.filename, error.lineno, error.msg
    text = f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__
    return f"{text} ({os.path.basename(name)}:{line})"


def checked_components(result: Mapping[Any, Any], name: str) -> dict[str, float]:
    """The named components of a reward as finite floats. `name`: what returned them, for the message of Invalid."""
    if not 0 < len(result) <= MAX_COMPONENTS:
        raise Invalid(f"{name} returned {len(result)} components; return 1 to {MAX_COMPONENTS}")
    for component in result:
        if not is_component(component):
            raise Invalid(
                f"{name} returned a component named {str(component)[:50]!r}. Name components with up to 40 letters, "
                f"digits, '_', '.' or '-', other than {' and '.join(_TAKEN_NAMES)}"
            )
    return {component: finite_number(value, name, f" for {component}") for component, value in result.items()}


def is_component(name: Any) -> bool:
    """Whether a name may be the name of a component."""
    return isinstance(name, str) and re.fullmatch(COMPONENT_NAME, name) is not None and name not in _TAKEN_NAMES


def finite_number(value: Any, name: str, part: str = "") -> float:
    """A finite number within MAX_REWARD of 0, also of numpy or torch. Raises Invalid, with the name of what returned
    the value, and its part."""
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, Real):
        shown = "None (no `return`?)" if value is None else f"{type(value).__name__} {str(value)[:50]!r}"
        raise Invalid(f"{name} returned {shown}{part}, not a number")
    number = finite_or_none(value)
    if number is None or abs(number) > MAX_REWARD:
        shown = str(number or ("a number beyond float" if isinstance(value, Rational) else value))
        raise Invalid(f"{name} returned {shown}{part}; rewards are finite and within {MAX_REWARD:g} of 0")
    return number


def finite_or_none(value: SupportsFloat) -> float | None:
    """The number as a finite float; None for nan, infinity, and an integer or fraction beyond float."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
