"""Hostile submissions cannot change the isolation, the fault or the meaning of a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from rookery.core import SandboxSpec
from rookery.sandbox_runtime.grader.codec import MAX_DEPTH
from rookery.scoring.code_tasks import CodeTask, parse_code_task
from rookery.scoring.grading import Grade, Grader
from rookery.scoring.program_runner import ProgramRunner
from rookery.scoring.programs import ProgramLimits
from rookery.scoring.test_analysis import analyze_tests


@asynccontextmanager
async def grader(**settings: Any) -> AsyncIterator[Grader]:
    async with ProgramRunner("local", concurrency=4) as programs:
        yield Grader.from_runner(programs, limits=ProgramLimits(wall=60.0), **settings)


async def graded(task: CodeTask, submissions: dict[str, str], **settings: Any) -> dict[str, Grade]:
    async with grader(**settings) as one, asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(one.grade(task, source)) for name, source in submissions.items()}
    return {name: grade.result() for name, grade in tasks.items()}


def answering(answer: str) -> str:
    """Return a submission that answers every call with these bytes instead of an honest reply."""
    return (
        "import os, sys\ndef f(*a, **k):\n    for fd in range(3, 64):\n"
        f"        try: os.write(fd, {answer!r}.encode('latin-1') + b'\\n')\n"
        "        except OSError: pass\n    return 1\n"
    )


PATCHED = """
import datetime as d, sys
def f(x):
    frame = sys._getframe()
    while '_answer' not in frame.f_globals: frame = frame.f_back
    frame.f_globals['_answer'] = lambda held, asked: {'v': {'t': 'datetime', 'v': '2020-01-01T00:00:00+00:00'}}
    return d.datetime(2020, 1, 1, tzinfo=d.timezone.utc)
