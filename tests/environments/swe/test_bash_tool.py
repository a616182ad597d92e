"""The tool `bash` in a real sandbox."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import ExecResult
from rookery.environments.swe.bash_tool import SUBMITTED, bash_tool, has_marker, render_result
from rookery.environments.swe.tool_config import MARKER, ToolConfig, ToolSettings
from tests.environments.helpers import Attempt
from tests.environments.swe.helpers import make_attempt, open_local_sandbox

TOOL = bash_tool(ToolConfig(bash=ToolSettings(output=2000)))


async def run_tool(attempt: Attempt, command: str, limit: float = 30.0) -> str:
    return str(await TOOL.invoke({"command": command}, attempt.ctx, limit))


@pytest.mark.needs("mount")
async def test_directory_and_variables_persist_and_endings_are_shown(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        attempt = make_attempt(sandbox, "/tmp")
        assert await run_tool(attempt, "pwd; mkdir -p a; cd a; x=1") == "/tmp\n[exit code 0]"
        assert await run_tool(attempt, "echo $x $PWD; echo bad >&2; (exit 3)") == (
            "1 /tmp/a\n[stderr]\nbad\n[exit code 3]"
        )
        # Commands have no input to wait for.
        assert "syntax error" in await run_tool(attempt, "if; then")
        assert "[exit code 1]" in await run_tool(attempt, "read line")


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_command_over_its_time_limit_is_killed_and_the_shell_survives(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        attempt = make_attempt(sandbox, "/tmp")
        await run_tool(attempt, "x=kept")
        killed = await run_tool(attempt, "echo before; trap '' TERM INT; sleep 60", limit=8.0)
        assert killed.startswith("before\n")
        assert " 8 s" in killed
        assert await run_tool(attempt, "echo $x") == "kept\n[exit code 0]"
        assert attempt.ctx.metrics["bash/time_limit"] == 1
        tool = str(await TOOL.invoke({"command": "sleep 60", "timeout": 0.3}, attempt.ctx, 30.0))
        assert " 0.3 s" in tool


@pytest.mark.needs("mount")
@pytest.mark.parametrize("ending", ["exit 4", "kill -9 $$", "exec false"])
async def test_shell_that_ended_is_replaced_in_the_initial_directory(tmp_path: Path, ending: str) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        attempt = make_attempt(sandbox, "/tmp")
        await run_tool(attempt, "x=kept; cd /")
        await run_tool(attempt, ending)
        assert await run_tool(attempt, "echo [$x] $PWD") == "[] /tmp\n[exit code 0]"


@pytest.mark.needs("mount")
async def test_long_line_is_cut_to_a_number_of_bytes(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        attempt = make_attempt(sandbox)
        text = await run_tool(attempt, "printf a; head -c 1000000 /dev/zero | tr '\\0' x; printf b; echo e >&2")
        assert len(text.encode()) < 2300
        assert re.search(r"… [\d,]+ .*…", text)
        assert text.startswith("ax")
        assert "xb\n[stderr]\ne\n[exit code 0]" in text
        both = await run_tool(attempt, "for s in 1 2; do head -c 50000 /dev/zero | tr '\\0' é >&$s; done")
        assert len(both.encode()) < 2300
        assert len(re.findall(r"… [\d,]+ .*…", both)) == 2


@given(st.binary(max_size=4000), st.binary(max_size=4000), st.integers(0, 10**9), st.integers(64, 3000))
def test_result_is_bounded_for_any_output(out: bytes, err: bytes, dropped: int, limit: int) -> None:
    result = ExecResult(status="exited", exit_code=0, stdout=out, stderr=err, stdout_dropped=dropped)
    text = render_result(result, limit)
    assert len(text.encode()) <= 3 * limit + 200  # an invalid byte is shown as a character of three bytes
    assert text.endswith("[exit code 0]")
    if out.isascii() and err.isascii() and len(out) + len(err) <= limit and not dropped:
        assert out.decode() in text
        assert err.decode() in text


def test_marker_must_be_the_first_or_last_line() -> None:
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
async def test_marker_submits(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        attempt = make_attempt(sandbox)
        tool = bash_tool(ToolConfig(marker="DONE"))
        assert "echo DONE" in tool.description
        await tool.invoke({"command": "echo not DONE"}, attempt.ctx, 30.0)
        assert not attempt.ctx.state.get(SUBMITTED)
        await tool.invoke({"command": "echo DONE"}, attempt.ctx, 30.0)
        assert attempt.ctx.state[SUBMITTED]
