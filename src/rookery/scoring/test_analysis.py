"""Static analysis of a task's unit tests: which names of the submission they use, and whether they can run in
another process than the submission.

Guarantees:
- The analysis reads the tests only, never a submission, which could otherwise choose the weaker isolation.
- Every name that the tests use and neither define nor import counts as a name of the submission, unless it is a
  built-in name.
- If the tests must share the submission's process, the reason is given.
"""

import ast
import builtins
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from rookery.core import TaskError

Isolation: TypeAlias = Literal["separate", "shared"]
"""The place where tests run: in another sandbox than the submission (`separate`), or in its process (`shared`)."""

SUBMISSION_MODULES: Final = ("solution", "submission", "main")
"""Module names under which tests may import the submission."""
_INTROSPECTION: Final = frozenset(
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
"""Functions that inspect an object itself. Tests that apply one to an object of the submission must share its
process, because a reference to an object in another process is not enough."""
_PREDEFINED: Final = frozenset({"candidate", "__name__", "__file__", "__doc__"})


class TestAnalysis(msgspec.Struct, frozen=True):
    """Result of `analyze_tests`, the static analysis of the source of a task's tests."""

    names: tuple[str, ...]
    """Top-level names of the submission that the tests use."""
    shared_reason: str = ""
    """The reason why the tests must run in the submission's process; empty if their source shows no reason."""
    has_tests: bool = True
    """True if the source contains a test."""


def analyze_tests(tests: str | list[str], entry_point: str = "") -> TestAnalysis:
    """Analyze the source of a task's tests. Raise `TaskError` if it is not valid Python.

    `entry_point` names the submission's function that is passed to `check(candidate)`; empty if there is none.
    """
    sources = [tests] if isinstance(tests, str) else tests
    body: list[ast.stmt] = []
    for at, source in enumerate(sources):
        try:
            body += ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = "tests" if isinstance(tests, str) else f"tests[{at}]"
            raise TaskError(f"{where} is not valid Python: {error}") from error
    tree = ast.Module(body=body, type_ignores=[])
    own = set(_bound_names(tree)) | set(dir(builtins)) | _PREDEFINED
    imported = set(_imported_names(tree))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    names = {name for name in used if name not in own} | ({entry_point} if entry_point else set())
    why = next(_shared_process_reasons(tree, names | imported | {"candidate"}), "")
    has_tests = not isinstance(tests, str) or _has_tests(tree, entry_point)
    return TestAnalysis(tuple(sorted(names)), why, has_tests)


def _has_tests(tree: ast.Module, entry_point: str) -> bool:
    """Return whether the source contains a test, by the rules that the grader uses for test discovery."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if not functions and not classes:
        return True  # a script passes if it runs to its end
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


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield all names that the tests define, in any scope."""
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


def _imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield names that the tests import from the submission."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in SUBMISSION_MODULES:
            for alias in node.names:
                yield alias.asname or alias.name


def _shared_process_reasons(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Yield each reason why the tests must run in the submission's process."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module in SUBMISSION_MODULES
            and any(a.name == "*" for a in node.names)
        ):
            yield f"the tests import everything from {node.module}"
        elif isinstance(node, ast.ClassDef) and (found := _names_in(node.bases) & names):
            yield f"the tests derive a class from {min(found)}"
        elif isinstance(node, ast.ExceptHandler) and node.type and (found := _names_in([node.type]) & names):
            yield f"the tests catch {min(found)}"
        elif isinstance(node, ast.Call) and (called := _called_name(node)) in _INTROSPECTION:
            # In `assertRaises(ValueError, f, 1)` only the first argument is inspected; the second is called.
            looked = node.args[:1] if called.startswith(("assertRaises", "raises")) else node.args
            if found := {n for arg in looked for n in _direct_names(arg)} & names:
                yield f"the tests inspect {min(found)} ({called})"
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            found = {n for arg in (node.left, *node.comparators) for n in _direct_names(arg)} & names
            if found:
                yield f"the tests compare by identity with {min(found)}"


def _called_name(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _names_in(nodes: list[ast.expr]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _direct_names(node: ast.expr) -> Iterator[str]:
    """Yield names whose own value an expression uses, but not names that it calls."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield from _direct_names(node.value)
    elif isinstance(node, ast.Tuple | ast.List):
        for one in node.elts:
            yield from _direct_names(one)