"""
DATED = "import datetime as d\ndef f(x):\n    return d.datetime(2020, 1, 1, tzinfo=d.timezone.utc)\n"
ZONED = (
    "import datetime as d\nclass Zone(d.tzinfo):\n    def utcoffset(self, t): return d.timedelta(0)\n"
    "    def dst(self, t): return None\ndef f(x):\n    return d.time(1, tzinfo=Zone())\n"
)
SLICED = (
    "class Bag:\n    def __getitem__(self, key): return Bag()\n    def keys(self): return []\n"
    "def f(x):\n    return Bag()\n"
)


@pytest.mark.long
async def test_no_submission_causes_shared_isolation() -> None:
    tests = "def check(c):\n    first = c(1)\n    second = c(first)\n    assert c([second]) == 12345\n"
    task = CodeTask(id="passes-on", tests=tests, entry_point="f")
    values = {
        "aware datetime": '{"t":"datetime","v":"2020-01-01T00:00:00+00:00"}',
        "aware time": '{"t":"time","v":"01:00+01:00"}',
        "array of objects": '{"t":"ndarray","v":["O",[1],"00"]}',
        "array of times": '{"t":"ndarray","v":["<M8[s]",[1],"0000000000000000"]}',
        "unknown type": '{"t":"Context","v":""}',
        "no type": '{"v":1}',
        "reference to nothing": '{"t":"ref","v":[1]}',
        "deep": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "very deep": "[" * 100_000 + "]" * 100_000,
        "long number": "1" * 10_000,
    }
    ways = {name: answering('r{"v":' + value + "}") for name, value in values.items()}
    ways |= {"patched": PATCHED, "dated": DATED, "zoned": ZONED}
    grades = await graded(task, ways)
    for name, grade in grades.items():
        assert (grade.reward, grade.isolation) == (0.0, "separate"), (name, grade)
    async with grader() as one:  # nor for later submissions
        for source in (PATCHED, "def f(x):\n    return 12345\n"):
            grade = await one.grade(task, source)
            assert grade.isolation == "separate", grade
        assert grade.reward == 1.0, grade


async def test_indexing_an_object_does_not_cause_shared_isolation() -> None:
    task = CodeTask(id="slices", tests=["assert f(1)[1:2] == [2]", "assert f(1)[...] == 3"])
    grades = await graded(task, {"sliced": SLICED})
    assert (grades["sliced"].reward, grades["sliced"].isolation) == (0.0, "separate"), grades


@pytest.mark.long
@pytest.mark.parametrize(
    "tests",
    [
        ["assert apply(lambda x: x + 1, 1) == 2"],
        "def check(c):\n    assert c(int, '1') == 1\n    assert c(lambda x: x + 1, 1) == 2\n",
        (
            "import unittest\nclass Node:\n    def __init__(self, n): self.n = n\n"
            "class TestIt(unittest.TestCase):\n"
            "    def test_it(self):\n        n = Node(1)\n        while apply(abs, 3) == 7: break\n"
            "        self.assertEqual(apply(abs, -1), 1)\n        self.assertEqual(apply(lambda m: m.n, n), 1)\n"
        ),
    ],
)
async def test_tests_that_pass_functions_without_a_solution_are_shared(tests: Any) -> None:
    task = CodeTask(id="callback", tests=tests, entry_point="apply")
    grades = await graded(
        task, {"right": "def apply(f, x):\n    return f(x)\n", "dead": "import os\nos._exit(0)\n"}
    )
    assert grades["right"].reward == 1.0, grades
    assert grades["dead"].reward == 0.0, grades
    for grade in grades.values():
        assert grade.isolation == "shared", grades
        assert grade.weaker


async def test_tests_that_sort_results_are_separate() -> None:
    tests = "def check(c):\n    got = c(2)\n    got.sort(key=lambda n: -n)\n    assert got == [2, 1]\n"
    task = CodeTask(id="sorts", tests=tests, entry_point="f")
    grades = await graded(task, {"right": "def f(n):\n    return [1, 2]\n"})
    assert (grades["right"].reward, grades["right"].isolation) == (1.0, "separate"), grades


async def test_isolation_is_decided_with_the_solution_before_a_submission_runs() -> None:
    task = parse_code_task(
        {"id": "order", "tests": ["assert f(1) == 1"], "solution": "def f(x):\n    return x\n", "prompt": ""}
    )
    async with ProgramRunner("local", concurrency=2) as programs:
        opened = 0

        async def counted(spec: SandboxSpec) -> Any:
            nonlocal opened
            opened += 1
            return await programs.create(spec)

        one = Grader(programs.spec, counted, programs.gate, limits=ProgramLimits(wall=60.0))
        async with asyncio.TaskGroup() as group:
            grades = [group.create_task(one.grade(task, "def f(x):\n    return x\n")) for _ in range(4)]
        assert [grade.result().reward for grade in grades] == [1.0] * 4
        assert opened == 2 * (4 + 1), "the solution runs once for all submissions"


async def test_missing_parameters_of_a_submission_do_not_hide_a_test() -> None:
    tests = "import pytest\n@pytest.mark.parametrize('n', cases())\ndef test_it(n):\n    assert n == 1\n"
    grades = await graded(
        CodeTask(id="parameters", tests=tests),
        {"none": "def cases():\n    return []\n", "one": "def cases():\n    return [1]\n"},
    )
    assert (grades["none"].reward, grades["one"].reward) == (0.0, 1.0), grades


@pytest.mark.parametrize(
    ("tests", "found"),
    [
        ("def helper():\n    pass\n", False),
        ("class Helper:\n    pass\n", False),
        ("def check(c):\n    assert c(1)\n", True),
        ("def check(c):\n    assert c(1)\ncheck(f)\n", True),
        ("class Node:\n    pass\nassert f(1)\n", True),
        ("f(1)\n", True),
    ],
)
def test_tests_are_detected_from_the_source(tests: str, found: bool) -> None:
    assert analyze_tests(tests, "f").has_tests is found


async def test_scripts_beside_functions_and_classes_are_tests() -> None:
    task = CodeTask(id="script", tests="class Node:\n    pass\ndef check(c):\n    assert c(1) == 1\ncheck(f)\n")
    grades = await graded(task, {"right": "def f(x):\n    return x\n", "wrong": "def f(x):\n    return 0\n"})
    assert (grades["right"].reward, grades["wrong"].reward) == (1.0, 0.0), grades


# ---- whatever bytes a submission sends

ODD_WORDS = {
    "surrogate in a message": "def f(x):\n    raise ValueError(chr(0xd800))\n",
    "surrogate in the name of an exception": "def f(x):\n    raise type(chr(0xd800), (Exception,), {})('x')\n",
    "surrogate returned": "def f(x):\n    return chr(0xdfff)\n",
    "surrogate printed": "import sys\ndef f(x):\n    sys.stdout.buffer.write(b'\\xed\\xa0\\x80'); return 0\n",
    "surrogate in the source": "x = '\ud800'\ndef f(x):\n    return 0\n",
    "surrogate in a comment": "# \udcff\ndef f(x):\n    return 0\n",
    "surrogate at import": "raise ValueError(chr(0xd800))\n",
    "exception whose text raises": "class E(Exception):\n    def __str__(self): raise E\ndef f(x):\n    raise E\n",
    "exception without end": "class E(Exception):\n    def __str__(s): return str(s)\ndef f(x):\n    raise E\n",
    "NUL in the source": "x = '\0'\ndef f(x):\n    return 0\n",
    "deep source": "def f(x):\n    return " + "(" * 5000 + "0" + ")" * 5000 + "\n",
    "huge integer": "def f(x):\n    return 10 ** 100000\n",
    "huge fraction": "from fractions import Fraction\ndef f(x):\n    return Fraction(1, 10 ** 6000)\n",
    "NaN": "def f(x):\n    return float('nan')\n",
    "signalling NaN": "from decimal import Decimal\ndef f(x):\n    return Decimal('sNaN123')\n",
    "deep value": "def f(x):\n    out = []\n    for _ in range(5000): out = [out]\n    return out\n",
    "value in itself": "def f(x):\n    out = []\n    out.append(out)\n    return out\n",
    "not JSON": answering("r{"),
    "not UTF-8": answering('r{"v":"\xff\xfe"}'),
    "NaN payload": answering('r{"v":NaN}'),
    "a list": answering("r[]"),
    "nothing": answering("r"),
    "no exception": answering('r{"x":5}'),
    "exception of no class": answering('r{"x":{"name":"a","base":"print","message":"","args":5}}'),
    "surrogate in an answer": answering(
        'r{"x":{"name":"\\ud800","base":"E","message":"\\udfff","args":["\\ud800"]}}'
    ),
    "group of exceptions": "def f(x):\n    raise BaseExceptionGroup('x', [KeyboardInterrupt()])\n",
}


@pytest.mark.long
@pytest.mark.parametrize("form", ["separate", "shared"])
async def test_any_reply_of_a_submission_gives_a_verdict_about_it(form: str) -> None:
    tests = "def check(c):\n    assert c(1) == 12345\n"
    if form == "shared":
        tests = "def check(c):\n    assert callable(f)\n    assert c(1) == 12345\n"
    grades = await graded(CodeTask(id="odd", tests=tests, entry_point="f"), ODD_WORDS)
    for name, grade in grades.items():
        assert (grade.reward, grade.isolation) == (0.0, form), (name, grade)
        assert grade.tests, (name, grade)
        assert all(test.verdict in ("crash", "wrong_answer") for test in grade.tests), (name, grade)
        str(grade).encode()  # a journal can store it


async def test_any_submission_source_gives_a_verdict_about_it() -> None:
    task = parse_code_task({"id": "cases", "prompt": "", "cases": [{"stdin": "", "stdout": "1"}]})
    sources = {name: ODD_WORDS[name] for name in ODD_WORDS if "source" in name or "comment" in name}
    sources["prints surrogates"] = "import sys\nsys.stdout.buffer.write(b'\\xed\\xa0\\x80\\xff')\n"
    for name, grade in (await graded(task, sources)).items():
        assert grade.reward == 0.0, (name, grade)
        assert len(grade.tests) == 1
        str(grade).encode()


# ---- objects that lie

LIAR = """
class Liar:
    def __init__(self, first, second): self._all, self._at = [first, second], 0
    def __iter__(self):
        self._at += 1
        return iter(self._all[min(self._at - 1, 1)])
    def __len__(self): return len(self._all[0])
    def __getitem__(self, key): return self._all[1][key]
    def __contains__(self, one): return True
