"""Whether boxes can be made here: one is made, used and ended.

Promises:
- what it says is what happened: a box that was really made, a command that really ran in it;
- it takes a fraction of a second, once in a process, and leaves nothing;
- where no box can be made it says why, and which setting or command would change that.
"""

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec

from rookery.core import RookeryError, SandboxError, SandboxSpec
from rookery.core.errors import describe
from rookery.sandboxes.local import machine
from rookery.sandboxes.protocol import Command, Home, Provider
from rookery.sandboxes.reaper import scratch

SECONDS = 20.0
"""A machine under load is slow, not unable."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """How it went, in milliseconds, or the error that it ended with."""

    error: str = ""
    create_ms: float = 0.0
    """From nothing: with the start of all that the provider needs."""
    again_ms: float = 0.0
    """A further one."""
    exec_ms: float = 0.0
    close_ms: float = 0.0
    about: dict[str, Any] = {}
    """What the provider's own process found on this machine, where it has one."""


def prove(opened: Callable[[Home], Provider]) -> Proof:
    """Makes two sandboxes, runs a command, closes all of it. On a thread and loop of its own."""
    found: list[Proof] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(_proof(opened))), name="probe")
    thread.start()
    thread.join()
    return found[0] if found else Proof(error="it broke down")


async def _proof(opened: Callable[[Home], Provider]) -> Proof:
    about: dict[str, Any] = {}
    times = [time.perf_counter()]
    try:
        with scratch("probe") as home:
            provider = opened(home)
            try:
                async with asyncio.timeout(SECONDS):
                    spec = SandboxSpec(provider=provider.name, untrusted_ok=True)
                    box = await provider.create(spec, attempt="probe", timeout=SECONDS)
                    times.append(time.perf_counter())
                    line = getattr(provider, "line", None)
                    about = await (await line()).about() if line is not None else {}
                    await provider.create(spec, attempt="probe", timeout=SECONDS)
                    times.append(time.perf_counter())
                    result = await box.exec(Command(argv=("true",), wall=SECONDS))
                    times.append(time.perf_counter())
                    if not result.ok:
                        said = result.detail or result.stderr.decode("utf-8", "replace")
                        raise SandboxError(f"a command ended with {result.status} {result.exit_code}: {said}")
            finally:
                await provider.close()
            times.append(time.perf_counter())
    except TimeoutError:
        return Proof(error=f"it took longer than {SECONDS:g} s", about=about)
    except (RookeryError, OSError) as error:
        return Proof(error=_short(error), about=about)
    create, again, run, close = (1e3 * (after - before) for before, after in pairwise(times))
    return Proof(create_ms=create, again_ms=again, exec_ms=run, close_ms=close, about=about)


def _short(error: Exception) -> str:
    """One line: of a traceback that the keeper left, the last."""
    text = str(error) if isinstance(error, RookeryError) else describe(error)
    first, *rest = text.strip().splitlines() or [""]
    return f"{first.partition('Traceback')[0].rstrip(' :')}: {rest[-1].strip()}"[:500] if rest else first[:500]


@functools.cache
def local_proof() -> Proof:
    """Of the local provider, asked once in a process."""
    from rookery.sandboxes.local.provider import LocalProvider

    return prove(LocalProvider)


@functools.cache
def problem() -> str:
    """Why no box can be made here, and what would help; empty where one can."""
    proof = local_proof()
    if not proof.error:
        return ""
    missing = (check for check in machine.checks(proof) if check.status == "missing")
    fixes = [f"{check.found[:1].upper()}{check.found[1:]}; to change that: {check.fix}." for check in missing]
    return " ".join([f"No box can be made on this machine: {proof.error}.", *fixes])
