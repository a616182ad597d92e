"""Exchange lines with Rookery's grader programs inside a sandbox. Runs in the process that grades.

Guarantees:
- A line has at most `MAX_LINE` bytes, and standard error at most `MAX_PRINTED`. A program that writes more is
  killed.
- A line that cannot be decoded raises `MalformedLine`, whatever its bytes are.
- The end of the program is reported as a verdict on the submission, or as `lost` if its sandbox was lost.
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
"""Maximum number of bytes that tests and submission may print. Their output arrives on standard error."""
TAIL: Final = 4_000
END_SECONDS: Final = 10.0


class MalformedLine(Exception):  # noqa: N818  (caused by the program under test)
    """A line from a sandbox that does not follow the protocol."""


def encode_line(plain: object) -> bytes:
    """Encode data as one line of JSON. It is ASCII only, because strings may contain lone surrogates."""
    return json.dumps(plain, separators=(",", ":")).encode()


def decode_line(data: bytes) -> Any:
    """Decode the JSON of a line. Raise `MalformedLine` if it is not valid JSON or nested too deeply."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedLine(f"invalid line: {describe(error)}"[:300]) from None


class GraderChannel:
    """Sends lines to a process in a sandbox and reads lines from it."""

    def __init__(self, process: Process, sandbox: Sandbox) -> None:
        self.process = process
        self.sandbox = sandbox
        self._chunks: AsyncIterator[Any] = process.output()
        self._rest = b""
        self.tail = b""
        self.printed = 0

    async def send(self, kind: bytes, data: bytes) -> None:
        """Send one line. `kind` is its first byte and says what `data` contains."""
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
        """Wait for the end of the process; return the verdict that follows from it, and an explanation.

        Kill the process if it has written too much or does not end within `END_SECONDS`.
        """
        if self.printed > MAX_PRINTED:
            await self.process.kill()
            return "output", f"the program wrote more than {MAX_PRINTED} bytes"
        try:
            result = await self.process.wait(timeout=END_SECONDS)
        except TimeoutError:
            await self.process.kill()
            return "crash", f"the program closed its output streams but did not exit within {END_SECONDS:g} s"
        except SandboxError as error:
            return "lost", str(error)
        if result.detail and result.status == "exited" and result.exit_code in (126, 127):
            raise SandboxError(
                f"the sandbox has no python3, which grading needs: {result.detail}: use an image that contains it",
                cause="task.image",
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
