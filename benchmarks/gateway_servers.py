"""Who is asked in the `gateway` bench: the upstream itself, forwarders before it, and our gateway.

Promises:
- every one serves in a process of its own and is gone after its block on every path: also when we are killed,
  since each hangs on a leash that only we hold;
- peers serve in an empty folder and see nothing of our environment; one that is missing or does not start gives
  a note, never a figure;
- our own gateway that does not start fails the bench, in its own words;
- our gateway's sessions are registered before a window and deleted after it: neither is in a figure.
"""

import asyncio
import os
import re
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from benchmarks import CHECKOUT
from benchmarks.gateway_load import Target, head
from benchmarks.instant_model import MODEL, Instant
from benchmarks.peers import ROOT, peers_folder
from benchmarks.process_usage import family

KEY = "ROOKERY_GATEWAY_KEY"
CHAT = "/v1/chat/completions"
START_SECONDS = 150.0
END_SECONDS = 10.0
_WHERE = re.compile(r"(?:(?P<name>.*) at )?(?P<origin>http://127\.0\.0\.1:(?P<port>\d+))")
_TAIL = 2_000


class NotServing(RuntimeError):  # noqa: N818  (says what happened)
    """A server that did not start."""


class Contender(NamedTuple):
    """One that is asked. `target(n)` gives it with `n` sessions, for as long as its block lasts."""

    name: str
    target: Callable[[int], AbstractAsyncContextManager[Target]]


class Served(NamedTuple):
    """A server that serves."""

    name: str
    origin: str
    port: int
    pid: int


@asynccontextmanager
async def leashed(words: Sequence[str], env: Mapping[str, str] | None = None) -> AsyncIterator[Served]:
    """Runs a server; its first line with `http://127.0.0.1:PORT` says that it serves."""
    pipe = asyncio.subprocess.PIPE
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder, tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.stdin_lifetime",
            *words,
            cwd=CHECKOUT,
            env={**os.environ, **(env or {}), "TMPDIR": folder},
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for the bench, which ends its servers in order
        )
        assert process.stdin is not None
        assert process.stdout is not None
        draining: asyncio.Task[None] | None = None
        try:
            served = await _serving(process.stdout, process.pid)
            if served is None:
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip()[-_TAIL:]
                raise NotServing(f"{' '.join(words[-8:])} did not serve: {said or 'it said nothing'}")
            draining = asyncio.create_task(_drain(process.stdout))
            yield served
        finally:
            process.stdin.close()
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()
            except TimeoutError:
                pass  # killed below
            finally:
                for pid in family([process.pid]) if process.returncode is None else ():
                    with suppress(ProcessLookupError):
                        os.kill(pid, 9)
                await process.wait()
                if draining is not None:
                    draining.cancel()
                    with suppress(asyncio.CancelledError):
                        await draining


async def _serving(stdout: asyncio.StreamReader, pid: int) -> Served | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(START_SECONDS):
            while line := (await stdout.readline()).decode(errors="replace"):
                if found := _WHERE.search(line):
                    return Served(found["name"] or "", found["origin"], int(found["port"]), pid)
    return None


async def _drain(stdout: asyncio.StreamReader) -> None:
    """A server that may write goes on; what it writes is nobody's."""
    while await stdout.read(65536):
        pass


def _plain(name: str, port: int, pids: tuple[int, ...]) -> Contender:
    """One without sessions."""
    target = Target(port, (head(CHAT),), pids)

    @asynccontextmanager
    async def same(_: int) -> AsyncIterator[Target]:
        yield target

    return Contender(name, same)


def direct(upstream: Instant) -> Contender:
    return _plain("direct", int(upstream.origin.rsplit(":", 1)[1]), (upstream.pid,))


@asynccontextmanager
async def floor(upstream: Instant) -> AsyncIterator[Contender]:
    """The least that forwarding costs."""
    port = upstream.origin.rsplit(":", 1)[1]
    async with leashed([sys.executable, "-m", "benchmarks.gateway_floor", port]) as served:
        yield _plain("floor", served.port, (served.pid,))


@asynccontextmanager
async def peer(name: str, script: str, *args: str) -> AsyncIterator[Contender | str]:
    """Run a server of `peer_scripts/` in the peer's environment, or yield the reason why it cannot run."""
    python = peers_folder() / f"venv-{name}" / "bin" / "python"
    program = ROOT / "benchmarks" / "peer_scripts" / script
    if not python.exists():
        yield f"the peer {name} is missing: `make peers` in a checkout makes it"
        return
    if not program.exists():
        yield f"the peer {name} needs a checkout: {script} is not part of an installation"
        return
    with tempfile.TemporaryDirectory(prefix="rookery-peer-") as home:
        env = {"HOME": home, "PATH": f"{python.parent}:{os.defpath}", "TMPDIR": home, "LC_ALL": "C.UTF-8"}
        clear = ["env", "-i", "-C", home, *(f"{key}={value}" for key, value in env.items())]
        serving = leashed([*clear, str(python), str(program), *args])
        try:
            served = await serving.__aenter__()
        except NotServing as error:
            yield str(error)
            return
        try:
            yield _plain(served.name or name, served.port, (served.pid,))
        finally:
            await serving.__aexit__(*sys.exc_info())


def bare(upstream: Instant) -> AbstractAsyncContextManager[Contender | str]:
    return peer("bare-proxy", "bare_proxy.py", f"{upstream.origin}{CHAT}")


def litellm(upstream: Instant) -> AbstractAsyncContextManager[Contender | str]:
    return peer("litellm", "litellm_proxy.py", f"{upstream.origin}/v1", MODEL)


def gateway_words(upstream: Instant) -> list[str]:
    """Our gateway, one shard, as people start it."""
    words = [sys.executable, "-m", "rookery.cli", "gateway", "--upstream", f"{upstream.origin}/v1"]
    return [*words, "--kind", "vllm", "--host", "127.0.0.1", "--port", "0", "--record", "messages"]


@asynccontextmanager
async def ours(words: Sequence[str]) -> AsyncIterator[Contender]:
    """Our gateway, with a key of its own."""
    key = secrets.token_urlsafe(32)
    async with leashed(words, {KEY: key}) as served:

        @asynccontextmanager
        async def sessions(count: int) -> AsyncIterator[Target]:
            async with aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=60)
            ) as admin:
                ids: list[str] = []
                try:
                    heads = [await _registered(admin, served.origin, ids) for _ in range(count)]
                    yield Target(served.port, tuple(heads), (served.pid,))
                finally:
                    for one in ids:
                        async with admin.delete(f"{served.origin}/rollouts/{one}") as answer:
                            await answer.read()

        yield Contender("ours", sessions)


async def _registered(admin: aiohttp.ClientSession, origin: str, ids: list[str]) -> bytes:
    wanted = {"id": f"bench-{secrets.token_hex(8)}", "model": MODEL, "sampling": {}, "budgets": {}}
    async with admin.post(f"{origin}/rollouts", json=wanted) as answer:
        if answer.status not in (200, 201):
            raise NotServing(
                f"our gateway did not register a session: {answer.status} {await answer.text()}"[:500]
            )
        made = await answer.json()
    ids.append(made["id"])
    return head(f"{urlsplit(made['base_url']).path}/chat/completions", made["secret"])
