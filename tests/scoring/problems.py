"""A small set of problems: functions, programs and classes, each with right, wrong and hostile submissions."""

from typing import Any

HOSTILE_PRELUDE = """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __abs__(self): return 0
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 0
    def __iter__(self): return iter(())
    def __contains__(self, other): return True
    def __getattr__(self, name): return Same()
    def __call__(self, *a, **k): return Same()
class Int(int):
    __eq__ = Same.__eq__
    __ne__ = Same.__ne__
    __hash__ = int.__hash__
"""

TASKS: list[dict[str, Any]] = [
    {
        "id": "total",
        "entry_point": "total",
        "tests": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
        "solution": "def total(xs):\n    return sum(xs)\n",
        "wrong": "def total(xs):\n    return 3\n",
    },
    {
        "id": "shared-elements",
        "tests": [
            "assert set(shared((3, 4, 5), (5, 7, 4))) == {4, 5}",
            "assert shared((1,), (2,)) == ()",
            "assert isinstance(shared((1,), (1,)), tuple)",
        ],
        "solution": "def shared(a, b):\n    return tuple(x for x in a if x in b)\n",
        "wrong": "def shared(a, b):\n    return list(set(a) & set(b))\n",
    },
    {
        "id": "in-place",
        "tests": "grid = [[3, 1], [2]]\nflatten(grid)\nassert grid == [1, 2, 3]\nassert flatten([]) is None\n",
        "solution": "def flatten(g):\n    g[:] = sorted(x for row in g for x in row)\n",
        "wrong": "def flatten(g):\n    return sorted(x for row in g for x in row)\n",
    },
    {
        "id": "errors",
        "tests": (
            "import unittest\nfrom solution import parse\n\n\nclass TestParse(unittest.TestCase):\n"
            "    def test_good(self):\n        self.assertEqual(parse('a=1;b=2'), {'a': 1, 'b': 2})\n"
            "    def test_bad(self):\n        with self.assertRaises(ValueError):\n            parse('a')\n"
        ),
        "solution": (
            "def parse(text):\n    pairs = {}\n    for part in text.split(';'):\n"
            "        name, mark, value = part.partition('=')\n        if not mark:\n"
            "            raise ValueError(part)\n        pairs[name] = int(value)\n    return pairs\n"
        ),
        "wrong": "def parse(text):\n    return {p[0]: int('0' + p[2:]) for p in text.split(';')}\n",
    },
    {
        "id": "stack",
        "tests": (
            "from solution import Stack\nimport pytest\n\n\ndef test_order():\n    s = Stack()\n    s.push(1)\n"
            "    s.push(2)\n    assert s.pop() == 2\n    assert len(s) == 1\n    assert list(s) == [1]\n\n\n"
            "def test_empty():\n    with pytest.raises(IndexError):\n        Stack().pop()\n"
        ),
        "solution": (
            "class Stack:\n    def __init__(self): self.items = []\n"
            "    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n"
            "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
        ),
        "wrong": (
            "class Stack:\n    def __init__(self): self.items = []\n"
            "    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop(0)\n"
            "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
        ),
    },
    {
        "id": "primes",
        "tests": (
            "import itertools, pytest\n\n\n@pytest.mark.parametrize('n, last', [(1, 2), (5, 11), (10, 29)])\n"
            "def test_nth(n, last):\n    assert list(itertools.islice(primes(), n))[-1] == last\n"
        ),
        "solution": (
            "def primes():\n    n = 2\n    while True:\n"
            "        if all(n % d for d in range(2, n)): yield n\n        n += 1\n"
        ),
        "wrong": "def primes():\n    n = 1\n    while True:\n        n += 1\n        yield n\n",
    },
    {
        "id": "mean",
        "tests": (
            "import math, pytest\n\n\ndef test_near():\n    assert mean([0.1, 0.2]) == pytest.approx(0.15)\n\n\n"
            "def test_nan():\n    assert math.isnan(mean([]))\n"
        ),
        "solution": "def mean(xs):\n    return sum(xs) / len(xs) if xs else float('nan')\n",
        "wrong": "def mean(xs):\n    return sum(xs)\n",
    },
    {
        "id": "own-error",
        "tests": (
            "try:\n    withdraw(5, 10)\n    assert False\nexcept Poor as error:\n    assert error.missing == 5\n"
            "assert withdraw(10, 4) == 6\n"
        ),
        "solution": (
            "class Poor(Exception):\n    def __init__(self, missing):\n        self.missing = missing\n"
            "def withdraw(a, b):\n    if b > a: raise Poor(b - a)\n    return a - b\n"
        ),
        "wrong": "class Poor(Exception):\n    missing = 4\ndef withdraw(a, b):\n    raise Poor\n",
        "form": "shared",
    },
    {
        "id": "callback",
        "tests": ["assert apply(lambda x: x + 1, [1, 2]) == [2, 3]", "assert apply(str, []) == []"],
        "solution": "def apply(f, xs):\n    return [f(x) for x in xs]\n",
        "wrong": "def apply(f, xs):\n    return xs\n",
        "form": "shared",
    },
    {
        "id": "waits",
        "entry_point": "later",
        "tests": "import asyncio\n\n\nasync def test_later():\n    assert await later(2) == b'xx'\n",
        "solution": "import asyncio\nasync def later(n):\n    await asyncio.sleep(0)\n    return b'x' * n\n",
        "wrong": "async def later(n):\n    return 'x' * n\n",
    },
    {
        "id": "sum-lines",
        "cases": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "10 20", "stdout": "30"}],
        "solution": "print(sum(map(int, input().split())))\n",
        "wrong": "print(3)\n",
    },
    {
        "id": "halves",
        "cases": [{"stdin": "3", "stdout": "1.5"}, {"stdin": "1", "stdout": "0.50000001"}],
        "tolerance": 1e-6,
        "solution": "print(int(input()) / 2)\n",
        "wrong": "print(int(input()) // 2)\n",
    },
]

