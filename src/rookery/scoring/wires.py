"""Lines to and from one of our programs in a sandbox.

Guarantees:
- a line, and what the program prints beside it, are bounded: a program that says more is ended;
- a line that cannot be read is `BadLine`, whatever its bytes are; no other exception leaves `parsed`;
- how a program ended is reported as a verdict.
"""

import json
from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import msgspec

from rookery.core import ExecResult, SandboxError
from rookery.core.errors import describe
from rookery.sandboxes import Process, Sandbox
from rookery.scoring.programs import Verdict

MOST_LINE: Final = 64 << 20
MOST_SAID: Final = 64 << 20
"""Bytes that a submission may print under its tests."""
TAIL: Final = 4_000
END_SECONDS: Final = 10.0


class BadLine(Exception):  # noqa: N818  (what the program did, not an error of ours)
    """A line that does not say what a line of its kind must say."""


def line_of(plain: object) -> bytes:
    """Encode as a line of ASCII, lone surrogates included: a text may hold them, and UTF-8 cannot."""
    return json.dumps(plain, separators=(",", ":")).encode()


def parsed(data: bytes) -> Any:
    """Decode the JSON of a line; `BadLine` where it is none, is nested too deep or holds lone surrogates."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadLine(f"a line that cannot be read: {describe(error)}"[:300]) from None


class Wire:
    """Lines to and from a process in a sandbox."""

    def __init__(self, process: Process, box: Sandbox) -> None:
        self.process = process
        self.box = box
        self._chunks: AsyncIterator[Any] = process.output()
        self._rest = b""
        self.tail = b""
        self.said = 0

    async def send(self, kind: bytes, data: bytes) -> None:
        await self.process.send(kind + data + b"\n")

    async def line(self) -> bytes | None:
        """The next one; None when the process has ended, or says too much to be worth listening to."""
        parts = [self._rest]
        size = len(self._rest)
        while b"\n" not in parts[-1]:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                return None
            stream, data = chunk
            if stream == "stderr":
                self.tail = (self.tail + data)[-TAIL:]
                self.said += len(data)
            else:
                parts.append(data)
                size += len(data)
            if size > MOST_LINE or self.said > MOST_SAID:
                self.said = MOST_SAID + 1
                return None
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    async def ended(self) -> tuple[Verdict | Literal["lost"], str]:
        """How the process ended; it is ended where it has not."""
        if self.said > MOST_SAID:
            await self.process.kill()
            return "output", f"it wrote more than {MOST_SAID} bytes"
        try:
            result = await self.process.wait(timeout=END_SECONDS)
        except TimeoutError:
            await self.process.kill()
            return "crash", "it closed its streams and went on"
        except SandboxError as error:
            return "lost", str(error)
        if result.detail and result.status == "exited" and result.exit_code in (126, 127):
            raise SandboxError(f"the sandbox has no python3 to grade with: {result.detail}", cause="task.image")
        return _verdict(result)

    async def aclose(self) -> None:
        await self._chunks.aclose()  # type: ignore[attr-defined]


def _verdict(result: ExecResult) -> tuple[Verdict | Literal["lost"], str]:
    match result.status:
        case "lost":
            return "lost", result.detail
        case "time_limit":
            return "time", result.detail
        case "memory_limit":
            return "memory", result.detail
        case "exited":
            return "crash", f"it ended the interpreter, with exit code {result.exit_code}"
        case "signaled":
            return "crash", f"signal {result.signal} ended the interpreter"
        case other:
            return "crash", f"{other}: {result.detail}"
