"""Find out whether a provider works on this machine: create two sandboxes, run a command, and close everything.

Guarantees:
- success means that sandboxes were really created and a command really ran in one of them;
- a probe leaves no process or file behind.

A probe of local sandboxes takes a fraction of a second.
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
from rookery.sandboxes.protocol import Command, Provider, ProviderHome
from rookery.sandboxes.reaper import scratch_home

SECONDS = 20.0
"""Time limit of a probe. It is generous, because a loaded machine is slow."""


class ProviderProof(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a probe: how many milliseconds each step took, or the error that made it fail."""

    error: str = ""
    create_ms: float = 0.0
    """Time to create the first sandbox, including the start of the provider."""
    second_create_ms: float = 0.0
    """Time to create a second sandbox."""
    exec_ms: float = 0.0
    close_ms: float = 0.0
    about: dict[str, Any] = {}
    """Facts about this machine, found by the keeper (the daemon that creates local sandboxes); else empty."""


def probe(open_: Callable[[ProviderHome], Provider]) -> ProviderProof:
    """Probe a provider, and block until the result is known. Runs on a new event loop in another thread.

    `open_` opens the provider with a temporary home.
    """
    found: list[ProviderProof] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(_probe(open_))), name="probe")
    thread.start()
    thread.join()
    return found[0] if found else ProviderProof(error="the probe failed with an unexpected exception")


async def _probe(open_: Callable[[ProviderHome], Provider]) -> ProviderProof:
    about: dict[str, Any] = {}
    times = [time.perf_counter()]
    try:
        with scratch_home("probe") as home:
            provider = open_(home)
            try:
                async with asyncio.timeout(SECONDS):
                    spec = SandboxSpec(provider=provider.name, untrusted_ok=True)
                    sandbox = await provider.create(spec, attempt="probe", timeout=SECONDS)
                    times.append(time.perf_counter())
                    get_keeper = getattr(provider, "keeper", None)
                    about = await (await get_keeper()).status() if get_keeper is not None else {}
                    await provider.create(spec, attempt="probe", timeout=SECONDS)
                    times.append(time.perf_counter())
                    result = await sandbox.exec(Command(argv=("true",), wall=SECONDS))
                    times.append(time.perf_counter())
                    if not result.ok:
                        output = result.detail or result.stderr.decode("utf-8", "replace")
                        raise SandboxError(f"a command ended with {result.status} {result.exit_code}: {output}")
            finally:
                await provider.close()
            times.append(time.perf_counter())
    except TimeoutError:
        return ProviderProof(error=f"the probe took longer than {SECONDS:g} s", about=about)
    except (RookeryError, OSError) as error:
        return ProviderProof(error=_summarize(error), about=about)
    create, again, run, close = (1e3 * (after - before) for before, after in pairwise(times))
    return ProviderProof(create_ms=create, second_create_ms=again, exec_ms=run, close_ms=close, about=about)


def _summarize(error: Exception) -> str:
    """Describe an error in one line. If its message contains a traceback of the keeper, return the last line."""
    text = str(error) if isinstance(error, RookeryError) else describe(error)
    first, *rest = text.strip().splitlines() or [""]
    return f"{first.partition('Traceback')[0].rstrip(' :')}: {rest[-1].strip()}"[:500] if rest else first[:500]


@functools.cache
def probe_provider(name: str) -> ProviderProof:
    """Probe an installed provider. The result is cached until this process ends."""
    from rookery.sandboxes import open_provider

    return probe(lambda home: open_provider(name, home))
