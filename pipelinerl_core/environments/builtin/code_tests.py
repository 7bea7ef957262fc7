"""The tests of a row, in the forms of data sets. No form is executed: expected results stay outside of the sandbox.

[{"stdin": "1 2\\n", "stdout": "3\\n"}, ...]                         also `input` and `output`
{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                          APPS, TACO
[{"call": "add", "arguments": [1, 2], "result": 3}, ...]
{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}             APPS, TACO
["assert add(1, 2) == 3", ...]                                     MBPP: a call with literals, == and a literal
"""

import ast
import json
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StdinTest:
    """The input of a program, and the output that is expected."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a call, and its result; JSON values."""

    arguments: list[Any]
    result: Any
    is_wrapped: bool = False
    """The result may also be the first element of `result`: APPS and TACO write results as lists of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    """The tests of a row: of standard input and output, or calls of one function."""

    stdin: Sequence[StdinTest] = ()
    function: str = ""
    calls: Sequence[Call] = ()

    @property
    def all(self) -> Sequence[StdinTest | Call]:
        return self.calls if self.function else self.stdin


def parse_tests(value: Any) -> Tests:
    """The tests of a row. Raises ValueError (one line) if the value has none of the forms.

    >>> parse_tests(["assert add(1, 2) == 3"]).calls
    [Call(arguments=[1, 2], result=3)]
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"the tests are a text that is not JSON: {value[:60]!r}") from None
    if isinstance(value, Mapping):
        value = _of_columns(value)
    if not isinstance(value, Sequence) or not value:
        raise ValueError("the row has no tests; write a list of tests")
    parsed = [_parsed(test) for test in value]
    functions = {name for name, _ in parsed}
    if len(functions) > 1:
        raise ValueError(f"the tests call several functions ({', '.join(sorted(functions))}); use one per row")
    (function,) = functions
    tests = [test for _, test in parsed]
    if not function:
        return Tests(stdin=[test for test in tests if isinstance(test, StdinTest)])
    if not function.isidentifier() or keyword.iskeyword(function):
        raise ValueError(f"a test calls {function[:40]!r}, which is no name of a function")
    return Tests(function=function, calls=[test for test in tests if isinstance(test, Call)])


def _of_columns(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name") or ""
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError("tests that are a mapping have two equally long lists, `inputs` and `outputs`")
    if name:
        pairs = zip(inputs, outputs, strict=True)
        return [{"call": name, "arguments": given, "result": result, "wrapped": True} for given, result in pairs]
    return [{"stdin": given, "stdout": printed} for given, printed in zip(inputs, outputs, strict=True)]


def _parsed(test: Any) -> tuple[str, StdinTest | Call]:
    """The function that a test calls, empty without a call, and the test."""
    match test:
        case {"call": str() as name, "arguments": list() as arguments, "result": result} if name:
            return name, Call(arguments, result, is_wrapped=test.get("wrapped") is True)
        case {"stdin": str() as given, "stdout": str() as printed}:
            return "", StdinTest(given, printed)
        case {"input": str() as given, "output": str() as printed}:
            return "", StdinTest(given, printed)
        case str():
            return _of_assertion(test)
    raise ValueError(
        f"a test is {str(test)[:60]!r}; write stdin and stdout, or call, arguments and result (docs/code.md)"
    )


def _of_assertion(text: str) -> tuple[str, Call]:
    """`assert NAME(LITERALS) == LITERAL`, parsed and not executed. Tuples become lists, as in JSON."""
    try:
        match ast.parse(text.strip()).body:
            case [ast.Assert(test=ast.Compare(
                left=ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]), ops=[ast.Eq()],
                comparators=[expected],
            ))]:  # fmt: skip
                given = [ast.literal_eval(literal) for literal in arguments]
                return name, Call(given, json.loads(json.dumps(ast.literal_eval(expected), allow_nan=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    raise ValueError(f"a test is {text[:60]!r}, but only `assert NAME(LITERALS) == LITERAL` can be compared outside")
