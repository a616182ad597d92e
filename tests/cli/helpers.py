"""Run the `rookery` command in a child process and check its result."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "rookery.cli")
SECONDS = 240.0
KEY = "a-key-that-nobody-may-see"


@dataclass
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout, one per line, without the notes about a slow start of the run."""
        events = [json.loads(line) for line in self.out.splitlines()]
        while events and events[0].get("event") == "note":
            del events[0]
        return events

    def assert_refused(self, *named: str, code: int = 2) -> None:
        """Assert that the command printed one error line, which names these options, files or values."""
        assert self.code == code, (self.code, self.out, self.err)
        assert self.out == ""
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        for name in named:
            assert name in self.err, self.err


def environ(**more: str) -> dict[str, str]:
    """Return this process's environment without variables that configure the command."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ROOKERY_", "OPENAI_")) and k != "NO_COLOR"}
    return {**kept, **more}


@asynccontextmanager
async def start_command(*args: str | Path, cwd: Path, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a command; kill it at the end of the block if it is still running."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *map(str, args),
        cwd=cwd,
        env=environ(**env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # otherwise the pipes of a killed command stay open


async def wait_for_end(process: asyncio.subprocess.Process, seconds: float = SECONDS) -> CommandResult:
    async with asyncio.timeout(seconds):
        out, err = await process.communicate()
    assert process.returncode is not None
    return CommandResult(process.returncode, out.decode(), err.decode())


async def rookery(*args: str | Path, cwd: Path, seconds: float = SECONDS, **env: str) -> CommandResult:
    """Run a command to its end. Fails if it prints a traceback."""
    async with start_command(*args, cwd=cwd, **env) as process:
        done = await wait_for_end(process, seconds)
    assert "Traceback" not in done.err, done.err
    return done


def runs(folder: Path) -> list[Path]:
    """Return the run directories in `folder/runs`, oldest first."""
    return sorted(path for path in (folder / "runs").glob("2*") if path.is_dir())
