"""The live display on a terminal, formatting of numbers, and escaping of control characters."""

import asyncio
import os
import pty
import re
import signal
from pathlib import Path

import pytest

from rookery.cli.terminal import escape_controls, format_duration, format_table, one_line, truncate_middle
from rookery.core import Cancelled, Completed, Failed, Outcome, Rollout, Truncated
from rookery.view.stats import Stats, is_failure
from tests.cli.conftest import tasks
from tests.cli.helpers import COMMAND, SECONDS, environ
from tests.servers import Answer, ModelServer

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """Runs the command on a pseudo-terminal."""

    def __init__(self, *args: str, cwd: Path, **env: str) -> None:
        self.output = ""
        pid, self._fd = pty.fork()
        if pid == 0:
            try:
                os.chdir(cwd)
                os.execve(
                    COMMAND[0], [*COMMAND, *args], environ(**{"TERM": "xterm-256color", "COLUMNS": "100", **env})
                )
            finally:
                os._exit(99)
        self.pid = pid
        self._more = asyncio.Event()
        self._over = False
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._over = True
        self.output += data.decode(errors="replace")
        self._more.set()

    async def until(self, *texts: str) -> None:
        async with asyncio.timeout(SECONDS):
            while not all(text in self.output for text in texts) and not self._over:
                self._more.clear()
                await self._more.wait()
        assert all(text in self.output for text in texts), self.output

    async def end(self) -> int:
        async with asyncio.timeout(SECONDS):
            while not self._over:
                self._more.clear()
                await self._more.wait()
        os.close(self._fd)
        _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.long
async def test_terminal_shows_live_progress_and_is_restored(here: Path, server: ModelServer) -> None:
    tasks(here, 6, boom=(3,))
    hold = asyncio.Event()
    # The task decides which calls are held, because concurrent calls arrive in any order.
    held = ("sum 4", "sum 5")
    server.default = lambda request: Answer(
        "42", hold=hold if request.body["messages"][-1]["content"] in held else None
    )
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url, "--runners", "0", "-c", "5")
    terminal = Terminal(*run, cwd=here)
    await terminal.until(HIDE, "4/6", "bug.scoring 1")
    hold.set()
    assert await terminal.end() == 3
    assert terminal.output.rindex(SHOW) > terminal.output.rindex(HIDE)
    assert "\x1b[1m" in terminal.output
    assert "5 valid" in terminal.output


@pytest.mark.long
async def test_ctrl_c_on_a_terminal_shows_the_cursor_again(here: Path, server: ModelServer) -> None:
    server.default = Answer("42", hold=asyncio.Event())
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url, "--runners", "1")
    terminal = Terminal(*run, cwd=here)
    await server.wait_for_requests(4)
    await terminal.until(HIDE)
    os.kill(terminal.pid, signal.SIGINT)
    assert await terminal.end() == 130
    assert terminal.output.rindex(SHOW) > terminal.output.rindex(HIDE)
    assert "rookery resume" in terminal.output


@pytest.mark.long
async def test_no_color_disables_colours(here: Path, server: ModelServer) -> None:
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url, "--runners", "0")
    terminal = Terminal(*run, cwd=here, NO_COLOR="1", TERM="dumb")
    assert await terminal.end() == 0
    assert "\x1b" not in terminal.output


def record(outcome: Outcome, reward: float | None = None) -> Rollout:
    return Rollout(id="0.0", group=0, member=0, task="t", outcome=outcome, reward=reward)


def test_only_valid_rollouts_are_in_a_denominator() -> None:
    stats = Stats()
    for reward in (1.0, 0.0, 1.0, 1.0):
        stats.add(record(Completed(), reward))
    stats.add(record(Truncated("time"), 0.0))
    stats.add(record(Failed("infra", "sandbox.lost", "gone"), None))
    stats.add(record(Failed("bug", "bug.scoring", "boom"), None))
    stats.add(record(Failed("bug", "bug.scoring", "boom"), None))
    stats.add(record(Cancelled("user"), None))
    assert (stats.rollouts, stats.valid, stats.failed, stats.cancelled) == (9, 5, 3, 1)
    assert stats.short == "pass 60.0%"
    assert [(cause, failure.count) for cause, failure in stats.causes()] == [
        ("bug.scoring", 2),
        ("sandbox.lost", 1),
    ]
    assert stats.truncated == {"time": 1}


@pytest.mark.parametrize("name", ["completed", "truncated.time", "cancelled.user"])
def test_label_of_a_result_is_not_a_failure(name: str) -> None:
    assert not is_failure(name)
    assert is_failure("sandbox.lost")


def test_control_characters_in_text_are_escaped() -> None:
    assert escape_controls("a\x1b[2J\r\x00\x9b\u202eb\ud800") == "a\\x1b[2J\\r\\x00\\x9b\\u202eb\\ud800"
    assert escape_controls("Grüße, 世界\n\tok") == "Grüße, 世界\n\tok"
    assert one_line("a\n b\x07" + "x" * 500, 20) == "a b\\x07" + "x" * 12 + "…"
    assert re.fullmatch(r"x{5}\n….* 90 .*…\nx{5}", truncate_middle("x" * 100, 10))


def test_durations_are_short_and_columns_aligned() -> None:
    formatted = [format_duration(seconds) for seconds in (0.0, 0.012, 0.4, 12.2, 185, 7_800, 200_000)]
    assert formatted == ["0s", "12ms", "0.4s", "12s", "3m 05s", "2h 10m", "2d 7h"]
    assert format_table([["a", "1", "x"], ["bbb", "22", "y"]], right=frozenset({1})) == [
        "a     1  x",
        "bbb  22  y",
    ]
