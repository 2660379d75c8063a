"""Canaries of trust `in_process`: tests that must fail, planted beside and inside the host's test files. Pure.

Some stand in files of their own, which import nothing of the candidate's; candidate code that makes every test pass, whatever
it checks, makes them pass too. `plant` adds more at the end of a test file, in the same module as its tests: one that fails by
itself, and copies of some of its tests, cut off behind their first plain `assert A == B`, in which something that nothing
honest equals stands for the expected side: a random value of its type where it is a literal, a function elsewhere. A value that
equals everything, or all of a kind, passes those.

Gaps: only `==` at the top level of a test function without decorators is asked in this way. Values that lie about `<`, `in` or
in unittest's methods are not noticed, and neither is code that recognises canaries by their random names.
"""

from __future__ import annotations

import ast
import copy
import secrets
from collections.abc import Collection
from typing import Any

MAX_COPIES = 8
_SOLE = """
import math
def {a}():
    assert 1 == 2
def {b}():
    raise ValueError("must fail")
def {c}():
    assert not math.isclose(1.0, 1.0) and all([False])
"""
_PARAMETRISING = ("pytestmark", "pytest_generate_tests", "params")
_LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp)


def random_name() -> str:
    return f"test_{secrets.token_hex(8)}"


def sole_file() -> tuple[str, tuple[str, ...]]:
    """A file of canaries and their names."""
    names = (random_name(), random_name(), random_name())
    return _SOLE.format(**dict(zip("abc", names, strict=True))), names


def plant(source: str, expected: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """A test file with canaries at its end, and their names; `expected` are the names of its tests that must pass.

    A file in which marks or fixtures might give a canary parameters, and one that is not Python, stays as it is.
    """
    if any(word in source for word in _PARAMETRISING):
        return source, ()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source, ()
    sole = random_name()
    planted, names = [f"def {sole}():\n    assert [1] == [2]\n"], [sole]
    copies = [made for node in tree.body if (made := _copy(node, expected)) is not None]
    for made in secrets.SystemRandom().sample(copies, min(len(copies), MAX_COPIES)):
        made.name = random_name()
        planted.append(ast.unparse(ast.fix_missing_locations(made)))
        names.append(made.name)
    return "\n\n".join([source, *planted]) + "\n", tuple(names)


def _copy(node: ast.stmt, expected: Collection[str]) -> ast.FunctionDef | None:
    if not isinstance(node, ast.FunctionDef) or node.name not in expected or node.decorator_list:
        return None
    for index, part in enumerate(node.body):
        if any(isinstance(inner, (ast.Return, ast.Yield, ast.YieldFrom)) for inner in ast.walk(part)):
            return None
        if isinstance(part, ast.Assert) and isinstance(part.test, ast.Compare) and [type(o) for o in part.test.ops] == [ast.Eq]:
            made = copy.deepcopy(node)
            made.body = made.body[: index + 1]
            last = made.body[index]
            assert isinstance(last, ast.Assert)
            assert isinstance(last.test, ast.Compare)
            sides = last.test.left, last.test.comparators[0]
            swapped = isinstance(sides[0], _LITERALS) or (_calls(sides[1]) and not _calls(sides[0]))
            given, wanted = sides[::-1] if swapped else sides
            last.test.left, last.test.comparators[0], last.msg = given, _other(wanted), None
            return made
    return None


def _calls(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _other(wanted: ast.expr) -> ast.expr:
    """What no honest value equals, of the type of `wanted` where that can be read."""
    random, token = float(10**6 + secrets.randbelow(10**9)), secrets.token_hex(8)
    if isinstance(wanted, (ast.List, ast.Tuple, ast.Set)):
        wanted.elts.append(ast.Constant(token))
    elif isinstance(wanted, ast.Dict):
        wanted.keys.append(ast.Constant(token))
        wanted.values.append(ast.Constant(token))
    elif isinstance(wanted, ast.UnaryOp):
        wanted.operand = _other(wanted.operand)
    elif isinstance(wanted, ast.Constant) and type(wanted.value) in (bool, int, float, str, bytes):
        value: Any = wanted.value
        others: dict[type, Any] = {bool: not value, int: int(random), float: random + 0.5, str: token, bytes: token.encode()}
        return ast.Constant(others[type(value)])
    else:
        return ast.parse("lambda: 0", mode="eval").body
    return wanted
