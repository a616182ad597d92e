"""Listeners that are handed to a shard: one session each, in a real box and without, over the shard's restarts."""

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
from rookery.gateway.session_listeners import ListenerSender
from rookery.gateway.shards import Gateway
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.provider import PORT, LocalProvider, LocalSandbox
from tests.cli.sandbox_kit import local_sandboxes
from tests.gateway.shard_kit import ADMIN, HI, SECONDS, eventually, gateway, kill, owned_by, reborn
from tests.servers import Answer, ModelServer

__all__ = ["local_sandboxes"]

MODEL = SandboxSpec(provider="local", network="model", memory=256 << 20, disk=16 << 20, wall=60.0)
AGENT = """
import json, sys, urllib.error, urllib.request
for path, key in json.loads(sys.argv[1]):
    body = json.dumps({"messages": [{"role": "user", "content": path}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:@" + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            print(answer.status, json.load(answer)["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        print(error.code, json.load(error)["error"]["code"])
    except urllib.error.URLError as error:
        print(type(error.reason).__name__)
""".replace("@", str(PORT))
GOES_ON = """
import json, os, sys, time, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer any", "Content-Type": "application/json"}
    where = "http://127.0.0.1:@/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(where, body, headers), timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
print(ask("before"))
open("asked", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
print(ask("after"))
""".replace("@", str(PORT))


def free() -> socket.socket:
    """A listener as a box has one: bound, and not listening yet."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[ModelServer]:
    """A model that says what it was told."""
    async with ModelServer() as server:
        server.default = lambda request: Answer(f"to {request.body['messages'][-1]['content']}")
        yield server


async def ask(http: aiohttp.ClientSession, port: int, path: str = "/v1/chat/completions", **more: Any) -> Any:
    """Status and body, with a key that nobody gave out."""
    headers = {"Authorization": "Bearer whatever"}
    async with http.post(
        f"http://127.0.0.1:{port}{path}", json={"messages": HI, **more}, headers=headers
    ) as answer:
        return answer.status, await answer.json()


def session_of() -> aiohttp.ClientSession:
    """A connection for each request: a kept one may be to a shard that has just died, and not know it yet."""
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=SECONDS))


async def recorded(served: Gateway, session: str) -> list[str]:
    return [turn["response"]["content"] for turn in (await served.trajectory(session))["turns"]]


# ------------------------------------------------------------------------------------------------- without a box


async def test_a_listener_serves_its_one_session_whatever_the_key_and_nothing_else() -> None:
    async with echoing() as server, gateway(server.url, shards=2) as served, session_of() as http:
        mine, theirs = owned_by(0, 2), owned_by(1, 2)
        for name in (mine, theirs):
            await served.register({"id": name})
        listener = free()
        port = listener.getsockname()[1]
        await served.attach_listener(mine, listener)
        for path in ("/v1/chat/completions", "/chat/completions", f"/v1/rollouts/{mine}/chat/completions"):
            status, answer = await ask(http, port, path)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "to hi")
        paths = [f"/v1/rollouts/{theirs}/chat/completions", "/rollouts", f"/rollouts/{mine}/cancel", "/pause"]
        for path in [*paths, "/resume", f"/rollouts/{theirs}/cancel"]:
            assert (await ask(http, port, path))[0] == 404
        for path in ("/metrics", "/state", "/rollouts", f"/rollouts/{mine}/trajectory", "/openapi.json"):
            async with http.get(f"http://127.0.0.1:{port}{path}", headers=ADMIN) as answer:
                assert answer.status == 404, path
        async with http.get(f"http://127.0.0.1:{port}/v1/models") as answer:
            assert answer.status == 200
        assert await recorded(served, mine) == ["to hi"] * 3
        assert await recorded(served, theirs) == []
        assert (await served.request("GET", f"/rollouts/{mine}"))["status"] == "open"


async def test_a_restarted_shard_serves_its_listeners_again_and_who_knocks_meanwhile_waits() -> None:
    async with echoing() as server, gateway(server.url, shards=2) as served, session_of() as http:
        names = [owned_by(0, 2, stem) for stem in ("a", "b", "c")]
        ports = {}
        for name in names:
            await served.register({"id": name})
            listener = free()
            ports[name] = listener.getsockname()[1]
            await served.attach_listener(name, listener)
        for life in range(2):
            pid = kill(served, 0)
            await eventually(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))  # type: ignore[misc]
            for name in names:
                assert (await ask(http, ports[name]))[0] == 200
            assert served.restarts == life + 1
        for name in names:
            assert await recorded(served, name) == ["to hi"] * 2


async def test_a_listener_that_is_taken_back_is_served_no_more_and_can_be_another_sessions() -> None:
    never = asyncio.Event()
    async with ModelServer(Answer(hold=never)) as server, gateway(server.url) as served, session_of() as http:
        for name in ("a", "b"):
            await served.register({"id": name})
        listener = free()
        port = listener.getsockname()[1]
        again = listener.dup()
        await served.attach_listener("a", listener)
        call = asyncio.create_task(ask(http, port))
        await server.wait_for_requests(1)
        served.detach_listener("a")
        served.detach_listener("a")
        with pytest.raises(aiohttp.ClientError):
            await call
        await server.wait_for_disconnects(1)
        server.default = Answer("second")
        await served.attach_listener("b", again)
        status, answer = await ask(http, port)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "second")
        assert (await recorded(served, "a"), await recorded(served, "b")) == ([], ["second"])
        served.detach_listener("b")

        async def refused() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            # Reset: the listener was closed between the kernel's answer and the accepting.
            except (ConnectionRefusedError, ConnectionResetError):
                return True
            writer.close()
            return False

        await eventually(refused)


async def test_a_listener_of_a_session_that_is_over_says_so() -> None:
    async with echoing() as server, gateway(server.url) as served, session_of() as http:
        listener = free()
        port = listener.getsockname()[1]
        await served.register({"id": "a"})
        await served.attach_listener("a", listener)
        assert (await ask(http, port))[0] == 200
        await served.request("POST", "/rollouts/a/cancel")
        assert (await ask(http, port))[0] == 410
        await served.request("DELETE", "/rollouts/a")
        status, answer = await ask(http, port)
        assert (status, answer["error"]["code"]) == (410, "rollout_gone")


async def test_a_hand_over_right_before_a_taking_back_leaves_nothing_served() -> None:
    async with echoing() as server, gateway(server.url) as served:
        await served.register({"id": "a"})
        for _ in range(20):
            listener = free()
            address = listener.getsockname()
            giving = asyncio.create_task(served.attach_listener("a", listener))
            while not served._open_client._senders or "a" not in served._open_client._senders[0]._listeners:
                await asyncio.sleep(0)
            giving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await giving

            async def refused(address: Any = address) -> bool:
                with socket.socket() as probe:
                    probe.setblocking(False)
                    try:
                        await asyncio.get_running_loop().sock_connect(probe, address)
                    except (ConnectionRefusedError, ConnectionResetError):
                        return True
                    return False

            await served.attach_listener("a", free())  # the words before this one have been heard
            await eventually(refused)


async def test_what_cannot_be_served_is_an_error_in_words(tmp_path: Path) -> None:
    async with echoing() as server, gateway(server.url) as served:
        await served.register({"id": "a"})
        with pytest.raises(RookeryError, match="the listener cannot be served"):
            await served.attach_listener("a", socket.socket(type=socket.SOCK_DGRAM))
    nobody = ListenerSender(tmp_path, 0)
    listener = free()
    with pytest.raises(RookeryError, match="no shard took the listener of a within"):
        await nobody.attach("a", listener, timeout=0.05)
    assert listener.fileno() == -1
    await nobody.close()


GIVER = """
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


