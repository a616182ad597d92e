"""`run_code`: isolated programs, results in order, and clean-up."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rookery
from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.scoring.code_execution import run_code, run_code_sync, stream_code
from rookery.scoring.outputs import outputs_match
from rookery.scoring.program_runner import ProgramRunner, run_program
from rookery.scoring.programs import Case, Program, ProgramLimits, parse_limits, parse_program

COMPILER = shutil.which("gcc") is not None and shutil.which("g++") is not None
ADD_C = '#include <stdio.h>\nint main(){int a,b;scanf("%d %d",&a,&b);printf("%d\\n",a+b);return 0;}\n'
ADD_CPP = "#include <iostream>\nint main(){int a,b;std::cin>>a>>b;std::cout<<a+b<<std::endl;}\n"
ENDINGS = [
    ("print(input())", {"stdin": "hé"}, ("exited", 0, "hé\n")),
    ("import sys; sys.exit(3)", {}, ("exited", 3, "")),
    ("import os; os.kill(os.getpid(), 9)", {}, ("signaled", None, "")),
    ("while True: pass", {"limits": ProgramLimits(wall=0.2)}, ("time_limit", None, "")),
    ("x = 'a' * (1 << 30)", {"limits": ProgramLimits(memory=64 << 20)}, ("memory_limit", None, "")),
    ("while True: print('x' * 65536)", {"limits": ProgramLimits(output=1024)}, ("output_limit", None, None)),
    ("import u; print(u.f())", {"files": {"u.py": "def f(): return 7"}}, ("exited", 0, "7\n")),
    (
        "import sys; print(sys.argv, __name__)",
        {"argv": ("x", "é")},
        ("exited", 0, "['main.py', 'x', 'é'] __main__\n"),
    ),
    ("import os; print(os.environ['A'])", {"env": {"A": "b c"}}, ("exited", 0, "b c\n")),
    ("echo $((6 * 7)) $1; exit 4", {"language": "bash", "argv": ("z",)}, ("exited", 4, "42 z\n")),
]


async def test_programs_are_independent_and_results_are_in_order() -> None:
    programs = [Program(source=source, id=str(at), **more) for at, (source, more, _) in enumerate(ENDINGS)]
    reported: list[int] = []
    results = await run_code(programs, sandbox="local", on_result=lambda at, _: reported.append(at))
    assert reported == list(range(len(programs)))
    for result, (source, _, (status, code, stdout)) in zip(results, ENDINGS, strict=True):
        assert (result.status, result.exit_code) == (status, code), (source, result)
        if stdout is not None:
            assert result.stdout == stdout, (source, result)
    assert [result.id for result in results] == [program.id for program in programs]


async def test_cases_do_not_share_files() -> None:
    leaves = (
        "import os, pathlib\nplaces = ('/work/mark', '/tmp/mark', '/dev/shm/mark')\n"
        "seen = [p for p in places if os.path.exists(p)]\nfor p in places: pathlib.Path(p).touch()\n"
        "pathlib.Path('main.py').write_text('print(1)')\nprint(len(seen), input())\n"
    )
    cases = tuple(Case(stdin=f"{n}\n", stdout=f"0 {n}") for n in range(4))
    (result,) = await run_code([Program(source=leaves, cases=cases)], sandbox="local", concurrency=1)
    assert result.passed, result
    assert result.share == 1.0


async def test_every_case_has_its_own_verdict_and_limits() -> None:
    source = (
        "n = input()\nif n == '1': print('1  ')\nif n == '2': print(3)\nif n == '3': 1 / 0\n"
        "if n == '4':\n    while True: pass\nif n == '5': x = 'a' * (1 << 30)\nif n == '6': print('x' * 5000)\n"
        "if n == '7': print('1.0000001 end')\n"
    )
    cases = (
        *(Case(stdin="1", stdout="1"), Case(stdin="2", stdout="2"), Case(stdin="3", stdout="")),
        Case(stdin="4", stdout="", limits=ProgramLimits(wall=0.2)),
        Case(stdin="5", stdout="", limits=ProgramLimits(memory=64 << 20)),
        Case(stdin="6", stdout="", limits=ProgramLimits(output=1000)),
        *(Case(stdin="7", stdout="1 end"), Case(stdin="8")),
    )
    (result,) = await run_code([Program(source=source, cases=cases, tolerance=1e-3)], sandbox="local")
    verdicts = [case.verdict for case in result.cases]
    assert verdicts == ["passed", "wrong_answer", "crash", "time", "memory", "output", "passed", "passed"]
    assert not result.passed
    assert (result.stdout, result.share) == ("3\n", 3 / 8)
    (again,) = await run_code(
        [Program(source=source, cases=cases[:2])], sandbox="local", check=lambda out, case: out == "3\n"
    )
    assert [case.verdict for case in again.cases] == ["wrong_answer", "passed"]


@pytest.mark.skipif(not COMPILER, reason="[probed] this machine has no gcc and g++")
async def test_c_and_cpp_are_compiled_once_and_run_for_each_case() -> None:
    cases = (Case(stdin="1 2", stdout="3"), Case(stdin="2 2", stdout="5"))
    programs = [
        Program(source=ADD_C, language="c", cases=cases),
        Program(source=ADD_CPP, language="c++", cases=cases[:1]),
        Program(source="int main({", language="c", cases=cases),
    ]
    c, cpp, broken = await run_code(programs, sandbox="local")
    assert [case.verdict for case in c.cases] == ["passed", "wrong_answer"], c
    assert c.compile is not None
    assert c.compile.ok
    assert cpp.passed, cpp
    assert [case.verdict for case in broken.cases] == ["crash", "crash"]
    assert broken.compile is not None
    assert "error" in broken.compile.output


async def test_missing_compiler_is_not_the_programs_fault(tmp_path: Path) -> None:
    async with ProgramRunner("subprocess") as programs:
        spec = SandboxSpec(provider="subprocess", env={"PATH": str(tmp_path)})
        program = Program(source=ADD_C, language="c")
        result = await run_program(program, ProgramLimits(), spec, programs.create, asyncio.Semaphore(1))
    assert (result.status, result.cause) == ("failed", "sandbox.refused")
    assert "gcc" in result.detail


async def test_failing_sandbox_is_replaced_and_then_reported_as_infra() -> None:
    async with ProgramRunner("local", concurrency=2) as programs:
        made = 0

        async def failing(spec: SandboxSpec) -> Any:
            nonlocal made
            made += 1
            if made == 1:
                raise SandboxError("out of memory", cause="sandbox.create")
            sandbox = await programs.create(spec)
            if made <= lost:
                await sandbox.close()
            return sandbox

        program = Program(source="print(1)")
        lost = 2
        result = await run_program(program, ProgramLimits(), programs.spec, failing, programs.gate)
        assert (result.stdout, result.attempts) == ("1\n", 3), result
        made, lost = 0, 100
        result = await run_program(program, ProgramLimits(), programs.spec, failing, programs.gate)
        assert (result.status, result.cause, made) == ("failed", "sandbox.lost", 3), result
        assert not result.ok


async def test_open_sandboxes_never_exceed_the_concurrency() -> None:
    async with ProgramRunner("local", concurrency=2) as programs:
        open_ids: set[str] = set()
        most = 0

        async def counting(spec: SandboxSpec) -> Any:
            nonlocal most
            sandbox: Any = await programs.create(spec)
            open_ids.add(sandbox.id)
            most = max(most, len(open_ids))
            close = sandbox.close

            async def counted_close() -> None:
                await close()
                open_ids.discard(sandbox.id)

            sandbox.close = counted_close
            return sandbox

        cases = tuple(Case(stdin=str(n), stdout=str(n)) for n in range(3))
        program = Program(source="print(input())", cases=cases)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(run_program(program, ProgramLimits(), programs.spec, counting, programs.gate))
        assert (most, open_ids) == (2, set())


async def test_stream_reads_a_bounded_number_of_programs_ahead() -> None:
    taken = 0

    def endless() -> Iterator[Program]:
        nonlocal taken
        while True:
            taken += 1
            yield Program(source=f"print({taken})")

    async def later() -> AsyncIterator[Program]:
        for program in endless():
            yield program

    for source in (endless(), later()):
        taken = 0
        stream = stream_code(source, sandbox="local", concurrency=2)
        assert [(await anext(stream)).stdout for _ in range(3)] == ["1\n", "2\n", "3\n"]
        assert taken <= 3 + 2 * 2
        await stream.aclose()
    await nothing_open()


async def nothing_open() -> None:
    """Return whether the providers of the thread hold no sandbox."""
    from rookery.scoring import code_execution

    thread = code_execution._get_thread()
    assert thread.providers is not None
    for provider in thread.providers._open.values():
        assert not provider.open_sandboxes  # type: ignore[attr-defined]


async def test_cancellation_ends_the_programs_before_it_returns() -> None:
    started = asyncio.Event()
    programs = [Program(source="pass"), *(Program(source="import time; time.sleep(60)") for _ in range(5))]
    task = asyncio.create_task(run_code(programs, sandbox="local", on_result=lambda at, _: started.set()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nothing_open()


async def test_run_code_sync_works_inside_a_running_event_loop() -> None:
    assert run_code_sync([Program(source="print(1)")], sandbox="local")[0].stdout == "1\n"
    found: list[str] = []

    def beside(text: str) -> None:
        found.append(run_code_sync([Program(source=f"print({text!r})")], sandbox="local")[0].stdout)

    threads = [threading.Thread(target=beside, args=(str(n),)) for n in range(3)]
    for thread in threads:
        thread.start()
    mine = await rookery.run_code([rookery.Program(source="print(9)")], sandbox="local")
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert (sorted(found), mine[0].stdout) == (["0\n", "1\n", "2\n"], "9\n")
    with pytest.raises(UsageError, match=r"Program\b.*\bstr\b"):
        run_code_sync(["print(1)"])  # type: ignore[list-item]


_SCRIPT = """
import os, sys
from rookery import Program, run_code_sync
if __name__ == "__main__":
    print(run_code_sync([Program(source="print(1)")], sandbox="local")[0].stdout, end="", flush=True)
    pid = os.fork()
    if pid == 0:
        ok = run_code_sync([Program(source="print(2)")], sandbox="local")[0].stdout == "2\\n"
        sys.exit(0 if ok else 1)
    print("child", os.waitpid(pid, 0)[1], flush=True)
    print(run_code_sync([Program(source="print(3)")], sandbox="local")[0].stdout, end="", flush=True)
