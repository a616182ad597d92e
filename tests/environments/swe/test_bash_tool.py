"""The shell as the policy has it, in a real sandbox."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import ExecResult
from rookery.environments.swe.bash_tool import SUBMITTED, bash_tool, has_marker, render_result
from rookery.environments.swe.tool_config import MARKER, ToolConfig, ToolSettings
from tests.environments.helpers import Attempt
from tests.environments.swe.helpers import attempt_in, box

TOOL = bash_tool(ToolConfig(bash=ToolSettings(output=2000)))


async def said(attempt: Attempt, command: str, limit: float = 30.0) -> str:
    return str(await TOOL.invoke({"command": command}, attempt.ctx, limit))


@pytest.mark.needs("mount")
async def test_directory_variables_and_endings(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        attempt = attempt_in(made, "/tmp")
        assert await said(attempt, "pwd; mkdir -p a; cd a; x=1") == "/tmp\n[exit code 0]"
        assert await said(attempt, "echo $x $PWD; echo bad >&2; (exit 3)") == (
            "1 /tmp/a\n[stderr]\nbad\n[exit code 3]"
        )
        # No input is waited for.
        assert "syntax error" in await said(attempt, "if; then")
        assert "[exit code 1]" in await said(attempt, "read line")


@pytest.mark.needs("mount")
async def test_a_command_over_its_time_is_killed_and_the_shell_stays(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        attempt = attempt_in(made, "/tmp")
        await said(attempt, "x=kept")
        timed_out = await said(attempt, "echo before; trap '' TERM INT; sleep 60", limit=2.0)
        assert timed_out.startswith("before\n")
        assert "time limit" in timed_out
        assert await said(attempt, "echo $x") == "kept\n[exit code 0]"
        assert attempt.ctx.metrics["bash/time_limit"] == 1
        tool = str(await TOOL.invoke({"command": "sleep 60", "timeout": 0.3}, attempt.ctx, 30.0))
        assert "time limit" in tool


@pytest.mark.needs("mount")
@pytest.mark.parametrize("ending", ["exit 4", "kill -9 $$", "exec false"])
async def test_a_shell_that_ended_is_replaced_and_that_is_reported(tmp_path: Path, ending: str) -> None:
    async with box(tmp_path) as made:
        attempt = attempt_in(made, "/tmp")
        await said(attempt, "x=kept; cd /")
        told = await said(attempt, ending)
        assert "the shell was replaced" in told
        assert "variables and functions are" in told
        # The new one begins where the first did.
        assert await said(attempt, "echo [$x] $PWD") == "[] /tmp\n[exit code 0]"


@pytest.mark.needs("mount")
async def test_one_long_line_is_cut_in_bytes(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        attempt = attempt_in(made)
        told = await said(attempt, "printf a; head -c 1000000 /dev/zero | tr '\\0' x; printf b; echo e >&2")
        assert len(told.encode()) < 2300
        assert "bytes cut" in told
        assert told.startswith("ax")
        assert "xb\n[stderr]\ne\n[exit code 0]" in told
        both = await said(attempt, "for s in 1 2; do head -c 50000 /dev/zero | tr '\\0' é >&$s; done")
        assert len(both.encode()) < 2300
        assert both.count("bytes cut") == 2


@given(st.binary(max_size=4000), st.binary(max_size=4000), st.integers(0, 10**9), st.integers(64, 3000))
def test_an_answer_is_bounded_whatever_was_printed(out: bytes, err: bytes, dropped: int, limit: int) -> None:
    result = ExecResult(status="exited", exit_code=0, stdout=out, stderr=err, stdout_dropped=dropped)
    told = render_result(result, limit)
    assert len(told.encode()) <= 3 * limit + 200  # a byte that is no UTF-8 is shown as three
    assert told.endswith("[exit code 0]")
    if out.isascii() and err.isascii() and len(out) + len(err) <= limit and not dropped:
        assert out.decode() in told
        assert err.decode() in told


def test_the_marker_counts_as_a_line_at_either_end() -> None:
    def printed(text: str, code: int = 0) -> bool:
        return has_marker(ExecResult(status="exited", exit_code=code, stdout=text.encode()), MARKER)

    assert printed(f"{MARKER}\n")
    assert printed(f"diff\n\n{MARKER}\n\n")
    assert printed(f"{MARKER}\nthe answer")
    assert not printed(f"a\n{MARKER}\nb")
    assert not printed(f"echo {MARKER}")
    assert not printed(MARKER, code=1)
    assert not has_marker(ExecResult(status="exited", exit_code=0, stdout=b"x"), "")


@pytest.mark.needs("mount")
async def test_the_marker_submits(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        attempt = attempt_in(made)
        tool = bash_tool(ToolConfig(marker="DONE"))
        assert "echo DONE" in tool.description
        await tool.invoke({"command": "echo not DONE"}, attempt.ctx, 30.0)
        assert not attempt.ctx.state.get(SUBMITTED)
        await tool.invoke({"command": "echo DONE"}, attempt.ctx, 30.0)
        assert attempt.ctx.state[SUBMITTED]
