"""The `python` tool, on a real provider."""

import re
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rookery.core import ExecResult, SandboxError, SandboxSpec, ToolCall
from rookery.environments import ToolEnvironment
from rookery.environments.python_tool import python, render_result
from rookery.environments.text import render
from rookery.sandboxes import open_provider
from rookery.sandboxes.protocol import ProviderHome, Sandbox
from tests.environments.helpers import Attempt, Reply, calls


@asynccontextmanager
async def with_sandbox(tmp_path, script: list[Reply], **options: Any):
    provider = open_provider("subprocess", ProviderHome(folder=tmp_path, run="r1"))

    async def open_sandbox(spec: SandboxSpec) -> Sandbox:
        attempt.opened.append(await provider.create(spec, attempt="a1"))
        return attempt.opened[-1]

    try:
        attempt = Attempt(script, open_sandbox=open_sandbox, **options)
        yield attempt
    finally:
        await provider.close()


def program(code: str) -> list[ToolCall]:
    return calls(("python", render({"code": code})))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(6 * 7)", "42\n"),
        ("", "(no output)"),
        ("x = 1", "(no output)"),
        ("import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')", "a\nb\nc\n"),
        ("raise SystemExit(3)", "[exit code 3]"),
        ("print('x', end='')\nraise SystemExit(3)", "x\n[exit code 3]"),
        ("import os, signal\nprint(1)\nos.kill(os.getpid(), signal.SIGKILL)", None),
        ("print('é')", "é\n"),
        ("print(input())", None),
        ("print(__name__, sorted(n for n in globals() if n[:2] != '__'))", "__main__ []\n"),
    ],
)
async def test_output_and_ending_are_returned(tmp_path, code, expected):
    async with with_sandbox(tmp_path, [program(code), "42"]) as attempt:
        await ToolEnvironment().run(attempt.ctx)
        (observation,) = attempt.observations
        if expected is None:
            assert observation.endswith(("EOFError: EOF when reading a line\n[exit code 1]", " 9 (SIGKILL)]"))
        else:
            assert observation == expected


async def test_traceback_shows_the_programs_lines_only(tmp_path):
    async with with_sandbox(tmp_path, [program("def f():\n    return 1 / 0\nf()"), "42"]) as attempt:
        await ToolEnvironment().run(attempt.ctx)
        (observation,) = attempt.observations
        assert observation.startswith(
            'Traceback (most recent call last):\n  File "program.py", line 3, in <module>\n'
        )
        assert '  File "program.py", line 2, in f\n    return 1 / 0\n' in observation
        assert observation.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
        assert observation.count("File") == 2


async def test_syntax_errors_are_returned(tmp_path):
    async with with_sandbox(tmp_path, [program("x = (\n"), program("a\0b"), "42"]) as attempt:
        await ToolEnvironment().run(attempt.ctx)
        first, second = attempt.observations
        assert first.startswith('  File "program.py", line 1\n')
        assert "SyntaxError" in first
        assert re.search(r"\b(Syntax|Value)Error: ", second)


async def test_sandbox_is_created_by_the_first_call_and_reused(tmp_path):
    script = [program("open('m.py', 'w').write('x = 5')"), program("import m\nprint(m.x)"), "42"]
    async with with_sandbox(tmp_path, script) as attempt:
        env = ToolEnvironment()
        env.tools()
        assert attempt.opened == []
        await env.run(attempt.ctx)
        assert len(attempt.opened) == 1
        assert attempt.observations == ["(no output)", "5\n"]


async def test_parallel_calls_share_one_sandbox(tmp_path):
    async with with_sandbox(tmp_path, [program("print(1)") + program("print(2)"), "42"]) as attempt:
        await ToolEnvironment(parallel=True).run(attempt.ctx)
        assert attempt.observations == ["1\n", "2\n"]
        assert len(attempt.opened) == 1


@pytest.mark.long
async def test_program_over_its_time_limit_returns_its_output(tmp_path):
    code = "print('before')\nimport time\nwhile True: time.sleep(1)"
    async with with_sandbox(tmp_path, [program(code), "42"]) as attempt:
        await ToolEnvironment([python.with_timeout(3)]).run(attempt.ctx)
        (observation,) = attempt.observations
        assert re.fullmatch(r"before\n\[stopped: .* 3 s .*\]", observation)


@pytest.mark.long
async def test_long_output_is_bounded(tmp_path):
    code = "for n in range(400000): print(n)"
    async with with_sandbox(tmp_path, [program(code), "42"]) as attempt:
        await ToolEnvironment(max_result=2_000).run(attempt.ctx)
        (observation,) = attempt.observations
        assert len(observation) < 2_500
        assert observation.startswith("0\n1\n2\n")
        assert re.search(r"… [\d,]+ .*…", observation)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (ExecResult(status="memory_limit", stdout=b"x"), r"x\n\[stopped: .*memory.*\]"),
        (ExecResult(status="process_limit"), r"\[stopped: .*process.*\]"),
        (ExecResult(status="output_limit"), r"\[stopped: .*output.*\]"),
        (ExecResult(status="signaled", signal=99), r"\[.* 99\]"),
        (ExecResult(status="exited", exit_code=0, stdout=b"ab", stdout_dropped=7), r"a\n… 7 .*…\nb"),
    ],
)
def test_every_ending_is_rendered(result, expected):
    assert re.fullmatch(expected, render_result(result, 1.0))


async def test_lost_sandbox_raises_an_infra_error(tmp_path):
    async with with_sandbox(tmp_path, [program("print(1)"), "42"]) as attempt:
        sandbox = await attempt.ctx.sandbox()
        await attempt.opened[0].close()
        with pytest.raises(SandboxError) as caught:
            await ToolEnvironment().run(attempt.ctx)
        assert (caught.value.code, caught.value.fault) == ("sandbox.lost", "infra")
        assert sandbox is await attempt.ctx.sandbox()
