"""Servers that the benchmark `gateway` measures: the upstream itself, forwarding proxies, and our gateway.

Behaviour:
- every server runs in its own process and is killed at the end of its block, also if the benchmark is killed,
  because it runs under `benchmarks.stdin_lifetime`;
- peers run in an empty directory without our environment variables; a peer that is missing or does not start
  yields a note instead of a figure;
- if our gateway does not start, the benchmark fails with the gateway's own error message;
- sessions of our gateway are registered before a window and deleted after it, outside the measured time.
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
from benchmarks.gateway_load_generator import Target, request_head
from benchmarks.instant_model import MODEL, InstantModel
from benchmarks.peers import peer_command, peer_environment
from benchmarks.process_usage import process_tree

KEY = "ROOKERY_GATEWAY_KEY"
CHAT = "/v1/chat/completions"
START_SECONDS = 150.0
END_SECONDS = 10.0
_ADDRESS = re.compile(r"(?:(?P<name>.*) at )?(?P<origin>http://127\.0\.0\.1:(?P<port>\d+))")
_TAIL = 2_000


class ServerStartError(RuntimeError):
    """A server did not start."""


class ServerUnderTest(NamedTuple):
    """A server to measure. `target(n)` opens `n` sessions for the length of its block."""

    name: str
    target: Callable[[int], AbstractAsyncContextManager[Target]]


class RunningServer(NamedTuple):
    """Address and PID of a running server."""

    name: str
    origin: str
    port: int
    pid: int


@asynccontextmanager
async def run_server(command: Sequence[str], env: Mapping[str, str] | None = None) -> AsyncIterator[RunningServer]:
    """Run a server until the block ends. It is ready when it prints a line with `http://127.0.0.1:PORT`."""
    pipe = asyncio.subprocess.PIPE
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder, tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.stdin_lifetime",
            *command,
            cwd=CHECKOUT,
            env={**os.environ, **(env or {}), "TMPDIR": folder},
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            start_new_session=True,  # Ctrl-C goes to the benchmark only, which stops its servers itself
        )
        assert process.stdin is not None
        assert process.stdout is not None
        drain_task: asyncio.Task[None] | None = None
        try:
            running = await _wait_until_listening(process.stdout, process.pid)
            if running is None:
                errors.seek(0)
                stderr = errors.read().decode(errors="replace").strip()[-_TAIL:]
                raise ServerStartError(f"{' '.join(command[-8:])} did not start: {stderr or 'no error output'}")
            drain_task = asyncio.create_task(_drain(process.stdout))
            yield running
        finally:
            process.stdin.close()
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()
            except TimeoutError:
                pass  # killed below
            finally:
                for pid in process_tree([process.pid]) if process.returncode is None else ():
                    with suppress(ProcessLookupError):
                        os.kill(pid, 9)
                await process.wait()
                if drain_task is not None:
                    drain_task.cancel()
                    with suppress(asyncio.CancelledError):
                        await drain_task


async def _wait_until_listening(stdout: asyncio.StreamReader, pid: int) -> RunningServer | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(START_SECONDS):
            while line := (await stdout.readline()).decode(errors="replace"):
                if match := _ADDRESS.search(line):
                    return RunningServer(match["name"] or "", match["origin"], int(match["port"]), pid)
    return None


async def _drain(stdout: asyncio.StreamReader) -> None:
    """Discard the output of a server, so that a full pipe does not block it."""
    while await stdout.read(65536):
        pass


def _without_sessions(name: str, port: int, pids: tuple[int, ...]) -> ServerUnderTest:
    """Return a server that has no sessions."""
    target = Target(port, (request_head(CHAT),), pids)

    @asynccontextmanager
    async def same(_: int) -> AsyncIterator[Target]:
        yield target

    return ServerUnderTest(name, same)


def direct(upstream: InstantModel) -> ServerUnderTest:
    return _without_sessions("direct", int(upstream.origin.rsplit(":", 1)[1]), (upstream.pid,))


@asynccontextmanager
async def run_floor(upstream: InstantModel) -> AsyncIterator[ServerUnderTest]:
    """Run the floor: the minimal recording proxy of `benchmarks.gateway_floor`."""
    port = upstream.origin.rsplit(":", 1)[1]
    async with run_server([sys.executable, "-m", "benchmarks.gateway_floor", port]) as running:
        yield _without_sessions("floor", running.port, (running.pid,))


@asynccontextmanager
async def run_peer_server(name: str, script: str, *args: str) -> AsyncIterator[ServerUnderTest | str]:
    """Run a server of `peer_scripts/` in the environment of the peer, or yield the reason why it cannot run."""
    command = peer_command(name, script)
    if isinstance(command, str):
        yield command
        return
    with tempfile.TemporaryDirectory(prefix="rookery-peer-") as home:
        variables = [f"{key}={value}" for key, value in peer_environment(command[0], home).items()]
        serving = run_server(["env", "-i", "-C", home, *variables, *command, *args])
        try:
            running = await serving.__aenter__()
        except ServerStartError as error:
            yield str(error)
            return
        try:
            yield _without_sessions(running.name or name, running.port, (running.pid,))
        finally:
            await serving.__aexit__(*sys.exc_info())


def run_bare_proxy(upstream: InstantModel) -> AbstractAsyncContextManager[ServerUnderTest | str]:
    return run_peer_server("bare-proxy", "bare_proxy.py", f"{upstream.origin}{CHAT}")


def run_litellm(upstream: InstantModel) -> AbstractAsyncContextManager[ServerUnderTest | str]:
    return run_peer_server("litellm", "litellm_proxy.py", f"{upstream.origin}/v1", MODEL)


def gateway_command(upstream: InstantModel) -> list[str]:
    """Return the command that starts our gateway with one shard, as users start it."""
    command = [sys.executable, "-m", "rookery.cli", "gateway", "--upstream", f"{upstream.origin}/v1"]
    return [*command, "--kind", "vllm", "--host", "127.0.0.1", "--port", "0", "--record", "messages"]


@asynccontextmanager
async def run_gateway(command: Sequence[str]) -> AsyncIterator[ServerUnderTest]:
    """Run our gateway with a new key."""
    key = secrets.token_urlsafe(32)
    async with run_server(command, {KEY: key}) as running:

        @asynccontextmanager
        async def sessions(count: int) -> AsyncIterator[Target]:
            async with aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=60)
            ) as admin:
                ids: list[str] = []
                try:
                    heads = [await _register_session(admin, running.origin, ids) for _ in range(count)]
                    yield Target(running.port, tuple(heads), (running.pid,))
                finally:
                    for session_id in ids:
                        async with admin.delete(f"{running.origin}/rollouts/{session_id}") as response:
                            await response.read()

        yield ServerUnderTest("ours", sessions)


async def _register_session(admin: aiohttp.ClientSession, origin: str, ids: list[str]) -> bytes:
    registration = {"id": f"bench-{secrets.token_hex(8)}", "model": MODEL, "sampling": {}, "budgets": {}}
    async with admin.post(f"{origin}/rollouts", json=registration) as response:
        if response.status not in (200, 201):
            raise ServerStartError(
                f"our gateway did not register a session: {response.status} {await response.text()}"[:500]
            )
        session = await response.json()
    ids.append(session["id"])
    return request_head(f"{urlsplit(session['base_url']).path}/chat/completions", session["secret"])
