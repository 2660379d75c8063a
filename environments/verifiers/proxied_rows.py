"""Given test code, read without running it: which tests it has, which names it takes from the candidate, what helps it.

Pure: text in, `TestCode` out, or InputError with the field. A prompt that is Python splits into helpers (functions and
classes that are complete, imports, constants), which the tests may use and which run beside them, and what is to be written
(the entry point, and whatever has no more body than a docstring, `pass`, `...` or `raise NotImplementedError`).
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator
from dataclasses import dataclass

from data_contracts.errors import InputError

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ASSERTING = ("assert", "fail", "raises", "warns", "expect")


@dataclass(frozen=True, kw_only=True)
class TestCode:
    """What `proxied` needs to know of a row's tests; the fields are those of its settings."""

    __test__ = False  # pytest looks for classes of this name

    tests: str
    helpers: str
    names: tuple[str, ...]
    expected: tuple[str, ...]
    entry_point: str | None
    in_place: bool = False


def describe(tests: str, *, prompt: str = "", entry_point: str | None = None) -> TestCode:
    """Everything about test code that can be read off it. Raises InputError for code that cannot be graded."""
    helpers = helper_code(prompt, entry_point)
    tree = _parsed(tests, "tests")
    free = free_names(tests) - _defined(_parsed(helpers, "helpers"))
    names = sorted(free | ({entry_point} if entry_point else set()))
    expected = tuple(test_ids(tree))
    code = TestCode(
        tests=tests, helpers=helpers, names=tuple(names), expected=expected, entry_point=entry_point,
        in_place=_discards(tree, {"candidate", *names}),
    )  # fmt: skip
    check_tests(code)
    return code


def check_tests(code: TestCode) -> None:
    """Raises InputError for tests that cannot be run, or that would pass whatever the candidate does."""
    if not isinstance(code.tests, str) or not isinstance(code.helpers, str):
        raise InputError("expected code as text", field="tests", remedy="Write the test code as one string")
    tree, helpers = _parsed(code.tests, "tests"), _parsed(code.helpers, "helpers")
    known = list(test_ids(tree))
    if not code.expected or not set(code.expected) <= set(known):
        raise InputError(
            f"expected the ids of tests in this code, which has {', '.join(known[:9]) or 'none'}", field="expected",
            remedy="Write check(candidate), test_ functions without parameters, or unittest.TestCase classes",
        )  # fmt: skip
    if "check" in code.expected and (not code.entry_point or code.entry_point not in code.names):
        raise InputError("check(candidate) needs the name of the function to be checked", field="entry_point", remedy="Name it")
    if not all(name.isidentifier() for name in code.names):
        raise InputError("expected names of Python", field="names", remedy="Name what the tests use of the solution")
    deciding = _deciding([*tree.body, *helpers.body])
    for test in code.expected:
        if not _decides(_find(tree, test), deciding):
            raise InputError(
                f"the test '{test}' asserts nothing, so that everything passes", field="tests", remedy="Add an assert to it"
            )


def helper_code(prompt: str, entry_point: str | None) -> str:
    """The complete definitions of a prompt; nothing when it is not Python."""
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    kept = [node for node in tree.body if not _to_be_written(node, entry_point) and not _is_text(node)]
    return ast.unparse(ast.Module(body=kept, type_ignores=[])) if kept else ""


def defines(source: str, name: str) -> bool:
    """Whether Python text defines `name` at its top level."""
    try:
        return name in _defined(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def test_ids(tree: ast.Module) -> Iterator[str]:
    """The ids of the tests in the order of the code."""
    for node in tree.body:
        if isinstance(node, _FUNCTIONS):
            required = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
            if node.name == "check" and required == 1:
                yield "check"
            elif node.name.startswith("test") and required == 0 and not node.args.kwonlyargs:
                yield node.name
        elif isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
            for method in node.body:
                if isinstance(method, _FUNCTIONS) and method.name.startswith("test"):
                    yield f"{node.name}.{method.name}"


def _parsed(source: str, field: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        place = f" in line {line}" if line else ""
        raise InputError(f"is not Python{place}: {str(error)[:120]}", field=field, remedy="Correct the code") from None


def _to_be_written(node: ast.stmt, entry_point: str | None) -> bool:
    if isinstance(node, _FUNCTIONS):
        return node.name == entry_point or _is_stub(node)
    if isinstance(node, ast.ClassDef):
        return node.name == entry_point or any(isinstance(part, _FUNCTIONS) and _is_stub(part) for part in node.body)
    return False


def _is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return all(
        _is_text(part) or isinstance(part, ast.Pass) or (isinstance(part, ast.Raise) and "NotImplemented" in ast.unparse(part))
        for part in node.body
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top level."""
    table = symtable.symtable(ast.unparse(tree), "code", "exec")
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}


def free_names(source: str) -> set[str]:
    """Names that code takes from outside itself and that are no builtins."""
    top = symtable.symtable(source, "tests", "exec")
    found: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return {name for name in found - bound if not hasattr(builtins, name) and not name.startswith("__")}


def _discards(tree: ast.Module, names: set[str]) -> bool:
    """Whether a call of the candidate stands alone: then the test looks at what the call did to its arguments."""
    guarded: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.Try)):
            guarded |= {id(inner) for inner in ast.walk(node)}
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id in names
        and id(node) not in guarded
        for node in ast.walk(tree)
    )


def _deciding(nodes: list[ast.stmt]) -> set[str]:
    """Names of functions and methods that can make a test fail, through others too."""
    functions = [inner for node in nodes for inner in ast.walk(node) if isinstance(inner, _FUNCTIONS)]
    found: set[str] = set()
    while new := {function.name for function in functions if function.name not in found and _decides(function, found)}:
        found |= new
    return found


def _decides(node: ast.AST, deciding: set[str]) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Raise) or (isinstance(inner, ast.Assert) and not isinstance(inner.test, ast.Constant)):
            return True
        if isinstance(inner, ast.Call):
            name = ast.unparse(inner.func).rpartition(".")[2]
            if name in deciding or name.lower().startswith(_ASSERTING):
                return True
    return False


def _find(tree: ast.Module, test: str) -> ast.AST:
    node: ast.AST = tree
    for name in test.split("."):
        body = getattr(node, "body", [])
        node = next(part for part in reversed(body) if getattr(part, "name", None) == name)
    return node