"""


def test_script_and_its_forked_child_exit_cleanly(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\nchild 0\n3\n", "")
    assert list(tmp_path.iterdir()) == []


async def test_unisolated_provider_must_be_named_explicitly(monkeypatch: pytest.MonkeyPatch) -> None:
    from rookery.scoring import fresh_sandboxes

    monkeypatch.setattr(fresh_sandboxes, "resolve_spec", lambda spec: (spec, "why not"))
    with pytest.raises(SandboxError, match="why not"):
        async with ProgramRunner():
            raise AssertionError


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({}, r"source\b.*\bmain\.py"),
        ({"source": 5}, r"source\b.*\bint\b"),
        ({"source": "x", "language": "cobol"}, "language"),
        ({"source": "x", "files": {"../up": "y"}}, "files"),
        ({"source": "x", "files": {"/etc/passwd": "y"}}, "files"),
        ({"source": "x", "files": {"main.py": "y"}}, r"source\b.*files\b.*main\.py"),
        ({"source": "x", "argv": ["a", 1]}, "argv"),
        ({"source": "x", "env": {"A=B": "c"}}, "env"),
        ({"source": "x", "limits": {"wall": 0}}, r"limits\.wall"),
        ({"source": "x", "limits": {"memory": 1.5}}, r"limits\.memory"),
        ({"source": "x", "limits": {"wall": True}}, r"limits\.wall"),
        ({"source": "x", "limits": {"walls": 1}}, r"limits\.walls"),
        ({"source": "x", "cases": [{"stdin": "1"}, {"stdout": 1}]}, r"cases\[1\]\.stdout"),
        ({"source": "x", "cases": [{"limits": {"cpu": "a"}}]}, r"cases\[0\]\.limits\.cpu"),
        ({"source": "x", "tolerance": -1}, "tolerance"),
        ({"source": {"base64": "?"}}, r"source\.base64"),
        ({"source": "x", "surprise": 1}, "surprise"),
        ([], r"\blist\b"),
    ],
)
def test_invalid_program_raises_an_error_that_names_the_field(wrong: Any, named: str) -> None:
    with pytest.raises(UsageError, match=f"^program.*{named}"):
        parse_program(wrong)


@settings(max_examples=50)
@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_input_gives_a_program_or_a_usage_error(plain: Any) -> None:
    for wrong in (plain, {"source": "x", "limits": plain}, {"source": "x", "cases": plain, "files": plain}):
        try:
            parse_program(wrong)
        except UsageError:
            continue


def test_limits_override_only_where_set() -> None:
    assert ProgramLimits(wall=1).over(ProgramLimits(wall=2, memory=3)) == ProgramLimits(wall=1, memory=3)
    assert parse_limits({"wall": 2}) == ProgramLimits(wall=2)


lines = st.lists(st.text(st.characters(exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")), max_size=5)


@given(lines, st.integers(0, 3))
def test_trailing_white_space_is_ignored(words: list[str], more: int) -> None:
    text = "\n".join(words)
    assert outputs_match(text, "\n".join(line + " " * more for line in words) + "\n" * more)
    assert outputs_match(text, text + "x") is False


@given(st.floats(-1e6, 1e6), st.floats(0, 1))
def test_tolerance_applies_to_numbers_only(number: float, tolerance: float) -> None:
    assert outputs_match(f"a {number}", f"a {number + 0.9 * tolerance}", tolerance + 1e-9)
    assert not outputs_match(f"a {number}", f"b {number}", tolerance)
    assert not outputs_match(f"{number}", f"{number} {number}", tolerance)
    assert not outputs_match(f"{number}", "nan", tolerance)


def test_closed_program_runner_leaves_no_temporary_files() -> None:
    before = set(Path(tempfile.gettempdir()).iterdir())

    async def main() -> None:
        async with ProgramRunner("local") as programs:
            assert (await programs.run(Program(source="print(1)"))).ok

    asyncio.run(main())
    mine = {path for path in set(Path(tempfile.gettempdir()).iterdir()) - before if f"{os.getpid()}" in path.name}
    assert not mine


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (str(2**2000), "inf", False),
        (str(2**2000), str(2**2000), True),
        (str(2**2000), str(2**2001), False),
        ("1e400", "1e500", False),
        ("-1e400", "-inf", False),
        ("inf", "inf", True),
        ("inf", "Infinity", False),
        ("inf", "1e308", False),
        ("1e308", "inf", False),
        ("nan", "nan", True),
        ("nan", "-nan", False),
        ("nan", "1", False),
        ("10", "1_0", False),
        ("10", "\u0661\u0660", False),
        ("1.0", "1", True),
        ("+.5", "0.5", True),
        ("1e3", "1000.0", True),
        ("1e308", "-1e308", False),
    ],
)
def test_non_finite_words_are_compared_as_text(expected: str, got: str, same: bool) -> None:
    assert outputs_match(f"a {expected}", f"a {got}", 1e-6) is same


def test_large_tolerance_still_rejects_non_finite_differences() -> None:
    assert not outputs_match("1e300", "-1e308", 2.0)
    assert not outputs_match("1e308", "-1.7e308", 2.0)
    assert outputs_match("1e308", "-0.9e308", 2.0)


def test_compiler_limits_are_between_those_of_program_and_sandbox() -> None:
    from rookery.scoring.program_runner import COMPILE_LIMITS, get_compile_spec

    mb = 1 << 20
    small = get_compile_spec(SandboxSpec(memory=256 * mb, pids=16, disk=64 * mb), ProgramLimits(memory=64 * mb))
    assert (small.memory, small.pids, small.disk) == (256 * mb, 16, 64 * mb)
    large = get_compile_spec(SandboxSpec(memory=256 * mb), ProgramLimits(memory=512 * mb))
    assert large.memory == 512 * mb
    free = get_compile_spec(SandboxSpec(memory=None, pids=None, disk=None), ProgramLimits())
    assert (free.memory, free.pids, free.disk) == (COMPILE_LIMITS.memory, COMPILE_LIMITS.pids, COMPILE_LIMITS.disk)
