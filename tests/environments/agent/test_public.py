"""Agents that reach the gateway at its public address: this machine's, a proxy's, a tunnel's."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rookery.core import RookeryError, SandboxSpec, UsageError, label
from rookery.engine import EngineConfig, run_services
from rookery.engine.preflight import find_gateway_problems
from rookery.environments.agent import AgentEnvironment
from rookery.sandbox_runtime.processes import list_children
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent import agent_envs
from tests.environments.agent.kit import all_of, left_behind, program, scripted, scripted_engine, trainable
from tests.gateway.shard_kit import eventually
from tests.gateway.test_tunnels import SshServer, needs_ssh, server, short_reconnect_wait, ssh_pids
from tests.servers import Answer, ModelServer, Request

__all__ = ["local_sandboxes", "server", "short_reconnect_wait"]
in_boxes = pytest.mark.usefixtures("local_sandboxes")
ROW = {"prompt": "6 * 7?", "answer": 42}
ALL = SandboxSpec(provider="local", network="all")
TURNS = """
for turn in range(2):
    for again in range(600):
        try:
            messages.append(ask(messages))
            break
        except OSError:
            time.sleep(0.05)
    messages.append({"role": "user", "content": "go on"})
print(os.environ["OPENAI_BASE_URL"])
print(messages[-2]["content"])
"""
"""Two turns; a call that gets no answer is made again, as clients do it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def given_url(rollout: Any) -> str:
    return str(rollout.info["agents"][0]["stdout"].splitlines()[0])


ATTACK = """
ask(messages)
own = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
top, _, name = own.rpartition("/")
gateway = top.removesuffix("/v1/rollouts")
other = ("1" if name[0] == "0" else "0") + name[1:]
body = json.dumps({"model": "policy", "messages": messages}).encode()
said = {}
def tried(url, key, method="POST"):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url, body if method == "POST" else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
for key in (os.environ["OPENAI_API_KEY"], "rookery", ""):
    what = "own" if key == os.environ["OPENAI_API_KEY"] else key
    said["other " + what] = tried(f"{top}/{other}/v1/chat/completions", key)
    said["listing " + what] = tried(gateway + "/rollouts", key, "GET")
    said["record " + what] = tried(f"{gateway}/rollouts/{other}/trajectory", key, "GET")
    said["pause " + what] = tried(gateway + "/pause", key)
said["mine with nothing"] = tried(own + "/v1/chat/completions", "")
print(json.dumps(said))
print(42)
"""


@in_boxes
async def test_with_the_machines_network_a_secret_opens_one_session_alone(tmp_path: Path) -> None:
    """While the other's session is there: it is refused for its key, and not because there is none."""
    env = AgentEnvironment("program", script=program(tmp_path, ATTACK))
    both = asyncio.Event()
    play = scripted("ok")

    def held(request: Request) -> Answer:
        answer = play(request)
        answer.hold = both
        return answer

    async with ModelServer(held) as model, scripted_engine(model, env, tmp_path, sandbox=ALL) as made:
        taking = asyncio.create_task(all_of(made, [ROW, ROW]))
        await asyncio.wait_for(model.wait_for_requests(2), 60)
        both.set()
        found = await taking
        asked = len(model.requests)
    for one in found:
        assert (label(one.outcome), one.reward, one.usage.turns) == ("completed", 1.0, 1), (one.outcome, one.info)
        said = json.loads(one.info["agents"][0]["stdout"].splitlines()[0])
        assert set(said.values()) <= {401, 404}, said
        assert said["mine with nothing"] == 401
    # One of them may have ended before the other tried: the first to try found the other's session.
    firsts = [json.loads(one.info["agents"][0]["stdout"].splitlines()[0])["other own"] for one in found]
    assert 401 in firsts
    assert asked == 2


@pytest.mark.long
@in_boxes
async def test_a_secret_opens_nothing_once_its_agent_ended(tmp_path: Path) -> None:
    env = agent_envs.Watching("program", script=program(tmp_path, left_behind(5)))
    async with ModelServer(scripted("ok")) as model, scripted_engine(model, env, tmp_path, sandbox=ALL) as made:
        (found,) = await all_of(made, [ROW])
    assert label(found.outcome) == "completed", found.outcome
    said = found.info["answers"]
    assert said[-1] in ("410", "404", "401"), said
    assert found.usage.turns == 1 + said.count("200")