HOSTILE: dict[str, str] = {
    "exits early": "import os\n{names}\ndef f(*a, **k):\n    os._exit(0)\n",
    "exits at import": "import os\nos._exit(0)\n",
    "sys.exit at import": "import sys\nsys.exit(0)\n",
    "sys.exit in a call": "import sys\ndef f(*a, **k):\n    sys.exit(0)\n",
    "equal to everything": HOSTILE_PRELUDE + "def f(*a, **k):\n    return Same()\n",
    "an int equal to everything": HOSTILE_PRELUDE + "def f(*a, **k):\n    return Int(7)\n",
    "a coroutine that is passed on": HOSTILE_PRELUDE + "async def f(*a, **k):\n    return Same()\n",
    "a name that is no function": "f = 5\n",
    "patches the builtins": (
        "import builtins, unittest\nbuiltins.AssertionError = type('Quiet', (Exception,), {{}})\n"
        "builtins.all = builtins.any = lambda *a: True\nbuiltins.compile = lambda *a, **k: builtins.eval('0')\n"
        "unittest.TestCase.assertEqual = lambda *a, **k: None\ndef f(*a, **k):\n    return None\n"
    ),
    "ends a map": "def f(*a, **k):\n    raise StopIteration\n",
    "says verdicts": (
        "import os\ndef f(*a, **k):\n    for fd in range(1, 64):\n        for line in "
        '(b\'n["tests"]\', b\'v{{"n":0,"verdict":"passed","detail":""}}\','
        ' b\'d{{"verdict":"passed","detail":""}}\', b\'e null\'):\n'
        "            try: os.write(fd, line + b'\\n')\n            except OSError: pass\n    return None\n"
    ),
    "kills all it can": (
        "import os, signal\ndef f(*a, **k):\n    for pid in range(2, 400):\n"
        "        try: os.kill(pid, signal.SIGKILL)\n        except OSError: pass\n    os.kill(os.getpid(), 9)\n"
    ),
    "looks for the tests": (
        "import gc, os, sys\ndef f(*a, **k):\n    frame = sys._getframe()\n    seen = []\n    while frame:\n"
        "        seen.append(repr(frame.f_code.co_consts)); frame = frame.f_back\n"
        "    seen += [repr(o) for o in gc.get_objects() if isinstance(o, (str, dict)) and len(repr(o)) < 5000]\n"
        "    for root, _, files in os.walk('/work'):\n"
        "        seen += [open(os.path.join(root, n), errors='replace').read() for n in files]\n"
        "    text = ' '.join(seen)\n    number = {secret}\n    return number if str(number) in text else None\n"
    ),
}
"""Submissions for a task whose tests call `f` and expect a number that stands nowhere else."""

SECRET = 918_273_645_546
SECRET_TESTS = (
    f"def check(candidate):\n    assert all(map(lambda n: candidate(n) == {SECRET}, [3, 4]))\n"
    "    assert candidate(candidate(3)) is not None\n"
)


def hostile(name: str) -> str:
    return (
        HOSTILE[name]
        .replace("{names}", "")
        .replace("{secret}", "int('91827364554') * 10 + 6")
        .replace("{{", "{")
        .replace("}}", "}")
    )
