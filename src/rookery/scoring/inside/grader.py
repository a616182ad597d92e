"""The tests' side of a grading: runs tests and reports how each went. Runs in the tests' sandbox.

`separate`: the submission is in another sandbox, and the tests hold references to it. What it returns arrives as
plain data, so a comparison is one of exact built-in values. `shared`: the submission is a module of this process,
which is weaker. `probe`: there is no submission; the run only finds out whether the tests pass plain data alone.

Guarantees:
- a submission's end, its limits and its exceptions are told apart from an assertion that failed;
- a value of the submission that is not plain data equals no plain value, whatever its class says;
- nothing that a submission does changes the form: a test that passes on what cannot be sent has failed;
- pytest is not needed: `raises`, `approx`, `fail` and `mark.parametrize` are provided here.
"""

from __future__ import annotations

import ast
import builtins
import sys
from contextlib import suppress
from functools import partial

from rookery.scoring.inside.codec import Wire, put_module, visible
from rookery.scoring.inside.far import Far, Gone, Inseparable, Remote
from rookery.scoring.inside.probe import Enough, Probe, patient
from rookery.scoring.inside.pytests import stand_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

MODULES = ("solution", "submission", "main")
"""Names that tests may import the submission by."""


# ---- tests


class Runner:
    """Runs the cases one by one and reports each."""

    def __init__(self, send: Callable[[str, Any], None], far: Far | None) -> None:
        self._send = send
        self._far = far

    def case(self, number: int, work: Callable[[], object]) -> None:
        far = self._far
        if far is not None:
            far.gone = far.detail = far.decided = ""
        self._send("b", number)
        verdict, detail = "passed", ""
        try:
            work()
        except Gone:
            pass
        except BaseException as error:
            verdict, detail = judged(error)
        if far is not None and far.gone:
            verdict, detail = far.gone, far.detail
        by = far.decided if far is not None else ""
        self._send("v", {"n": number, "verdict": verdict, "detail": visible(detail), "by": by})


def judged(error: BaseException) -> tuple[str, str]:
    """Return the verdict and the detail for an exception that ended a test."""
    theirs = error.__dict__.get("of_the_submission")
    if isinstance(error, MemoryError):
        return "memory", "MemoryError"
    if theirs is not None:
        return "crash", visible(theirs[:1000])
    if isinstance(error, Inseparable):
        return "crash", "the tests passed it something that is not plain data: " + visible(_said(error))[:900]
    said = visible((type(error).__name__ + ": " + _said(error)).rstrip(": ")[:1000])
    if isinstance(error, AssertionError):
        return "wrong_answer", said
    return "crash", said


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def discovered(module: Any, tree: ast.Module, code: Any, candidate: Any) -> list[tuple[str, Callable[[], object]]]:
    """The cases of a source of tests. Runs it, unless it is a list of assertions, which are the cases then."""
    space = module.__dict__
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    classes = any(isinstance(node, ast.ClassDef) for node in tree.body)
    tests = [name for name in names if name.startswith("test")]
    plain = any(isinstance(node, ast.Assert) for node in tree.body)
    if plain and not tests and not classes and "check" not in names:
        return _statements(tree, space)
    exec(code, space)
    cases: list[tuple[str, Callable[[], object]]] = []
    if "check" in names and candidate is not None and "check(" not in _top(tree):
        cases.append(("check", lambda: space["check"](candidate)))
    for node in tree.body:
        name = getattr(node, "name", "")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and name.startswith("test"):
            cases += _functions(name, space[name])
        elif isinstance(node, ast.ClassDef) and isinstance(space.get(name), type):
            cases += _methods(name, space[name])
    if not cases and (plain or any(map(_is_call, tree.body)) or (not names and not classes)):
        cases.append(("tests", lambda: None))  # a script: it has run to its end
    return cases


def _top(tree: ast.Module) -> str:
    """Return the functions that the top level calls, as text."""
    calls = [node.value.func for node in tree.body if _is_call(node)]  # type: ignore[attr-defined]
    return " ".join(function.id + "(" for function in calls if isinstance(function, ast.Name))


