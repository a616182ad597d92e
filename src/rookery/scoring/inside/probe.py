"""Run tests without a submission, to learn what they pass to one. Runs in the tests' sandbox.

The probe decides whether tests can run in another process than the submission before any submission is seen. Each
statement of the tests runs, whatever became of the one before it: assertions fail here, since there is nothing to
test. Every call to the submission returns a reference to nothing in particular.
"""

from __future__ import annotations

import ast

from rookery.scoring.inside.codec import NotPlain, encode
from rookery.scoring.inside.far import Far, Inseparable, Remote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_ASKED = 10_000
PLAIN = {"len": 1, "contains": False, "bool": True, "str": "", "repr": "", "eq": False, "items": None}
KINDS = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
OF_DATA = frozenset(name for kind in KINDS for name in dir(kind) if not name.startswith("_"))
"""Methods of plain data."""


class Enough(BaseException):
    """The probe has asked as much as it may."""


class Probe(Far):
    """Stands where requests go to a submission; checks what they carry and answers with references."""

    def __init__(self) -> None:
        self.gone = self.detail = self.decided = ""
        self.epoch = self._asked = 0
        self._coroutines = {}

    def ask(self, do: str, args: Any) -> Any:
        self._asked += 1
        if self._asked > MOST_ASKED:
            raise Enough
        # A function that returns data is called with plain arguments; `sort(key=…)` of that data is not its call.
        if do == "call" and object.__getattribute__(args[0], "_name") not in OF_DATA:
            try:
                for one in args:
                    encode(one, self._sent)
            except NotPlain as error:
                raise Inseparable(str(error)) from None
        if do == "getattr":
            return Remote(self, 0, args[1])
        if do == "next" and self._asked % 2:  # one item or two: enough for a loop to be entered
            raise StopIteration
        return PLAIN[do] if do in PLAIN else Remote(self, 0, "")


class Patient(ast.NodeTransformer):
    """Makes every statement run alone: what it raises is passed over, and no `while` repeats."""

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
                setattr(node, name, [_alone(one) for one in statements])
        return node


def _alone(node: Any) -> Any:
    if not isinstance(node, ast.stmt) or isinstance(node, (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)):
        return node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node
    passed = ast.ExceptHandler(type=ast.Name(id="Exception", ctx=ast.Load()), name=None, body=[ast.Pass()])
    return ast.copy_location(ast.Try(body=[node], handlers=[passed], orelse=[], finalbody=[]), node)


def patient(tree: ast.Module) -> ast.Module:
    """Return the tests so that every statement of theirs runs."""
    made: ast.Module = ast.fix_missing_locations(Patient().visit(tree))
    return made
