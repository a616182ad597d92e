"""The real command, in a process of its own."""

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
SECONDS = 60.0
KEY = "a-key-that-nobody-may-see"


@dataclass
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """Stdout as an event stream: every line must be an object."""
        return [json.loads(line) for line in self.out.splitlines()]

    def refused(self, *words: str, code: int = 2) -> None:
        """It said one sentence about what is wrong, with these words in it, and nothing else."""
        assert self.code == code, (self.code, self.out, self.err)
        assert self.out == ""
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        for word in words:
            assert word in self.err, self.err


def environ(**more: str) -> dict[str, str]:
    """The tests' environment without what would configure the command."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ROOKERY_", "OPENAI_")) and k != "NO_COLOR"}
    return {**kept, **more}


@asynccontextmanager
async def started(*args: str | Path, cwd: Path, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command under way; gone with the block."""
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
        process._transport.close()  # type: ignore[attr-defined]  # pipes of a killed command stay open otherwise


async def ended(process: asyncio.subprocess.Process, seconds: float = SECONDS) -> Ended:
    async with asyncio.timeout(seconds):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def rookery(*args: str | Path, cwd: Path, seconds: float = SECONDS, **env: str) -> Ended:
    """The command, to its end. No usage error ever shows a traceback."""
    async with started(*args, cwd=cwd, **env) as process:
        done = await ended(process, seconds)
    assert "Traceback" not in done.err, done.err
    return done


def runs(folder: Path) -> list[Path]:
    """The runs in a folder, oldest first."""
    return sorted(path for path in (folder / "runs").glob("2*") if path.is_dir())
