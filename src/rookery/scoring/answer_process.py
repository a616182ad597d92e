"""Checks of answers that can take arbitrarily long, in a helper process: regular expressions and mathematics.

A regular expression can backtrack for hours, and so can a computer algebra system. The helper process kills itself
when a check exceeds its time, so that neither the event loop nor a thread of the runner hangs. A process has a few
helper processes, which it starts when they are needed. They end when their standard input is closed.

A check that exceeds its CPU time or memory twice counts as a wrong answer. If a helper process dies for another
reason, or makes no progress on an overloaded machine, the rollout has no reward (`scoring.helper`, infra).

The module runs in both: `check_answer` in the process that scores, `main` in the helper process.
"""

import asyncio
import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Final, Literal, TypeAlias

from rookery.core import ScoringError, TaskError, UsageError

Check: TypeAlias = Literal["regex", "math"]
SECONDS: Final = 10
"""Limit of the CPU time of one check. Time in which other processes use the CPU must not make an answer wrong."""
WALL_SECONDS: Final = 120
"""Time limit of one check. If it is exceeded before that of the CPU time, the machine is overloaded."""
HELPERS: Final = min(8, max(2, os.cpu_count() or 1))
"""Maximum number of helper processes of one process."""
OUT_OF_MEMORY: Final = 77
"""Exit code of a helper process whose check needed too much memory."""
MAX_TEXT: Final = 100_000
"""Maximum number of characters of an answer that are checked: its last ones."""
MEMORY: Final = 4 << 30
"""Maximum size of the helper's address space."""


class _Helper:
    """A helper process and its pipes. Used by one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Run one check; return its reply, or None if the check exceeded its CPU time or memory.

        Raise `ScoringError` with the fault infra if the helper cannot be started or ends for another reason.
        """
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            reply: dict[str, Any] = json.loads(line)
            return reply
        code = process.wait()
        self.close()
        if code in (-signal.SIGPROF, OUT_OF_MEMORY):
            return None
        raise ScoringError(f"the helper process ended with the exit code {code}", cause="scoring.helper")

    def _start(self) -> "subprocess.Popen[bytes]":
        """Return the running helper process; start one if there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        command = [sys.executable, "-m", __name__]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise ScoringError(f"the helper process cannot be started: {error}", cause="scoring.helper") from error
        return self._process

    def close(self) -> None:
        """Kill the process if it runs, and close its pipes."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # of a request that the process did not read
                    stream.close()


class HelperPool:
    """Threads with a helper process each, so that one slow check does not delay all others."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(HELPERS, thread_name_prefix="rookery-answers")
        self._own = threading.local()
        self._helpers: list[_Helper] = []

    async def run(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Run one check in a helper process, as `_Helper.run` does."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, request)

    def _run(self, request: dict[str, Any]) -> dict[str, Any] | None:
        helper: _Helper | None = getattr(self._own, "helper", None)
        if helper is None:
            helper = self._own.helper = _Helper()
            self._helpers.append(helper)
        return helper.run(request)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for helper in self._helpers:
            helper.close()


helper_pool = HelperPool()
atexit.register(helper_pool.close)


async def check_answer(check: Check, pattern: str, answer: str) -> str | None:
    """Check an answer in the helper process.

    For `regex`, return what the first group of `pattern` matches in the answer, or the whole match if the pattern
    has no group. For `math`, return `pattern`, the expected answer, if the answer is equivalent to it. Return None
    if the answer does not match, or if the check exceeded its CPU time or memory twice. Raise `UsageError` for an
    invalid pattern, `TaskError` for an expected answer that is not mathematics.
    """
    request = {"check": check, "pattern": pattern, "answer": answer[-MAX_TEXT:]}
    for _ in range(2):
        reply = await helper_pool.run(request)
        if reply is None:
            continue
        match reply:
            case {"error": "pattern", "detail": detail}:
                raise UsageError(f"the regular expression {pattern!r:.100} is invalid: {detail}")
            case {"error": "missing"}:
                raise UsageError("the scorer `math` needs math-verify: pip install 'rookery-rl[math]'")
            case {"error": "expected"}:
                raise TaskError(f"the expected answer {pattern!r:.100} cannot be parsed as mathematics")
            case {"error": _, "detail": detail}:
                raise ScoringError(f"the check {check!r} failed: {detail}", cause="bug.scoring")
        found: str | None = reply["found"]
        return found
    return None


# ---- the helper process


def main(requests: IO[str], replies: IO[str]) -> None:
    """Answer requests, one JSON object per line, until the input ends."""
    import logging
    import resource

    logging.disable()  # math-verify warns at each call that its own time limits are off
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in requests:
        request = json.loads(line)
        if request["check"] == "math":
            _import_math()  # takes a second at the first check, which does not count
        # The default actions of both signals, SIGPROF and SIGALRM, end the process.
        signal.setitimer(signal.ITIMER_PROF, request.get("seconds", SECONDS))
        signal.alarm(WALL_SECONDS)
        reply = _run_check(request)
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _import_math() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError:
        return  # reported by the check


def _run_check(request: dict[str, Any]) -> dict[str, Any]:
    try:
        found = {"regex": _match_regex, "math": _match_math}[request["check"]](
            request["pattern"], request["answer"]
        )
    except _CheckError as error:
        return {"error": error.args[0], "detail": error.args[1]}
    except MemoryError:
        raise SystemExit(OUT_OF_MEMORY) from None
    except Exception as error:  # noqa: BLE001  (reported to the parent process)
        return {"error": "bug", "detail": f"{type(error).__name__}: {error}"[:500]}
    return {"found": found}


class _CheckError(Exception):
    """A check that cannot be made. The arguments are a code and a detail."""


def _match_regex(pattern: str, answer: str) -> str | None:
    import re

    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise _CheckError("pattern", str(error)) from None
    found = compiled.search(answer)
    if found is None:
        return None
    return found[1] if compiled.groups and found[1] is not None else found[0]


def _match_math(expected: str, answer: str) -> str | None:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise _CheckError("missing", "") from None
    # Its own time limits use SIGALRM, as this process does.
    gold = parse(
        f"${expected}$" if "\\boxed" not in expected and "$" not in expected else expected, parsing_timeout=None
    )
    if not gold:
        raise _CheckError("expected", "")
    return expected if verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None) else None


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
