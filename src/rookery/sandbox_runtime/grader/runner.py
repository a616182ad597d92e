"""Run tests against a submission and report the verdict of each. Runs in the tests' sandbox.

There are three modes. `separate`: the submission is in another sandbox, and the tests use references to it. Its
results arrive as plain data, so comparisons are between exact built-in values. `shared`: the submission is a
module of this process, which makes verdicts easier to forge. `probe`: there is no submission, and the tests run
only to find out whether they pass only plain data to it.

Guarantees:
- the end of a submission, its limits and its exceptions are distinguished from a failed assertion;
- `separate`: a value of the submission that is not plain data equals no plain value, even if its class defines
  `__eq__`;
- a submission cannot change the mode: a test that passes it a value that cannot be sent fails;
- pytest is not needed: `raises`, `approx`, `fail` and `mark.parametrize` are provided here.
"""

from __future__ import annotations

import ast
import builtins
import sys
from contextlib import suppress
from functools import partial

from rookery.sandbox_runtime.grader.codec import GraderChannel, add_module, escape_surrogates
from rookery.sandbox_runtime.grader.probe import ProbeClient, ProbeExhausted, make_error_tolerant
from rookery.sandbox_runtime.grader.pytest_stub import install_pytest_stub
from rookery.sandbox_runtime.grader.remote_objects import (
    NotPlainArgument,
    Remote,
    SubmissionClient,
    SubmissionEnded,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MODULES = ("solution", "submission", "main")
"""Module names under which tests may import the submission."""


class CaseRunner:
    """Runs tests one by one and reports the verdict of each."""

    def __init__(self, send: Callable[[str, Any], None], client: SubmissionClient | None) -> None:
        self._send = send
        self._client = client

    def case(self, number: int, work: Callable[[], object]) -> None:
        client = self._client
        if client is not None:
            client.end_verdict = client.detail = client.decided = ""
        self._send("b", number)
        verdict, detail = "passed", ""
        try:
            work()
        except SubmissionEnded:
            pass
        except BaseException as error:
            verdict, detail = judge_exception(error)
        if client is not None and client.end_verdict:
            verdict, detail = client.end_verdict, client.detail
        by = client.decided if client is not None else ""
        self._send("v", {"n": number, "verdict": verdict, "detail": escape_surrogates(detail), "by": by})


def judge_exception(error: BaseException) -> tuple[str, str]:
    """Return the verdict and the detail for an exception that ended a test."""
    theirs = error.__dict__.get("of_the_submission")
    if isinstance(error, MemoryError):
        return "memory", "MemoryError"
    if theirs is not None:
        return "crash", escape_surrogates(theirs[:1000])
    if isinstance(error, NotPlainArgument):
        return "crash", "the tests passed the submission a value that is not plain data: " + escape_surrogates(
            _get_message(error)
        )[:900]
    message = escape_surrogates((type(error).__name__ + ": " + _get_message(error)).rstrip(": ")[:1000])
    if isinstance(error, AssertionError):
        return "wrong_answer", message
    return "crash", message


def _get_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def find_cases(module: Any, tree: ast.Module, code: Any, candidate: Any) -> list[tuple[str, Callable[[], object]]]:
    """Return the tests of a test module as pairs of a name and a function, and run the module's top level.

    If the module contains only assertions and other statements, each assertion is a test.
    """
    space = module.__dict__
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    classes = any(isinstance(node, ast.ClassDef) for node in tree.body)
    tests = [name for name in names if name.startswith("test")]
    plain = any(isinstance(node, ast.Assert) for node in tree.body)
    if plain and not tests and not classes and "check" not in names:
        return _split_assertions(tree, space)
    exec(code, space)
    cases: list[tuple[str, Callable[[], object]]] = []
    if "check" in names and candidate is not None and "check(" not in _list_called(tree):
        cases.append(("check", lambda: space["check"](candidate)))
    for node in tree.body:
        name = getattr(node, "name", "")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and name.startswith("test"):
            cases += _list_function_cases(name, space[name])
        elif isinstance(node, ast.ClassDef) and isinstance(space.get(name), type):
            cases += _list_class_cases(name, space[name])
    if not cases and (plain or any(map(_is_call, tree.body)) or (not names and not classes)):
        cases.append(("tests", lambda: None))  # a script that has run to its end
    return cases


def _list_called(tree: ast.Module) -> str:
    """Return the names of the functions that the top level calls, as text."""
    calls = [node.value.func for node in tree.body if _is_call(node)]  # type: ignore[attr-defined]
    return " ".join(function.id + "(" for function in calls if isinstance(function, ast.Name))


def _is_call(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _split_assertions(tree: ast.Module, space: dict[str, Any]) -> list[tuple[str, Callable[[], object]]]:
    """Return one test for every assertion, together with the statements before it."""
    cases = []
    statements: list[ast.stmt] = []
    for node in tree.body:
        statements.append(node)
        if isinstance(node, ast.Assert):
            body, statements = statements, []
            cases.append((f"line {node.lineno}", _compile_body(body, space)))
    if statements:
        cases.append((f"line {statements[0].lineno}", _compile_body(statements, space)))
    return cases


def _compile_body(nodes: list[ast.stmt], space: dict[str, Any]) -> Callable[[], object]:
    code = compile(ast.Module(body=nodes, type_ignores=[]), "tests.py", "exec", dont_inherit=True)
    return lambda: exec(code, space)


def _list_function_cases(name: str, function: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    for label, named in getattr(function, "rookery_cases", None) or [("", {})]:
        yield name + label, partial(_call, function, named)


def _call(function: Any, named: dict[str, Any]) -> None:
    _await_result(function(**named))


def _await_result(value: Any) -> None:
    if type(value).__name__ == "coroutine":
        import asyncio

        asyncio.run(value)


def _list_class_cases(name: str, kind: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    unittest = sys.modules.get("unittest")
    if unittest is not None and issubclass(kind, unittest.TestCase):
        for test in unittest.TestLoader().loadTestsFromTestCase(kind):
            yield f"{name}.{test._testMethodName}", partial(_run_unittest, unittest, test)
    elif name.startswith("Test"):
        for method in [key for key in vars(kind) if key.startswith("test")]:
            for label, named in getattr(vars(kind)[method], "rookery_cases", None) or [("", {})]:
                yield f"{name}.{method}{label}", partial(_run_method, kind, method, named)


def _run_method(kind: Any, method: str, named: dict[str, Any]) -> None:
    one = kind()
    for before in ("setup_method", "setUp"):
        if hasattr(one, before):
            getattr(one, before)()
    _await_result(getattr(one, method)(**named))


def _run_unittest(unittest: Any, test: Any) -> None:
    """Run one test of a `unittest.TestCase`. Raise its first exception, if there is one."""
    raised: list[BaseException] = []

    class Result(unittest.TestResult):  # type: ignore[misc]
        def addFailure(self, test: Any, err: Any) -> None:
            raised.append(err[1])

        addError = addFailure

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                raised.append(err[1])

        def addUnexpectedSuccess(self, test: Any) -> None:
            raised.append(AssertionError("the test passed, but was expected to fail"))

    test.run(Result())
    if raised:
        raise raised[0]


def main() -> None:
    channel = GraderChannel()
    kind, setup = channel.receive()
    main_module = sys.modules["__main__"]
    client: SubmissionClient | None = None
    found: Any = None
    nonce = ""
    if kind == "s":  # shared: the submission runs before the tests are in this process
        found, setup = _run_shared(channel, setup)
        nonce = setup["nonce"]
    else:
        client = ProbeClient() if setup["probe"] else SubmissionClient(channel)
    sys.modules["__main__"] = main_module if client is not None else type(sys)("__main__")

    def send(what: str, plain: Any) -> None:
        channel.send(what, [nonce, plain] if nonce else plain)

    def named(name: str) -> Any:
        return Remote(client, None, name) if client is not None else getattr(found, name)

    try:
        install_pytest_stub()
        for alias in MODULES:
            module = type(sys)(alias)
            if client is None:
                sys.modules[alias] = found
            else:
                module.__dict__["__getattr__"] = _attribute(client)
                sys.modules[alias] = module
        space = {name: named(name) for name in setup["names"] if client is not None or hasattr(found, name)}
        candidate = named(setup["entry_point"]) if setup["entry_point"] else None
        cases = _cases(setup["tests"], space, candidate, probe=setup["probe"])
        if setup["probe"]:
            _run_probe(cases)
            send("e", None)
            return
        send("n", [escape_surrogates(name) for name, _ in cases])
        runner = CaseRunner(send, client)
        for number, (_, work) in enumerate(cases):
            runner.case(number, work)
        send("e", None)
    except SubmissionEnded:
        send("f", [client.end_verdict if client else "crash", escape_surrogates(client.detail) if client else ""])
    except NotPlainArgument as error:
        send("i" if setup["probe"] else "f", ["crash", judge_exception(error)[1]])
    except ProbeExhausted:
        send("e", None)
    except BaseException as error:
        send("f", list(judge_exception(error)))


def _attribute(client: SubmissionClient) -> Callable[[str], Any]:
    def found(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(client, None, name)

    return found


def _run_probe(cases: list[tuple[str, Callable[[], object]]]) -> None:
    """Run the tests without a submission. Raise `NotPlainArgument` at the first value that is not plain data."""
    for _, work in cases:
        with suppress(Exception):  # there is nothing to test
            work()


def _cases(
    tests: Any, space: dict[str, Any], candidate: Any, *, probe: bool
) -> list[tuple[str, Callable[[], object]]]:
    parsed = (lambda text: make_error_tolerant(ast.parse(text))) if probe else ast.parse
    if isinstance(tests, list):
        shared = dict(space)
        return [(f"test {at}", _compile_body(parsed(one).body, shared)) for at, one in enumerate(tests)]
    module, code = add_module("tests", tests)
    module.__dict__.update(space)
    tree = parsed(tests)
    return find_cases(module, tree, compile(tree, "tests.py", "exec") if probe else code, candidate)


def _run_shared(channel: GraderChannel, setup: dict[str, Any]) -> tuple[Any, Any]:
    """Run the submission in this process, then restore the built-in names and modules that tests use.

    Return the submission's module and the setup message with the tests.
    """
    names = vars(builtins)
    before, loaded = dict(names), set(sys.modules)
    trace, profile, receive = sys.settrace, sys.setprofile, channel.receive
    sys.modules["__main__"] = type(sys)("__main__")
    sys.argv[:] = ["solution.py"]
    try:
        module, code = add_module("solution", setup["source"])
        exec(code, module.__dict__)
    except BaseException as error:
        channel.send("x", list(judge_exception(error)))
        receive()
        raise
    trace(None)
    profile(None)
    names.clear()
    names.update(before)
    for name in list(sys.modules):
        if name not in loaded and name.partition(".")[0] in ("unittest", "pytest", "_pytest", "math", "random"):
            del sys.modules[name]
    channel.send("r", None)
    return module, receive()[1]
