"""Evaluates the small programs that the policy writes without a sandbox, with the output of the tool `python`.

Guarantees:
- only assignments, integer arithmetic and `print` run; anything else is refused with a message;
- no program takes long: there are no loops and no numbers above `MAX_BITS` bits;
- output and errors of such a program are those of Python and the tool `python`.
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
MAX_BITS: Final = 4_096
MAX_BYTES: Final = 2_000
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


class _RefusedError(Exception):
    pass


def run_tool_call(name: str, arguments: str, max_bytes: int) -> str:
    """Return what the policy reads after a tool call, cut to `max_bytes` bytes."""
    if name != python.name:
        return f"There is no tool named {clip(name, 100)!r}. The tools are: {python.name}."
    try:
        code = python.parse(arguments)["code"]
    except InvalidArguments as problem:
        return str(problem)
    return clip(run_program(code), max_bytes)


def run_program(code: str) -> str:
    """Return the output of a program, with traceback and exit code if it fails."""
    if len(code) > MAX_BYTES:
        return REFUSED
    output = io.StringIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code, FILE)
            dry_run = _DryRun()
            with contextlib.suppress(ArithmeticError, NameError):
                dry_run.body(tree.body)
            # Statements after a failure were not checked.
            del tree.body[dry_run.statements_done + 1 :]
            compiled = compile(tree, FILE, "exec")
    except _RefusedError:
        return REFUSED
    except (SyntaxError, ValueError) as error:
        return _failure("", traceback.format_exception_only(error))
    except (RecursionError, MemoryError):
        return REFUSED
    try:
        # The dry run evaluated every step, so the program cannot do anything else.
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


class _DryRun:
    """Evaluates a program on numbers of bounded size, and stops at anything that is not arithmetic."""

    def __init__(self) -> None:
        self.names: dict[str, _Value] = {}
        self.statements_done = 0
        """Number of statements that were evaluated."""

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != "print":
                    self.names[name] = self.value(value)
                case ast.AugAssign(target=ast.Name(id=name), op=op, value=value) if name != "print":
                    self.names[name] = self.apply_operator(op, self.name(name), self.value(value))
                case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=args, keywords=[])):
                    for value in args:
                        self.value(value)
                case ast.Expr(value=value):
                    self.value(value)
                case _:
                    raise _RefusedError
            self.statements_done += 1

    def value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Constant(value=int() as number) if type(number) is int:
                return self.check_size(number)
            case ast.Name(id=name) if name != "print":
                return self.name(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self.apply_operator(op, self.value(left), self.value(right))
            case _:
                raise _RefusedError

    def name(self, name: str) -> _Value:
        if name.startswith("_"):  # some of these exist without an assignment
            raise _RefusedError
        if name not in self.names:
            raise NameError(name)
        return self.names[name]

    def apply_operator(self, op: ast.operator, left: _Value, right: _Value) -> _Value:
        if type(op) not in _OPERATORS:
            raise _RefusedError
        return self.check_size(_OPERATORS[type(op)](left, right))  # type: ignore[arg-type]

    def check_size(self, value: _Value) -> _Value:
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise _RefusedError
        return value
