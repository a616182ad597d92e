"""Run tests without a submission, to find out which values they pass to one. Runs in the tests' sandbox.

The probe decides, before any submission exists, whether tests can run in another process than the submission.
They can if they pass only plain data, which `codec` can encode. Every statement of the tests runs, even if an
earlier one failed: assertions fail here, since there is nothing to test. Every call to the submission returns a
reference to a dummy object.
"""

from __future__ import annotations

import ast

from rookery.sandbox_runtime.grader.codec import NotPlain, encode
from rookery.sandbox_runtime.grader.remote_objects import NotPlainArgument, Remote, SubmissionClient

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_REQUESTS = 10_000
DUMMY_RESULTS = {"len": 1, "contains": False, "bool": True, "str": "", "repr": "", "eq": False, "items": None}
PLAIN_TYPES = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
DATA_METHODS = frozenset(name for kind in PLAIN_TYPES for name in dir(kind) if not name.startswith("_"))
"""Names of the public methods of the built-in types in `PLAIN_TYPES`."""


class ProbeExhausted(BaseException):
    """The probe has made its maximum number of requests."""


class ProbeClient(SubmissionClient):
    """Replaces the client of a submission: checks the arguments of requests and returns dummy results."""

    def __init__(self) -> None:
        self.end_verdict = self.detail = self.decided = ""
        self.epoch = self._requests = 0
        self._coroutines = {}

    def request(self, operation: str, args: Any) -> Any:
        self._requests += 1
        if self._requests > MAX_REQUESTS:
            raise ProbeExhausted
        # Calls of methods of plain data, such as `sort(key=…)`, do not reach the submission.
        if operation == "call" and object.__getattribute__(args[0], "_name") not in DATA_METHODS:
            try:
                for one in args:
                    encode(one, self._encode_reference)
            except NotPlain as error:
                raise NotPlainArgument(str(error)) from None
        if operation == "getattr":
            return Remote(self, 0, args[1])
        if operation == "next" and self._requests % 2:  # one or two items, so that loops are entered
            raise StopIteration
        return DUMMY_RESULTS[operation] if operation in DUMMY_RESULTS else Remote(self, 0, "")


class ErrorTolerantTransformer(ast.NodeTransformer):
    """Rewrites tests so that an exception ends only its own statement, and `while` loops run once."""

    def visit_While(self, node: ast.While) -> Any:
        once = ast.For(
            target=ast.Name(id="_once", ctx=ast.Store()),
            iter=ast.Tuple(elts=[node.test], ctx=ast.Load()),
            body=node.body,
            orelse=node.orelse,
        )
        return self.generic_visit(ast.copy_location(once, node))

    def generic_visit(self, node: ast.AST) -> Any:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [_suppress_errors(one) for one in statements])
        return node


def _suppress_errors(node: Any) -> Any:
    if not isinstance(node, ast.stmt) or isinstance(node, (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)):
        return node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node
    passed = ast.ExceptHandler(type=ast.Name(id="Exception", ctx=ast.Load()), name=None, body=[ast.Pass()])
    return ast.copy_location(ast.Try(body=[node], handlers=[passed], orelse=[], finalbody=[]), node)


def make_error_tolerant(tree: ast.Module) -> ast.Module:
    """Rewrite tests so that each of their statements runs, even if an earlier one fails."""
    rewritten: ast.Module = ast.fix_missing_locations(ErrorTolerantTransformer().visit(tree))
    return rewritten
