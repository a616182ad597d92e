"""Listeners attached to a shard serve one session each, inside and outside a sandbox and across shard restarts."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rookery.core import RookeryError, SandboxSpec
from rookery.gateway import listener_forwarder
from rookery.gateway.listener_forwarder import ForwardTarget, ListenerForwarder
from rookery.gateway.session_listeners import ListenerSender
from rookery.gateway.shards import Gateway
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from rookery.sandboxes.networked_sandbox import PORT
from tests.cli.sandbox_kit import local_sandboxes
from tests.gateway.shard_kit import (
    ADMIN,
    HI,
    TIMEOUT,
    kill_shard,
    run_gateway,
    session_id_for,
    wait_for_restart,
)
from tests.servers import Answer, ModelServer
from tests.waiting import wait_until

__all__ = ["local_sandboxes"]

MODEL = SandboxSpec(provider="local", network="model", memory=256 << 20, disk=16 << 20, wall=60.0)
AGENT = """
import json, sys, urllib.error, urllib.request
for path, key in json.loads(sys.argv[1]):
    body = json.dumps({"messages": [{"role": "user", "content": path}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:@" + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            print(answer.status, json.load(answer)["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        print(error.code, json.load(error)["error"]["code"])
    except urllib.error.URLError as error:
        print(type(error.reason).__name__)
""".replace("@", str(PORT))
AGENT_ACROSS_RESTART = """
import json, os, sys, time, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer any", "Content-Type": "application/json"}
    where = "http://127.0.0.1:@/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(where, body, headers), timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
print(ask("before"))
open("asked", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
print(ask("after"))
""".replace("@", str(PORT))


def bound_socket() -> socket.socket:
    """Return a socket as a sandbox provides it: bound, but not listening yet."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


@contextlib.asynccontextmanager
async def echo_model() -> AsyncIterator[ModelServer]:
    """Run an inference engine that repeats the last message."""
    async with ModelServer() as server:
        server.default = lambda request: Answer(f"to {request.body['messages'][-1]['content']}")
        yield server


async def post_chat(
    http: aiohttp.ClientSession, port: int, path: str = "/v1/chat/completions", **more: Any
) -> Any:
    """Post a chat request with an arbitrary key; return status and body."""
    headers = {"Authorization": "Bearer whatever"}
    async with http.post(
        f"http://127.0.0.1:{port}{path}", json={"messages": HI, **more}, headers=headers
    ) as response:
        return response.status, await response.json()


def http_client() -> aiohttp.ClientSession:
    """Open an HTTP client that connects anew for each request: a kept connection may lead to a dead shard."""
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT))


async def recorded_replies(gateway: Gateway, session: str) -> list[str]:
    return [turn["response"]["content"] for turn in (await gateway.trajectory(session))["turns"]]


# ---- without a sandbox


async def test_listener_serves_only_its_session_with_any_key() -> None:
    async with echo_model() as server, run_gateway(server.url, shards=2) as gateway, http_client() as http:
        own, other = session_id_for(0, 2), session_id_for(1, 2)
        for name in (own, other):
            await gateway.register({"id": name})
        listener = bound_socket()
        port = listener.getsockname()[1]
        await gateway.attach_listener(own, listener)
        for path in ("/v1/chat/completions", "/chat/completions", f"/v1/rollouts/{own}/chat/completions"):
            status, response = await post_chat(http, port, path)
            assert (status, response["choices"][0]["message"]["content"]) == (200, "to hi")
        paths = [f"/v1/rollouts/{other}/chat/completions", "/rollouts", f"/rollouts/{own}/cancel", "/pause"]
        for path in [*paths, "/resume", f"/rollouts/{other}/cancel"]:
            assert (await post_chat(http, port, path))[0] == 404
        for path in ("/metrics", "/state", "/rollouts", f"/rollouts/{own}/trajectory", "/openapi.json"):
            async with http.get(f"http://127.0.0.1:{port}{path}", headers=ADMIN) as response:
                assert response.status == 404, path
        async with http.get(f"http://127.0.0.1:{port}/v1/models") as response:
            assert response.status == 200
        assert await recorded_replies(gateway, own) == ["to hi"] * 3
        assert await recorded_replies(gateway, other) == []
        assert (await gateway.request("GET", f"/rollouts/{own}"))["status"] == "open"


@pytest.mark.long
async def test_restarted_shard_serves_its_listeners_again_and_waiting_clients() -> None:
    async with echo_model() as server, run_gateway(server.url, shards=2) as gateway, http_client() as http:
        names = [session_id_for(0, 2, stem) for stem in ("a", "b", "c")]
        ports = {}
        for name in names:
            await gateway.register({"id": name})
            listener = bound_socket()
            ports[name] = listener.getsockname()[1]
            await gateway.attach_listener(name, listener)
        for life in range(2):
            pid = kill_shard(gateway, 0)
            await wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))  # type: ignore[misc]
            for name in names:
                assert (await post_chat(http, ports[name]))[0] == 200
            assert gateway.restarts == life + 1
        for name in names:
            assert await recorded_replies(gateway, name) == ["to hi"] * 2


