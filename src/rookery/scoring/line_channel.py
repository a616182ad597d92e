"""Exchange lines with one of Rookery's programs inside a sandbox.

Guarantees:
- Lines and the program's other output are bounded. A program that writes more is killed.
- A line that cannot be decoded raises `MalformedLine`, whatever its bytes are.
- How the program ended is reported as a verdict.
"""

import json
from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import msgspec

from rookery.core import ExecResult, SandboxError
from rookery.core.errors import describe
from rookery.sandboxes import Process, Sandbox
from rookery.scoring.programs import Verdict

MAX_LINE: Final = 64 << 20
MAX_PRINTED: Final = 64 << 20
"""Bytes that a submission may print while its tests run."""
TAIL: Final = 4_000
END_SECONDS: Final = 10.0


class MalformedLine(Exception):  # noqa: N818  (caused by the program under test)
    """A line from a sandbox that does not follow the protocol."""


def encode_line(plain: object) -> bytes:
    """Encode data as one line of ASCII JSON. ASCII, because strings may contain lone surrogates."""
    return json.dumps(plain, separators=(",", ":")).encode()


def decode_line(data: bytes) -> Any:
    """Decode the JSON of a line. Raise `MalformedLine` if it is invalid, too deeply nested or has lone
    surrogates."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedLine(f"invalid line: {describe(error)}"[:300]) from None


class GraderChannel:
    """Lines to and from a process in a sandbox."""

    def __init__(self, process: Process, sandbox: Sandbox) -> None:
        self.process = process
        self.sandbox = sandbox
        self._chunks: AsyncIterator[Any] = process.output()
        self._rest = b""
        self.tail = b""
        self.printed = 0

    async def send(self, kind: bytes, data: bytes) -> None:
        """Send one line."""
        await self.process.send(kind + data + b"\n")

    async def read_line(self) -> bytes | None:
        """Return the next line, or None if the process has ended or written too much."""
        parts = [self._rest]
        size = len(self._rest)
        while b"\n" not in parts[-1]:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                return None
            stream, data = chunk
            if stream == "stderr":
                self.tail = (self.tail + data)[-TAIL:]
                self.printed += len(data)
            else:
                parts.append(data)
                size += len(data)
            if size > MAX_LINE or self.printed > MAX_PRINTED:
                self.printed = MAX_PRINTED + 1
                return None
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    async def wait(self) -> tuple[Verdict | Literal["lost"], str]:
        """Wait for the end of the process and return its verdict; kill it if it does not end."""
        if self.printed > MAX_PRINTED:
            await self.process.kill()
            return "output", f"it wrote more than {MAX_PRINTED} bytes"
        try:
            result = await self.process.wait(timeout=END_SECONDS)
        except TimeoutError:
            await self.process.kill()
            return "crash", "it closed its streams but did not exit"
        except SandboxError as error:
            return "lost", str(error)
        if result.detail and result.status == "exited" and result.exit_code in (126, 127):
            raise SandboxError(
                f"the sandbox has no python3, which grading needs: {result.detail}", cause="task.image"
            )
        return _get_verdict(result)

    async def close(self) -> None:
        """Kill the process if it still runs."""
        await self._chunks.aclose()  # type: ignore[attr-defined]


def _get_verdict(result: ExecResult) -> tuple[Verdict | Literal["lost"], str]:
    match result.status:
        case "lost":
            return "lost", result.detail
        case "time_limit":
            return "time", result.detail
        case "memory_limit":
            return "memory", result.detail
        case "exited":
            return "crash", f"the interpreter exited with code {result.exit_code}"
        case "signaled":
            return "crash", f"the interpreter was killed by signal {result.signal}"
        case other:
            return "crash", f"{other}: {result.detail}"