"""
PERMUTED = (
    "def check(c):\n    xs = [3, 1, 2]\n    got = c(xs)\n    assert sorted(got) == sorted(xs)\n"
    "    assert all(a <= b for a, b in zip(got, list(got)[1:]))\n"
)
INDEXED = (
    "def check(c):\n    xs = [3, 1, 2]\n    got = c(xs)\n    assert sorted(got) == sorted(xs)\n"
    "    assert len(got) == 3\n    assert all(got[i] <= got[i + 1] for i in range(len(got) - 1))\n"
)
MEMBER = "def check(c):\n    got = c([3, 1, 2])\n    assert 1 in got and 2 in got and 7 not in [1] and 3 in got\n"
NOT_SEQUENCE = "class Has:\n    def __contains__(self, one): return True\ndef f(xs):\n    return Has()\n"
RESTARTED = """
class Again:
    def __init__(self, *ways): self.ways, self.now = list(ways), iter(ways[0])
    def __iter__(self): return self
    def __next__(self):
        try: return next(self.now)
        except StopIteration:
            self.ways = self.ways[1:] or self.ways; self.now = iter(self.ways[0]); raise
def f(xs):
    return Again(xs, sorted([0, 0, 0]), [0, 0, 0])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("tests", "submission"),
    [
        (PERMUTED, LIAR + "def f(xs):\n    return Liar(xs, [1, 1, 1])\n"),
        (PERMUTED, LIAR.replace("Liar:", "Liar(object):") + "def f(xs):\n    return Liar(xs, [0, 5, 9])\n"),
        (INDEXED, LIAR + "def f(xs):\n    return Liar(xs, [1, 1, 1])\n"),
        (MEMBER, LIAR + "def f(xs):\n    return Liar([], [])\n"),
        (("def check(c):\n    xs = [3, 1]\n    got = c(xs)\n    assert sorted(got) == [1, 3]\n"
         "    assert list(got) == [0, 0, 0]\n"), RESTARTED),
    ],
)  # fmt: skip
async def test_objects_that_lie_about_their_items_get_no_reward(tests: str, submission: str) -> None:
    grades = await graded(CodeTask(id="lies", tests=tests, entry_point="f"), {"liar": submission})
    assert (grades["liar"].reward, grades["liar"].isolation) == (0.0, "separate"), grades


