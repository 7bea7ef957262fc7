"""Allow-lists for answers before a scorer of reasoning-gym gets them. A refused answer counts as wrong.

Some scorers evaluate the answer as Python (`eval`) or with sympy's parser, which calls `eval`. A gate admits only
answers known to be harmless: it checks length, characters and depth of brackets, then every node, name, number and
exponent of the syntax tree. Python's parser builds the tree without evaluating.

    list         [[0, 1], [1, 0]]: literals
    arithmetic   (3 + 5) * 2: whole numbers, four operations
    formula      x**3/3 + sin(2*x) + C: also symbols of the entry, powers, and functions of a list
"""

import ast
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl_core.gym.tasks import Gate

MAX_CHARACTERS = 4000
MAX_FORMULA_CHARACTERS = 1000
MAX_DEPTH = 32
MAX_NUMBER = 10**9
MAX_EXPONENT = 64
MAX_WEIGHT = 512
"""Approximate limit of the bits of a formula's value, or of the degree of its polynomial."""

_FUNCTION_NAMES = "sqrt exp log ln Abs sin cos tan sec csc cot asin acos atan acot sinh cosh tanh asinh acosh atanh"
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
CONSTANTS = frozenset({"pi", "E"})
UNSOLVED = frozenset({"Integral"})
"""Unsolved integrals have the right derivative, so they are admitted only if the reference answer has one."""
_ARITHMETIC_TEXT = re.compile(r"[0-9+\-*/()\s]*", re.ASCII)
_FORMULA_TEXT = re.compile(r"[0-9A-Za-z+\-*/().,\s]*", re.ASCII)
_FRACTION_TEXT = re.compile(r"[0-9+\-./,_ ]{1,64}(e[+-]?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)
_NUMBER_TEXT = re.compile(r"[0-9+\-.eij() ]{0,200}", re.ASCII | re.IGNORECASE)
_LONG_NUMBER = re.compile(r"[0-9]{3}")
_WORD = re.compile(r"[A-Za-z]+")


class _Refused(Exception):
    """The text contains something that is not on the allow-list."""


def passes(gate: Gate, answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether the scorer of a task with this gate may get the answer to an entry."""
    return _GATES[gate](answer, entry)


def _is_short(answer: str, entry: Mapping[str, Any]) -> bool:
    """Limited length, because the scorer's time grows at least quadratically."""
    return len(answer) <= max(MAX_CHARACTERS, 2 * len(entry["answer"] or ""))


def _is_moves(answer: str, entry: Mapping[str, Any]) -> bool:
    """Numbers of at most two digits, because the scorer executes a number of moves one by one."""
    return len(answer) <= MAX_CHARACTERS and not _LONG_NUMBER.search(answer)


def _is_fraction(answer: str, entry: Mapping[str, Any]) -> bool:
    """A limited exponent, because 1e999999999 as a fraction is an integer with a billion digits."""
    return _FRACTION_TEXT.fullmatch(answer) is not None


def _is_number(answer: str, entry: Mapping[str, Any]) -> bool:
    """No letters that spell nan: the scorer's min(1.0, nan) would give the full reward."""
    return _NUMBER_TEXT.fullmatch(answer) is not None


def _is_list(answer: str, entry: Mapping[str, Any]) -> bool:
    """Lists and tuples of strings and numbers. No names: `eval` resolves the scorer's names, also the right
    answer."""
    tree = _tree(answer, MAX_CHARACTERS)
    return tree is not None and all(_is_literal(node) for node in ast.walk(tree))


def _is_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (str, int, float)
    return isinstance(node, (ast.Expression, ast.List, ast.Tuple, ast.Load, ast.UnaryOp, ast.USub))


def _is_arithmetic(answer: str, entry: Mapping[str, Any]) -> bool:
    """Decimal integers only: scorers count numbers with a pattern that misses 0x18, 2_4 and comments."""
    return _ARITHMETIC_TEXT.fullmatch(answer) is not None and _is_light(answer, _Allowed())


def _is_formula(answer: str, entry: Mapping[str, Any]) -> bool:
    """A formula may use the symbols of the entry, and Integral only if the reference answer uses Integral."""
    known = set(_WORD.findall(f"{entry['answer']} {entry['metadata'].get('variable', '')}"))
    functions = FUNCTIONS | (known & UNSOLVED)
    allowed = _Allowed(symbols=(known - functions) | CONSTANTS | {"C"}, functions=functions, has_powers=True)
    return _FORMULA_TEXT.fullmatch(answer) is not None and _is_light(answer, allowed)


def _is_light(answer: str, allowed: "_Allowed") -> bool:
    tree = _tree(answer, MAX_FORMULA_CHARACTERS)
    try:
        return tree is not None and _weight(tree.body, allowed) <= MAX_WEIGHT
    except (_Refused, RecursionError):
        return False


def _tree(answer: str, max_characters: int) -> ast.Expression | None:
    """The syntax tree; None if the answer is too long, nested too deeply, or not an expression."""
    if len(answer) > max_characters or _depth(answer) > MAX_DEPTH:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _depth(answer: str) -> int:
    """Largest number of brackets open at the same time, including brackets in strings."""
    depth = deepest = 0
    for letter in answer:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest


@dataclass(frozen=True, slots=True)
class _Allowed:
    """Names and operations that a formula may use besides numbers and the four operations."""

    symbols: frozenset[str] | set[str] = frozenset()
    functions: frozenset[str] | set[str] = frozenset()
    has_powers: bool = False


def _weight(node: ast.expr, allowed: _Allowed) -> float:
    """An upper bound of the bits and of the degree of a value; raises _Refused for nodes outside of the
    allow-list."""
    match node:
        case ast.Constant():
            return max(1.0, math.log2(_number(node) + 1))
        case ast.Name() if node.id in allowed.symbols:
            return 1.0
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return _weight(node.operand, allowed)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return max(_weight(node.left, allowed), _weight(node.right, allowed))
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            return _weight(node.left, allowed) + _weight(node.right, allowed)
        case ast.BinOp(op=ast.Pow()) if allowed.has_powers:
            _weight(node.right, allowed)
            return _weight(node.left, allowed) * max(1.0, _bounded(_size(node.right)))
        case ast.Call(func=ast.Name(id=name), args=[first, *_], keywords=[]) if name in allowed.functions:
            weight = sum(_weight(argument, allowed) for argument in node.args)
            # sympy simplifies exp(n*log(9)) to 9**n.
            return weight * (max(1.0, _bounded(_size(first, calls=1.0))) if name == "exp" else 1.0)
    raise _Refused


def _size(node: ast.expr, calls: float = math.inf) -> float:
    """An upper bound of the value of an exponent, with symbols as 1 and function values as `calls`."""
    match node:
        case ast.Constant():
            return _number(node)
        case ast.Name():
            return 1.0
        case ast.Call():
            return calls
        case ast.UnaryOp():
            return _size(node.operand, calls)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return _size(node.left, calls) + _size(node.right, calls)
        case ast.BinOp(op=ast.Mult()):
            return _size(node.left, calls) * _size(node.right, calls)
        case ast.BinOp(op=ast.Div(), right=ast.Constant()) if _size(node.right) >= 1:
            return _size(node.left, calls)
        case ast.BinOp(op=ast.Pow(), right=ast.Constant()) if calls != math.inf:
            return float(_size(node.left, calls) ** _bounded(_size(node.right)))
    return math.inf


def _bounded(size: float) -> float:
    if not size <= MAX_EXPONENT:
        raise _Refused
    return size


def _number(node: ast.Constant) -> float:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_NUMBER:
        raise _Refused
    return float(abs(value))


_GATES: Mapping[Gate, Callable[[str, Mapping[str, Any]], bool]] = {
    "none": lambda answer, entry: True,
    "short": _is_short,
    "moves": _is_moves,
    "fraction": _is_fraction,
    "number": _is_number,
    "list": _is_list,
    "arithmetic": _is_arithmetic,
    "formula": _is_formula,
}
