"""How tests stand to a submission: what they use of it, and whether they can do so from another process. Pure.

Promises:
- the form is decided by the tests, and by the task's own solution, never by what a submission does: else one could
  choose the weaker form for itself;
- every name that the tests use and do not have themselves is one of the submission's;
- what forbids the separate form is said in words.
"""

import ast
import builtins
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from rookery.core import TaskError

Form: TypeAlias = Literal["separate", "shared"]

MODULES: Final = ("solution", "submission", "main")
"""Names that tests may import the submission by."""
_LOOKS_INSIDE: Final = frozenset(
    {"isinstance", "issubclass", "assertIsInstance", "assertRaises", "assertRaisesRegex", "raises", "getsource"}
    | {"signature", "getmembers", "patch", "type", "id", "is_dataclass", "fields", "get_type_hints", "isfunction"}
    | {
        "iscoroutinefunction",
        "isgeneratorfunction",
        "isgenerator",
        "isclass",
        "deepcopy",
        "vars",
        "dir",
        "callable",
    }
)
"""Calls that need the thing itself; a reference to it is not enough."""
_GIVEN: Final = frozenset({"candidate", "__name__", "__file__", "__doc__"})


class Uses(msgspec.Struct, frozen=True):
    """What tests use of a submission."""

    names: tuple[str, ...]
    """Names of its module."""
    why_shared: str = ""
    """Why the tests need the submission in their own process; empty where their text gives no reason."""
    has_tests: bool = True
    """Whether there is anything in them that would be run as a test."""


def uses_of(tests: str | list[str], entry_point: str = "") -> Uses:
    """`TaskError` where the tests are no Python."""
    sources = [tests] if isinstance(tests, str) else tests
    body: list[ast.stmt] = []
    for at, source in enumerate(sources):
        try:
            body += ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = "tests" if isinstance(tests, str) else f"tests[{at}]"
            raise TaskError(f"{where} is no Python: {error}") from error
    tree = ast.Module(body=body, type_ignores=[])
    own = set(_bound(tree)) | set(dir(builtins)) | _GIVEN
    imported = set(_imported(tree))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    names = {name for name in used if name not in own} | ({entry_point} if entry_point else set())
    why = next(_inside(tree, names | imported | {"candidate"}), "")
    has_tests = not isinstance(tests, str) or _has_tests(tree, entry_point)
    return Uses(tuple(sorted(names)), why, has_tests)


def _has_tests(tree: ast.Module, entry_point: str) -> bool:
    """Return whether a source of tests has a test, by the rules of `inside.grader.discovered`."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if not functions and not classes:
        return True  # a script: it passes when it runs to its end
    if any(isinstance(node, ast.Assert) for node in tree.body) or any(n.startswith("test") for n in functions):
        return True
    if any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in tree.body):
        return True  # a script that calls its own functions
    if "check" in functions and entry_point:
        return True
    return any(
        node.bases
        or any(
            isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name.startswith("test")
            for one in node.body
        )
        for node in classes
    )


def _bound(tree: ast.AST) -> Iterator[str]:
    """Names that the tests make themselves, wherever in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0]
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name


def _imported(tree: ast.AST) -> Iterator[str]:
    """Names that the tests import from the submission."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                yield alias.asname or alias.name


def _inside(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """What the tests do that needs the submission in their own process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES and any(a.name == "*" for a in node.names):
            yield f"the tests import everything from {node.module}"
        elif isinstance(node, ast.ClassDef) and (found := _names(node.bases) & names):
            yield f"the tests derive a class from {min(found)}"
        elif isinstance(node, ast.ExceptHandler) and node.type and (found := _names([node.type]) & names):
            yield f"the tests catch {min(found)}"
        elif isinstance(node, ast.Call) and (called := _called(node)) in _LOOKS_INSIDE:
            # `assertRaises(ValueError, f, 1)` names the function to call after the kind of error.
            looked = node.args[:1] if called.startswith(("assertRaises", "raises")) else node.args
            if found := {n for arg in looked for n in _direct(arg)} & names:
                yield f"the tests look into {min(found)} ({called})"
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            found = {n for arg in (node.left, *node.comparators) for n in _direct(arg)} & names
            if found:
                yield f"the tests ask whether something is {min(found)}"


def _called(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _names(nodes: list[ast.expr]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _direct(node: ast.expr) -> Iterator[str]:
    """Names that are handed over themselves, not what they return."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield from _direct(node.value)
    elif isinstance(node, ast.Tuple | ast.List):
        for one in node.elts:
            yield from _direct(one)