@pytest.mark.parametrize(
    ("tests", "submission"),
    [
        (MEMBER, NOT_SEQUENCE),
        (
            "def check(c):\n    assert c(1) == c(2)\n",
            "class f:\n    def __init__(s, x): 0\n    def __eq__(s, o): return 1 > 0\n",
        ),
        (
            "def check(c):\n    assert len(c(1)) == 3\n",
            "class f:\n    def __init__(s, x): 0\n    def __len__(s): return 3\n",
        ),
    ],
)
async def test_grade_decided_by_a_remote_object_is_labelled_weaker(tests: str, submission: str) -> None:
    grades = await graded(CodeTask(id="decided", tests=tests, entry_point="f"), {"one": submission})
    assert (grades["one"].reward, grades["one"].isolation) == (1.0, "separate"), grades
    assert grades["one"].weaker


HONEST = {
    "sequence": (
        PERMUTED + INDEXED.replace("check", "test_indexed").replace("c(", "f(").replace("(c)", "()"),
        "from collections import UserList\ndef f(xs):\n    return UserList(sorted(xs))\n",
    ),
    "members": (MEMBER, "from collections import UserList\ndef f(xs):\n    return UserList(xs)\n"),
    "slices": (
        "def check(c):\n    assert list(c([3, 1, 2])[1:]) == [2, 3]\n",
        "from collections import UserList\ndef f(xs):\n    return UserList(sorted(xs))\n",
    ),
    "generator": (
        "def check(c):\n    got = c([1, 2, 3])\n    assert 2 in got\n    assert list(got) == [3]\n",
        "def f(xs):\n    yield from xs\n",
    ),
    "endless": (
        "import itertools\ndef check(c):\n    assert list(itertools.islice(c(1), 4)) == [1, 2, 3, 4]\n",
        (
            "import itertools\nclass Count:\n    def __iter__(self): return itertools.count(1)\n"
            "def f(x):\n    return Count()\n"
        ),
    ),
    "changing": (
        (
            "from solution import Queue\ndef test_it():\n    q = Queue()\n    q.put(1)\n"
            "    assert list(q) == [1]\n"
            "    q.put(2)\n    assert list(q) == [1, 2] and len(q) == 2 and 2 in q and q[1] == 2\n"
        ),
        (
            "class Queue:\n    def __init__(self): self.items = []\n    def put(self, x): self.items.append(x)\n"
            "    def __iter__(self): return iter(self.items)\n    def __len__(self): return len(self.items)\n"
            "    def __getitem__(self, at): return self.items[at]\n"
        ),
    ),
    "items before an error": (
        (
            "def check(c):\n    got = []\n    try:\n        for one in c(1): got.append(one)\n"
            "    except KeyError: got.append('end')\n    assert got == [1, 2, 'end']\n"
        ),
        (
            "class Some:\n    def __iter__(self):\n        yield 1\n        yield 2\n        raise KeyError(3)\n"
            "def f(x):\n    return Some()\n"
        ),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", HONEST)
async def test_honest_containers_are_rewarded_without_a_label(name: str) -> None:
    tests, submission = HONEST[name]
    grades = await graded(CodeTask(id=name, tests=tests, entry_point="f"), {"one": submission})
    assert (grades["one"].reward, grades["one"].weaker) == (1.0, ""), grades


async def test_mappings_with_integer_keys_are_labelled_weaker() -> None:
    tests = "def check(c):\n    got = c(1)\n    assert got[1] == 'one' and got[2] == 'two' and len(got) == 2\n"
    source = "from collections import UserDict\ndef f(x):\n    return UserDict({1: 'one', 2: 'two'})\n"
    grades = await graded(CodeTask(id="mapping", tests=tests, entry_point="f"), {"one": source})
    assert grades["one"].reward == 1.0, grades
    assert grades["one"].weaker


@pytest.mark.long
@pytest.mark.parametrize(
    ("tests", "value", "reward"),
    [
        ("approx(float('inf'))", "5", 0.0),
        ("approx(float('inf'))", "-1e308", 0.0),
        ("approx(float('inf'))", "-float('inf')", 0.0),
        ("approx(float('inf'))", "float('inf')", 1.0),
        ("approx(1e308)", "float('inf')", 0.0),
        ("approx(10**400)", "10**400 + 1", 1.0),
        ("approx(10**400)", "float('inf')", 0.0),
        ("approx(10**400)", "2 * 10**400", 0.0),
        ("approx(5)", "float('nan')", 0.0),
        ("approx(float('nan'))", "float('nan')", 0.0),
        ("approx(float('nan'), nan_ok=True)", "float('nan')", 1.0),
        ("approx(1e6, abs=1e-3)", "1e6 + 0.5", 0.0),
        ("approx([1.0, float('inf')])", "[1.0, 7]", 0.0),
        ("approx(complex(float('inf'), 0))", "1j", 0.0),
    ],
)
async def test_approx_compares_non_finite_numbers_exactly(tests: str, value: str, reward: float) -> None:
    task = CodeTask(id="approx", tests=f"from pytest import approx\nassert f() == {tests}\n")
    grades = await graded(task, {"one": f"def f():\n    return {value}\n"})
    assert grades["one"].reward == reward, grades


@pytest.mark.long
async def test_tests_not_finished_within_the_grading_time_get_the_verdict_time() -> None:
    slow = "import time\ndef f(n):\n    time.sleep(2 * (n > 0))\n    return n\n"
    tests = CodeTask(id="slow", tests=[f"assert f({n}) == {n}" for n in range(200)])
    grade = (await graded(tests, {"slow": slow}, seconds=12.0, partial=True))["slow"]
    assert (grade.tests[0].verdict, grade.tests[-1].verdict) == ("passed", "time"), grade
    assert 0 < grade.reward < 0.5
    shared = msgspec.structs.replace(tests, tests=["assert callable(f)", *tests.tests])
    grade = (await graded(shared, {"slow": slow}, seconds=12.0))["slow"]
    assert (grade.reward, grade.isolation, grade.tests[-1].verdict) == (0.0, "shared", "time"), grade
    cases = parse_code_task({"id": "cases", "prompt": "", "cases": [{"stdout": "1"}] * 40})
    grade = (await graded(cases, {"slow": "import time\ntime.sleep(4)\nprint(1)\n"}, seconds=12.0))["slow"]
    assert (grade.reward, grade.tests[-1].verdict) == (0.0, "time"), grade