@asynccontextmanager
async def proxy(target: int) -> AsyncIterator[tuple[str, list[str]]]:
    """A reverse proxy with a path of its own; the paths that came."""
    paths: list[str] = []

    async def passed(request: web.Request) -> web.Response:
        paths.append(request.path)
        url = f"http://127.0.0.1:{target}{request.path.removeprefix('/deep')}"
        lines = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with (
            aiohttp.ClientSession() as http,
            http.request(request.method, url, data=await request.read(), headers=lines) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    app = web.Application()
    app.router.add_route("*", "/deep/{rest:.*}", passed)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{port}/deep/", paths
    finally:
        await runner.cleanup()


@pytest.mark.long
@in_boxes
async def test_an_agent_calls_at_the_public_url_and_nowhere_else(tmp_path: Path) -> None:
    port = free_port()
    env = AgentEnvironment("program", script=program(tmp_path, TURNS))
    async with proxy(port) as (public, paths), ModelServer(scripted("hm", "42")) as model:
        options = {"public": public, "gateway_listen": f"127.0.0.1:{port}", "sandbox": ALL}
        async with scripted_engine(model, env, tmp_path, **options) as made:
            found = await all_of(made, [ROW, ROW])
    for one in found:
        trainable(one, 2)
        assert one.reward == 1.0, one.info
        assert given_url(one).startswith(f"{public}v1/rollouts/")
    assert sum(path.endswith("/chat/completions") for path in paths) == 4


@in_boxes
@pytest.mark.long
async def test_sandboxes_with_a_listener_need_no_public_url(tmp_path: Path) -> None:
    """Where there is one it is not theirs: they reach nothing else."""
    port = free_port()
    env = AgentEnvironment("program", script=program(tmp_path, TURNS))
    options = {"public": f"http://127.0.0.1:{port}", "gateway_listen": f"127.0.0.1:{port}"}
    async with (
        ModelServer(scripted("hm", "42")) as model,
        scripted_engine(model, env, tmp_path, **options) as made,
    ):
        (found,) = await all_of(made, [ROW])
    trainable(found, 2)
    assert str(port) not in given_url(found)


@pytest.mark.long
@in_boxes
@needs_ssh
async def test_an_agent_behind_a_tunnel_that_dies_once(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_services, "make_tunnel", server.tunnel)
    env = AgentEnvironment("program", script=program(tmp_path, TURNS))
    waiting = asyncio.Event()
    play = scripted("hm", "42")

    def held(request: Request) -> Answer:
        answer = play(request)
        if len(request.body["messages"]) > 1:
            answer.hold = waiting
        return answer

    async with ModelServer(held) as model:
        options = {"public": "ssh:here", "sandbox": ALL}
        async with scripted_engine(model, env, tmp_path, **options) as made:
            gateway = made.supervisor.gateway
            assert gateway is not None
            assert gateway.address is not None
            far = gateway.address.public
            taking = asyncio.create_task(all_of(made, [ROW]))
            await asyncio.wait_for(model.wait_for_requests(2), 60)
            for pid in ssh_pids():
                os.kill(pid, signal.SIGKILL)
            waiting.set()
            (found,) = await taking
    assert label(found.outcome) == "completed", (found.outcome, found.info)
    assert (found.reward, len(found.attempts)) == (1.0, 1), found.info
    assert given_url(found).startswith(f"{far}/v1/rollouts/")
    assert ssh_pids() == set()


# ---- what is told


@pytest.mark.parametrize(
    ("public", "listen", "said"),
    [
        ("http://", "127.0.0.1:9000", "names no host or port"),
        ("http://far:99999", "127.0.0.1:9000", "cannot be read"),
        ("http://far:0", "127.0.0.1:9000", "names no host or port"),
        ("http://a b/", "127.0.0.1:9000", "names no host or port"),
        ("http://me:hidden@far:80", "127.0.0.1:9000", "scheme, host, port and path alone"),
        ("http://far:80/?key=hidden", "127.0.0.1:9000", "scheme, host, port and path alone"),
        ("far:80", "", "neither a URL nor ssh:"),
        ("http://far:80", "", "--gateway-listen"),
        ("http://far:80", "9000", "listens at HOST:PORT"),
        ("http://far:80", "0.0.0.0:0", "listens at HOST:PORT"),
        ("http://far:80", "0.0.0.0:http", "listens at HOST:PORT"),
        ("", "0.0.0.0:9000", "--public-url"),
        ("ssh:far", "0.0.0.0:9000", "--public-url"),
    ],
)
def test_addresses_that_are_invalid_are_reported_when_the_engine_is_built(
    public: str, listen: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        EngineConfig(environment="agent", public=public, gateway_listen=listen)
    assert "hidden" not in str(caught.value)


def test_addresses_that_are_valid_are_accepted() -> None:
    for public, listen in (("https://far/deep/", "[::]:9000"), ("http://[::1]:80", "localhost:80"), ("", "")):
        EngineConfig(environment="agent", public=public, gateway_listen=listen)


@pytest.mark.parametrize(
    "public", ["", "http://127.0.0.1:9000", "http://localhost:9000", "http://[::1]:1", "ssh:far"]
)
def test_a_container_that_could_not_reach_the_address_is_reported_before_one_is_made(public: str) -> None:
    (said,) = find_gateway_problems(SandboxSpec(provider="docker", network="all"), public)
    assert "--public-url" in said
    assert find_gateway_problems(SandboxSpec(provider="docker", network="model"), public) == []
    assert find_gateway_problems(SandboxSpec(provider="local", network="all"), public) == []
    assert find_gateway_problems(SandboxSpec(provider="docker", network="all"), "http://172.17.0.1:9000") == []


def nobody(_: int) -> str:
    return f"http://127.0.0.1:{free_port()}"


def somebody(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@in_boxes
@pytest.mark.parametrize(
    ("public", "said"),
    [
        (nobody, "cannot be reached from this machine: .*--gateway-listen"),
        (somebody, "does not lead to this run's gateway: a request got status 200 with a session's key and 200"),
    ],
)
async def test_a_public_url_that_leads_elsewhere_is_reported_before_the_run_begins(
    public: Callable[[int], str], said: str, tmp_path: Path
) -> None:
    env = AgentEnvironment("program", script=program(tmp_path, TURNS))
    before = set(list_children(os.getpid()))
    async with ModelServer("ok") as model:
        options = {"public": public(model.port), "gateway_listen": f"127.0.0.1:{free_port()}", "sandbox": ALL}
        with pytest.raises(UsageError, match=said):
            async with scripted_engine(model, env, tmp_path, **options):
                raise AssertionError
    await eventually(lambda: set(list_children(os.getpid())) <= before)


@in_boxes
async def test_a_port_that_is_taken_is_reported_before_the_run_begins(tmp_path: Path) -> None:
    env = AgentEnvironment("program", script=program(tmp_path, TURNS))
    async with ModelServer("ok") as model:
        options = {"public": model.url, "gateway_listen": f"127.0.0.1:{model.port}", "sandbox": ALL}
        with pytest.raises(UsageError, match="cannot serve at"):
            async with scripted_engine(model, env, tmp_path, **options):
                raise AssertionError


@pytest.mark.long
@in_boxes
@needs_ssh
async def test_a_tunnel_that_cannot_be_made_is_reported_before_the_run_begins(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_services, "make_tunnel", server.tunnel)
    (server.folder / "keys").write_text("")
    env = AgentEnvironment("program", script=program(tmp_path, TURNS))
    before = set(list_children(os.getpid()))
    async with ModelServer("ok") as model:
        with pytest.raises(RookeryError, match=r"cannot be opened: .*Permission denied"):
            async with scripted_engine(model, env, tmp_path, public="ssh:here", sandbox=ALL):
                raise AssertionError
    await eventually(lambda: set(list_children(os.getpid())) <= before)