async def test_a_listener_whose_giver_is_gone_is_served_no_more() -> None:
    async with echoing() as server, gateway(server.url) as served, session_of() as http:
        await served.register({"id": "a"})
        assert served._sockets is not None
        with free() as listener:
            port = listener.getsockname()[1]
            fd = listener.fileno()
            giver = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", GIVER, str(served._sockets), str(fd)),
                pass_fds=(fd,),
                stdout=asyncio.subprocess.PIPE,
            )
        assert giver.stdout is not None
        assert await giver.stdout.readline() == b"given\n"
        assert (await ask(http, port))[0] == 200
        giver.send_signal(signal.SIGKILL)
        await giver.wait()

        async def refused() -> bool:
            try:
                await ask(http, port)
            except aiohttp.ClientConnectionError:
                return True
            return False

        await eventually(refused)


# ---------------------------------------------------------------------------------------------------- in a box


@pytest.fixture
async def box(local_sandboxes: None, tmp_path: Path) -> AsyncIterator[LocalSandbox]:
    folder = tmp_path / "sandboxes"
    folder.mkdir()
    provider = LocalProvider(ProviderHome(folder=folder, run=f"run-{os.getpid()}-{tmp_path.name}"))
    try:
        yield await provider.create(MODEL, attempt="a")
    finally:
        await provider.close()


async def agent(box: LocalSandbox, *asked: tuple[str, str]) -> list[str]:
    import json

    result = await box.exec(Command(argv=("python3", "-c", AGENT, json.dumps(asked))))
    assert result.stderr == b""
    return result.stdout.decode().splitlines()


async def test_a_program_in_a_box_calls_its_own_session_and_reaches_nothing_else(box: LocalSandbox) -> None:
    async with echoing() as server, gateway(server.url, shards=2) as served:
        mine, theirs = owned_by(0, 2), owned_by(1, 2)
        seats = {name: await served.register({"id": name}) for name in (mine, theirs)}
        await served.attach_listener(mine, box.listener())
        assert await agent(
            box,
            ("/v1/chat/completions", "any"),
            ("/chat/completions", ""),
            (f"/v1/rollouts/{mine}/chat/completions", "any"),
            (f"/v1/rollouts/{theirs}/chat/completions", seats[theirs]["secret"]),
            (f"/rollouts/{mine}/cancel", served.key),
            ("/pause", served.key),
        ) == [
            "200 to /v1/chat/completions",
            "200 to /chat/completions",
            f"200 to /v1/rollouts/{mine}/chat/completions",
            "404 not_found",
            "404 not_found",
            "404 not_found",
        ]
        assert len(await recorded(served, mine)) == 3
        assert await recorded(served, theirs) == []
        served.detach_listener(mine)
        box.refuse_connections()
        assert await agent(box, ("/v1/chat/completions", "any")) == ["ConnectionRefusedError"]


async def test_a_program_in_a_box_goes_on_after_its_shard_was_killed(box: LocalSandbox) -> None:
    async with echoing() as server, gateway(server.url) as served:
        await served.register({"id": "a"})
        await served.attach_listener("a", box.listener())
        program = asyncio.create_task(box.exec(Command(argv=("python3", "-c", GOES_ON))))
        await box.exec(Command(argv=("sh", "-c", "until [ -e asked ]; do sleep 0.01; done")))
        pid = kill(served, 0)
        await box.exec(Command(argv=("touch", "go")))
        result = await program
        assert (result.stdout, result.stderr) == (b"to before\nto after\n", b"")
        await reborn(served, pid, 0, "a")
        assert await recorded(served, "a") == ["to before", "to after"]