def _is_call(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _statements(tree: ast.Module, space: dict[str, Any]) -> list[tuple[str, Callable[[], object]]]:
    """Every assertion is a case; what stands before it runs with it."""
    cases = []
    held: list[ast.stmt] = []
    for node in tree.body:
        held.append(node)
        if isinstance(node, ast.Assert):
            body, held = held, []
            cases.append((f"line {node.lineno}", _body(body, space)))
    if held:
        cases.append((f"line {held[0].lineno}", _body(held, space)))
    return cases


def _body(nodes: list[ast.stmt], space: dict[str, Any]) -> Callable[[], object]:
    code = compile(ast.Module(body=nodes, type_ignores=[]), "tests.py", "exec", dont_inherit=True)
    return lambda: exec(code, space)


def _functions(name: str, function: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    for label, named in getattr(function, "rookery_cases", None) or [("", {})]:
        yield name + label, partial(_called, function, named)


def _called(function: Any, named: dict[str, Any]) -> None:
    _finished(function(**named))


def _finished(value: Any) -> None:
    if type(value).__name__ == "coroutine":
        import asyncio

        asyncio.run(value)


def _methods(name: str, kind: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    unittest = sys.modules.get("unittest")
    if unittest is not None and issubclass(kind, unittest.TestCase):
        for test in unittest.TestLoader().loadTestsFromTestCase(kind):
            yield f"{name}.{test._testMethodName}", partial(_unit, unittest, test)
    elif name.startswith("Test"):
        for method in [key for key in vars(kind) if key.startswith("test")]:
            for label, named in getattr(vars(kind)[method], "rookery_cases", None) or [("", {})]:
                yield f"{name}.{method}{label}", partial(_method, kind, method, named)


def _method(kind: Any, method: str, named: dict[str, Any]) -> None:
    one = kind()
    for before in ("setup_method", "setUp"):
        if hasattr(one, before):
            getattr(one, before)()
    _finished(getattr(one, method)(**named))


def _unit(unittest: Any, test: Any) -> None:
    """Runs one test of unittest's; raises what it raised."""
    raised: list[BaseException] = []

    class Result(unittest.TestResult):  # type: ignore[misc]
        def addFailure(self, test: Any, err: Any) -> None:
            raised.append(err[1])

        addError = addFailure

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                raised.append(err[1])

        def addUnexpectedSuccess(self, test: Any) -> None:
            raised.append(AssertionError("it passed, and was expected to fail"))

    test.run(Result())
    if raised:
        raise raised[0]


def main() -> None:
    wire = Wire()
    kind, given = wire.receive()
    main_module = sys.modules["__main__"]
    far: Far | None = None
    found: Any = None
    nonce = ""
    if kind == "s":  # shared: the submission comes first, when no test is in this process
        found, given = _beside(wire, given)
        nonce = given["nonce"]
    else:
        far = Probe() if given["probe"] else Far(wire)
    sys.modules["__main__"] = main_module if far is not None else type(sys)("__main__")

    def send(what: str, plain: Any) -> None:
        wire.send(what, [nonce, plain] if nonce else plain)

    def named(name: str) -> Any:
        return Remote(far, None, name) if far is not None else getattr(found, name)

    try:
        stand_in()
        for alias in MODULES:
            module = type(sys)(alias)
            if far is None:
                sys.modules[alias] = found
            else:
                module.__dict__["__getattr__"] = _attribute(far)
                sys.modules[alias] = module
        space = {name: named(name) for name in given["names"] if far is not None or hasattr(found, name)}
        candidate = named(given["entry_point"]) if given["entry_point"] else None
        cases = _cases(given["tests"], space, candidate, probe=given["probe"])
        if given["probe"]:
            _probed(cases)
            send("e", None)
            return
        send("n", [visible(name) for name, _ in cases])
        runner = Runner(send, far)
        for number, (_, work) in enumerate(cases):
            runner.case(number, work)
        send("e", None)
    except Gone:
        send("f", [far.gone if far else "crash", visible(far.detail) if far else ""])
    except Inseparable as error:
        send("i" if given["probe"] else "f", ["crash", judged(error)[1]])
    except Enough:
        send("e", None)
    except BaseException as error:
        send("f", list(judged(error)))


def _attribute(far: Far) -> Callable[[str], Any]:
    def found(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(far, None, name)

    return found


def _probed(cases: list[tuple[str, Callable[[], object]]]) -> None:
    """Run the cases without a submission. Raises `Inseparable` at the first value that cannot be sent."""
    for _, work in cases:
        with suppress(Exception):  # there is nothing to test
            work()


def _cases(
    tests: Any, space: dict[str, Any], candidate: Any, *, probe: bool
) -> list[tuple[str, Callable[[], object]]]:
    parsed = (lambda text: patient(ast.parse(text))) if probe else ast.parse
    if isinstance(tests, list):
        shared = dict(space)
        return [(f"test {at}", _body(parsed(one).body, shared)) for at, one in enumerate(tests)]
    module, code = put_module("tests", tests)
    module.__dict__.update(space)
    tree = parsed(tests)
    return discovered(module, tree, compile(tree, "tests.py", "exec") if probe else code, candidate)


def _beside(wire: Wire, given: dict[str, Any]) -> tuple[Any, Any]:
    """Run the submission in this process. What it did to built-in names and test modules is undone afterwards."""
    names = vars(builtins)
    before, loaded = dict(names), set(sys.modules)
    trace, profile, receive = sys.settrace, sys.setprofile, wire.receive
    sys.modules["__main__"] = type(sys)("__main__")
    sys.argv[:] = ["solution.py"]
    try:
        module, code = put_module("solution", given["source"])
        exec(code, module.__dict__)
    except BaseException as error:
        wire.send("x", list(judged(error)))
        receive()
        raise
    trace(None)
    profile(None)
    names.clear()
    names.update(before)
    for name in list(sys.modules):
        if name not in loaded and name.partition(".")[0] in ("unittest", "pytest", "_pytest", "math", "random"):
            del sys.modules[name]
    wire.send("r", None)
    return module, receive()[1]


main()
