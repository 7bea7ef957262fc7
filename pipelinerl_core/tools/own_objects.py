"""Rows and functions of a Python program as files, by digest: a run stores and reads files only.

The files are in the cache, $PIPELINERL_CACHE or ~/.cache/pipelinerl.
"""

import ast
import dis
import hashlib
import inspect
import io
import json
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.recipes import cache_directory


def rows_file(data: Any) -> Path:
    """The file of rows: a path as it is; a list of dictionaries, or a table of pandas, pyarrow or datasets, written.

    Raises ConfigError for other objects.
    """
    if isinstance(data, str | Path):
        return Path(data)
    if isinstance(data, list | tuple) and all(isinstance(row, dict) for row in data):
        try:
            return _stored("".join(f"{json.dumps(row)}\n" for row in data).encode(), "jsonl")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data: a row has no form in JSON: {error}. Convert its values") from None
    sink = io.BytesIO()
    if isinstance(data, pa.Table):
        pa.parquet.write_table(data, sink)
        return _stored(sink.getvalue(), "parquet")
    if callable(getattr(data, "to_parquet", None)):  # a DataFrame of pandas, a Dataset of the library datasets
        try:
            data.to_parquet(sink)
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise ConfigError(f"data: cannot be written as Parquet: {error}") from None
        return _stored(sink.getvalue(), "parquet")
    raise ConfigError(
        f"data is a {type(data).__name__}. Give the path of a file, a list of dictionaries, or a table of pandas, "
        "pyarrow or datasets"
    )


def function_location(function: str | Callable[..., Any] | Sequence[Callable[..., Any]]) -> str:
    """FILE.py:FUNCTION of a function, FILE.py:A,B of several.

    A function of a notebook, of a started program or inside of another function is written to a file with what it
    uses: modules, literals, and other functions and classes. Raises ConfigError if it uses other objects.
    """
    if isinstance(function, str):
        return function
    functions: list[Any] = list(function) if isinstance(function, Sequence) else [function]
    names = [getattr(each, "__name__", "") for each in functions]
    if not all(map(inspect.isfunction, functions)) or not names or not all(map(str.isidentifier, names)):
        raise ConfigError("reward is no function that `def` defines. Give such a function, or FILE.py:FUNCTION")
    if len(set(names)) < len(names):
        raise ConfigError(f"reward: two functions have the same name ({', '.join(names)}). Give them two names")
    files = {inspect.getfile(each) if _is_importable(each) else "" for each in functions}
    if files.isdisjoint({""}) and len(files) == 1:
        return f"{files.pop()}:{','.join(names)}"
    definitions: dict[str, str] = {}
    for name, each in zip(names, functions, strict=True):
        _define(name, each, definitions)
    text = "\n\n".join(definitions.values())
    return f"{_stored(text.encode(), 'py')}:{','.join(names)}"


def _define(name: str, value: Any, definitions: dict[str, str], attributes: Set[str] = frozenset()) -> None:
    """Add the lines that define `name`, after those that it uses. attributes: names in the code that uses it."""
    if name in definitions:
        return
    if isinstance(value, ModuleType):
        parts = (other.removeprefix(f"{value.__name__}.") for other in sorted(sys.modules)
                 if other.startswith(f"{value.__name__}."))  # fmt: skip
        loaded = [f"import {value.__name__}.{part}\n" for part in parts if attributes >= {*part.split(".")}]
        definitions[name] = f"{''.join(loaded)}import {value.__name__} as {name}"
    elif (inspect.isroutine(value) or inspect.isclass(value)) and _is_importable(value):
        definitions[name] = f"from {value.__module__} import {value.__name__} as {name}"
    elif inspect.isfunction(value) or inspect.isclass(value):
        definitions[name] = ""  # it may use itself
        source = _source(name, value)
        scope = vars(sys.modules["__main__"]) if inspect.isclass(value) else value.__globals__
        code = compile(source, name, "exec")
        for other in sorted(_names(code) & scope.keys()):
            if not other.startswith("__"):
                _define(other, scope[other], definitions, _attributes(code))
        del definitions[name]
        definitions[name] = source
    elif (known := getattr(value, "_name", None)) and getattr(typing, known, None) is value:  # typing.Optional
        definitions[name] = f"from typing import {known} as {name}"
    elif isinstance(value, re.Pattern):
        definitions[name] = f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})"
    elif _is_literal(value):
        definitions[name] = f"{name} = {value!r}"
    else:
        raise ConfigError(
            f"the reward function uses {name}, a {type(value).__name__}, which cannot be written to a file. Create "
            "the object inside of the function, or put the function into a file"
        )


def _is_importable(value: Any) -> bool:
    """Whether its module has it by its name: not a method of an object such as `random.Random(7).choice`."""
    module = getattr(value, "__module__", None)
    return module not in (None, "__main__") and getattr(sys.modules.get(module), value.__name__, None) is value


def _source(name: str, value: Any) -> str:
    if inspect.isfunction(value) and value.__closure__:
        raise ConfigError(f"{name} uses variables of another function. Define {name} at the top level")
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        raise ConfigError(f"{name}: its source is not known. Put the function into a file") from None


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _names(code: CodeType) -> set[str]:
    """Global names that code uses, with the code of functions in it; not its attributes, as co_names has them."""
    return {
        *(step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")),
        *(name for inner in code.co_consts if isinstance(inner, CodeType) for name in _names(inner)),
    }


def _attributes(code: CodeType) -> set[str]:
    """Names of attributes, and others, in code and the functions in it."""
    inner = (_attributes(each) for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*inner)


def _stored(data: bytes, suffix: str) -> Path:
    """The file of these bytes."""
    path = cache_directory() / "objects" / f"{hashlib.sha256(data).hexdigest()[:16]}.{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_bytes(data)
        part.rename(path)
    return path