async def test_detached_listener_is_closed_and_can_be_attached_to_another_session() -> None:
    never = asyncio.Event()
    async with (
        ModelServer(Answer(hold=never)) as server,
        run_gateway(server.url) as gateway,
        http_client() as http,
    ):
        for name in ("a", "b"):
            await gateway.register({"id": name})
        listener = bound_socket()
        port = listener.getsockname()[1]
        again = listener.dup()
        await gateway.attach_listener("a", listener)
        call = asyncio.create_task(post_chat(http, port))
        await server.wait_for_requests(1)
        gateway.detach_listener("a")
        gateway.detach_listener("a")
        with pytest.raises(aiohttp.ClientError):
            await call
        await server.wait_for_disconnects(1)
        server.default = Answer("second")
        await gateway.attach_listener("b", again)
        status, response = await post_chat(http, port)
        assert (status, response["choices"][0]["message"]["content"]) == (200, "second")
        assert (await recorded_replies(gateway, "a"), await recorded_replies(gateway, "b")) == ([], ["second"])
        gateway.detach_listener("b")

        async def refused() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            # Reset: the listener was closed after the kernel accepted the connection.
            except (ConnectionRefusedError, ConnectionResetError):
                return True
            writer.close()
            return False

        await wait_until(refused)


async def test_listener_of_an_ended_session_returns_410() -> None:
    async with echo_model() as server, run_gateway(server.url) as gateway, http_client() as http:
        listener = bound_socket()
        port = listener.getsockname()[1]
        await gateway.register({"id": "a"})
        await gateway.attach_listener("a", listener)
        assert (await post_chat(http, port))[0] == 200
        await gateway.request("POST", "/rollouts/a/cancel")
        assert (await post_chat(http, port))[0] == 410
        await gateway.request("DELETE", "/rollouts/a")
        status, response = await post_chat(http, port)
        assert (status, response["error"]["code"]) == (410, "rollout_gone")


