"""Runs the small programs that the policy writes, as the `python` tool would show them, without a sandbox.

Promises:
- nothing but assignments, integer arithmetic and `print` ever runs; anything else is refused in words;
- no program takes long: no loops, and no number above `MOST_BITS`;
- what such a program prints, and how it fails, is what Python and the `python` tool say.
"""

import ast
import contextlib
import io
import linecache
import operator
import traceback
import warnings
from collections.abc import Callable
from typing import Final

from rookery.environments.python_tool import python
from rookery.environments.text import NO_OUTPUT, clip
from rookery.environments.tools import InvalidArguments

FILE: Final = "program.py"
MOST_BITS: Final = 4_096
MOST_BYTES: Final = 2_000
REFUSED: Final = "[stopped: only small arithmetic is done here]"
_OPERATORS: Final[dict[type[ast.operator], Callable[[int, int], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}
_Value = int | float


class _Refused(Exception):  # noqa: N818  (a way to stop, told in words)
    pass


def observation(name: str, arguments: str, most: int) -> str:
    """What the policy reads after a call, cut to `most` bytes."""
    if name != python.name:
        return f"There is no tool named {clip(name, 100)!r}. The tools are: {python.name}."
    try:
        code = python.parse(arguments)["code"]
    except InvalidArguments as problem:
        return str(problem)
    return clip(run_program(code), most)


def run_program(code: str) -> str:
    """The output of a program, with its traceback and exit code where it fails."""
    if len(code) > MOST_BYTES:
        return REFUSED
    output = io.StringIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code, FILE)
            rehearsal = _Rehearsal()
            with contextlib.suppress(ArithmeticError, NameError):
                rehearsal.body(tree.body)
            # What comes after a failure was not rehearsed.
            del tree.body[rehearsal.done + 1 :]
            compiled = compile(tree, FILE, "exec")
    except _Refused:
        return REFUSED
    except (SyntaxError, ValueError) as error:
        return _failure("", traceback.format_exception_only(error))
    except (RecursionError, MemoryError):
        return REFUSED
    try:
        # The rehearsal has seen every step of it, so nothing in it can reach further or grow.
        with contextlib.redirect_stdout(output):
            exec(compiled, {"__builtins__": {"print": print}})  # noqa: S102
    except (ArithmeticError, NameError) as error:
        linecache.cache[FILE] = (len(code), None, code.splitlines(True), FILE)
        trace = error.__traceback__
        shown = traceback.format_exception(type(error), error, trace and trace.tb_next)
        del linecache.cache[FILE]
        return _failure(output.getvalue(), shown)
    return output.getvalue() or NO_OUTPUT


def _failure(before: str, lines: list[str]) -> str:
    return f"{before}{''.join(lines)}[exit code 1]"


class _Rehearsal:
    """Does a program's steps on numbers of bounded size, and stops at whatever is not arithmetic."""

    def __init__(self) -> None:
        self.names: dict[str, _Value] = {}
        self.done = 0
        """Statements."""

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != "print":
                    self.names[name] = self.value(value)
                case ast.AugAssign(target=ast.Name(id=name), op=op, value=value) if name != "print":
                    self.names[name] = self.combined(op, self.name(name), self.value(value))
                case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=args, keywords=[])):
                    for value in args:
                        self.value(value)
                case ast.Expr(value=value):
                    self.value(value)
                case _:
                    raise _Refused
            self.done += 1

    def value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Constant(value=int() as found) if type(found) is int:
                return self.bounded(found)
            case ast.Name(id=name) if name != "print":
                return self.name(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self.combined(op, self.value(left), self.value(right))
            case _:
                raise _Refused

    def name(self, name: str) -> _Value:
        if name.startswith("_"):  # some of these are there without having been assigned
            raise _Refused
        if name not in self.names:
            raise NameError(name)
        return self.names[name]

    def combined(self, op: ast.operator, left: _Value, right: _Value) -> _Value:
        if type(op) not in _OPERATORS:
            raise _Refused
        return self.bounded(_OPERATORS[type(op)](left, right))  # type: ignore[arg-type]

    def bounded(self, value: _Value) -> _Value:
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise _Refused
        return value