async def test_cancelled_attach_leaves_no_listener_served(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    attach = ListenerSender.attach

    async def note_begin(*arguments: Any, **options: Any) -> None:
        begun.set()
        await attach(*arguments, **options)

    monkeypatch.setattr(ListenerSender, "attach", note_begin)
    async with echo_model() as server, run_gateway(server.url) as gateway:
        await gateway.register({"id": "a"})
        for _ in range(20):
            listener = bound_socket()
            address = listener.getsockname()
            begun.clear()
            attaching = asyncio.create_task(gateway.attach_listener("a", listener))
            await begun.wait()
            attaching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await attaching

            async def refused(address: Any = address) -> bool:
                with socket.socket() as probe:
                    probe.setblocking(False)
                    try:
                        await asyncio.get_running_loop().sock_connect(probe, address)
                    except (ConnectionRefusedError, ConnectionResetError):
                        return True
                    return False

            # Its reply shows that the earlier messages were processed.
            await gateway.attach_listener("a", bound_socket())
            await wait_until(refused)


async def test_listener_that_cannot_be_attached_raises_an_error(tmp_path: Path) -> None:
    async with echo_model() as server, run_gateway(server.url) as gateway:
        await gateway.register({"id": "a"})
        with pytest.raises(RookeryError):
            await gateway.attach_listener("a", socket.socket(type=socket.SOCK_DGRAM))
    sender = ListenerSender(tmp_path, 0)
    listener = bound_socket()
    with pytest.raises(RookeryError):
        await sender.attach("a", listener, timeout=0.05)
    assert listener.fileno() == -1
    await sender.close()


SENDER_PROGRAM = """
import asyncio, socket, sys
from pathlib import Path
from rookery.gateway.session_listeners import ListenerSender

async def main():
    listener = socket.socket(fileno=int(sys.argv[2]))
    await ListenerSender(Path(sys.argv[1]), 0).attach("a", listener)
    print("given", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_listener_is_closed_when_its_sender_dies() -> None:
    async with echo_model() as server, run_gateway(server.url) as gateway, http_client() as http:
        await gateway.register({"id": "a"})
        with bound_socket() as listener:
            port = listener.getsockname()[1]
            fd = listener.fileno()
            sender = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", SENDER_PROGRAM, gateway.address.sockets, str(fd)),
                pass_fds=(fd,),
                stdout=asyncio.subprocess.PIPE,
            )
        assert sender.stdout is not None
        assert await sender.stdout.readline() == b"given\n"
        assert (await post_chat(http, port))[0] == 200
        sender.send_signal(signal.SIGKILL)
        await sender.wait()

        async def refused() -> bool:
            try:
                await post_chat(http, port)
            except aiohttp.ClientConnectionError:
                return True
            return False

        await wait_until(refused)


# ---- in a sandbox


@pytest.fixture
async def sandbox(local_sandboxes: None, tmp_path: Path) -> AsyncIterator[LocalSandbox]:
    folder = tmp_path / "sandboxes"
    folder.mkdir()
    provider = LocalProvider(ProviderHome(folder=folder, run=f"run-{os.getpid()}-{tmp_path.name}"))
    try:
        yield await provider.create(MODEL, attempt="a")
    finally:
        await provider.close()


async def run_agent(sandbox: LocalSandbox, *asked: tuple[str, str]) -> list[str]:
    import json

    result = await sandbox.exec(Command(argv=("python3", "-c", AGENT, json.dumps(asked))))
    assert result.stderr == b""
    return result.stdout.decode().splitlines()


async def test_program_in_a_sandbox_reaches_only_its_own_session(sandbox: LocalSandbox) -> None:
    async with echo_model() as server, run_gateway(server.url, shards=2) as gateway:
        own, other = session_id_for(0, 2), session_id_for(1, 2)
        registrations = {name: await gateway.register({"id": name}) for name in (own, other)}
        await gateway.attach_listener(own, sandbox.listener())
        assert await run_agent(
            sandbox,
            ("/v1/chat/completions", "any"),
            ("/chat/completions", ""),
            (f"/v1/rollouts/{own}/chat/completions", "any"),
            (f"/v1/rollouts/{other}/chat/completions", registrations[other]["secret"]),
            (f"/rollouts/{own}/cancel", gateway.key),
            ("/pause", gateway.key),
        ) == [
            "200 to /v1/chat/completions",
            "200 to /chat/completions",
            f"200 to /v1/rollouts/{own}/chat/completions",
            "404 not_found",
            "404 not_found",
            "404 not_found",
        ]
        assert len(await recorded_replies(gateway, own)) == 3
        assert await recorded_replies(gateway, other) == []
        gateway.detach_listener(own)
        sandbox.refuse_connections()
        assert await run_agent(sandbox, ("/v1/chat/completions", "any")) == ["ConnectionRefusedError"]


@pytest.mark.long
async def test_program_in_a_sandbox_continues_after_its_shard_is_killed(sandbox: LocalSandbox) -> None:
    async with echo_model() as server, run_gateway(server.url) as gateway:
        await gateway.register({"id": "a"})
        await gateway.attach_listener("a", sandbox.listener())
        program = asyncio.create_task(sandbox.exec(Command(argv=("python3", "-c", AGENT_ACROSS_RESTART))))
        await sandbox.exec(Command(argv=("sh", "-c", "until [ -e asked ]; do sleep 0.01; done")))
        pid = kill_shard(gateway, 0)
        await sandbox.exec(Command(argv=("touch", "go")))
        result = await program
        assert (result.stdout, result.stderr) == (b"to before\nto after\n", b"")
        await wait_for_restart(gateway, pid, 0, "a")
        assert await recorded_replies(gateway, "a") == ["to before", "to after"]


async def test_forwarded_connections_of_a_session_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_forwarder, "MAX_FORWARDED", 1)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(2))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        host, target_port = server.sockets[0].getsockname()
        forwarder = ListenerForwarder(ForwardTarget(host=host, port=target_port))
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        await forwarder.attach("s", listener)
        async with asyncio.timeout(TIMEOUT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hi")
            assert await reader.readexactly(2) == b"hi"
            refused, other = await asyncio.open_connection("127.0.0.1", port)
            assert await refused.read() == b""
        other.close()
        writer.close()
        await forwarder.close()


@pytest.mark.parametrize(
    ("framing", "body", "forwarded"),
    [
        (b"Content-Length: 2", b"hi", b"hi"),
        (b"Transfer-Encoding: chunked", b"2;x=y\r\nhi\r\n0\r\n\r\n", b"2\r\nhi\r\n0\r\n\r\n"),
    ],
)
async def test_forwarded_connection_carries_one_request_and_counts_its_final_answer(
    framing: bytes, body: bytes, forwarded: bytes
) -> None:
    received: asyncio.Future[tuple[bytes, bytes, bytes]] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, content = await reader.readuntil(b"\r\n\r\n"), await reader.readexactly(len(forwarded))
        for part in (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP", b"/1.1 500 Broken\r\n\r\n"):
            writer.write(part)
            await writer.drain()
        writer.write_eof()
        received.set_result((head, content, await reader.read()))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(TIMEOUT):
        host, target_port = server.sockets[0].getsockname()
        forwarder = ListenerForwarder(ForwardTarget(host=host, port=target_port, key="k", counts=True))
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        counts = await forwarder.attach("s", listener)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1 HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n" + framing + b"\r\n\r\n"
        writer.write(head + body + b"GET /admin HTTP/1.1\r\n\r\n")
        assert await reader.read() == b"HTTP/1.1 500 Broken\r\n\r\n"
        sent_head, content, more = await received
        writer.close()
        await forwarder.close()
    assert b"Upgrade" not in sent_head
    assert (content, more) == (forwarded, b"")
    assert (counts.calls, counts.succeeded, counts.failure) == (1, 0, "upstream.error")
