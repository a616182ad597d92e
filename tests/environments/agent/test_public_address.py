"""Agents that reach the gateway at a public address: of this machine, of a proxy, of a tunnel."""

import asyncio
import json
import os
import re
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rookery.core import RookeryError, SandboxSpec, UsageError, label
from rookery.engine import EngineConfig
from rookery.engine.preflight import find_gateway_problems
from rookery.environments.agent import AgentEnvironment
from rookery.sandbox_runtime.processes import list_children
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.helpers import (
    WaitsForRefusal,
    assert_trainable,
    make_leftover_program,
    run_rollouts,
    scripted_engine,
    scripted_model,
    write_program,
)
from tests.gateway.test_tunnels import server, short_reconnect_wait, ssh_pids
from tests.processes import send_signal
from tests.servers import Answer, ModelServer, Request, free_port
from tests.ssh_server import SshServer, needs_ssh
from tests.waiting import wait_until

__all__ = ["local_sandboxes", "server", "short_reconnect_wait"]
in_sandboxes = pytest.mark.usefixtures("local_sandboxes")
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
"""Makes two calls and retries each one that gets no response, as clients do."""


def get_url(rollout: Any) -> str:
    return str(rollout.info["agents"][0]["stdout"].splitlines()[0])


ATTACK = """
ask(messages)
own = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
top, _, name = own.rpartition("/")
gateway = top.removesuffix("/v1/rollouts")
other = ("1" if name[0] == "0" else "0") + name[1:]
body = json.dumps({"model": "policy", "messages": messages}).encode()
statuses = {}
def tried(url, key, method="POST"):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url, body if method == "POST" else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
for key in (os.environ["OPENAI_API_KEY"], "rookery", ""):
    what = "own" if key == os.environ["OPENAI_API_KEY"] else key
    statuses["other " + what] = tried(f"{top}/{other}/v1/chat/completions", key)
    statuses["listing " + what] = tried(gateway + "/rollouts", key, "GET")
    statuses["record " + what] = tried(f"{gateway}/rollouts/{other}/trajectory", key, "GET")
    statuses["pause " + what] = tried(gateway + "/pause", key)
statuses["own session without a key"] = tried(own + "/v1/chat/completions", "")
print(json.dumps(statuses))
print(42)
"""


@in_sandboxes
async def test_key_opens_its_own_session_only(tmp_path: Path) -> None:
    """The other session is open, so it is refused because of the key."""
    env = AgentEnvironment("program", script=write_program(tmp_path, ATTACK))
    release = asyncio.Event()
    reply = scripted_model("ok")

    def reply_after_release(request: Request) -> Answer:
        answer = reply(request)
        answer.hold = release
        return answer

    async with (
        ModelServer(reply_after_release) as model,
        scripted_engine(model, env, tmp_path, sandbox=ALL) as engine,
    ):
        running = asyncio.create_task(run_rollouts(engine, [ROW, ROW]))
        await asyncio.wait_for(model.wait_for_requests(2), 60)
        release.set()
        rollouts = await running
        asked = len(model.requests)
    for rollout in rollouts:
        assert (label(rollout.outcome), rollout.reward, rollout.usage.turns) == ("completed", 1.0, 1), (
            rollout.outcome,
            rollout.info,
        )
        statuses = json.loads(rollout.info["agents"][0]["stdout"].splitlines()[0])
        assert set(statuses.values()) <= {401, 404}, statuses
        assert statuses["own session without a key"] == 401
    # The other session may have ended before the second agent tried, but not before the first one did.
    firsts = [json.loads(rollout.info["agents"][0]["stdout"].splitlines()[0])["other own"] for rollout in rollouts]
    assert 401 in firsts
    assert asked == 2


@pytest.mark.long
@in_sandboxes
async def test_key_opens_nothing_after_its_agent_ended(tmp_path: Path) -> None:
    env = WaitsForRefusal("program", script=write_program(tmp_path, make_leftover_program(5)))
    async with (
        ModelServer(scripted_model("ok")) as model,
        scripted_engine(model, env, tmp_path, sandbox=ALL) as engine,
    ):
        (rollout,) = await run_rollouts(engine, [ROW])
    assert label(rollout.outcome) == "completed", rollout.outcome
    statuses = rollout.info["statuses"]
    assert statuses[-1] in ("410", "404", "401"), statuses
    assert rollout.usage.turns == 1 + statuses.count("200")


@asynccontextmanager
async def proxy(target: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, list[str]]]:
    """Run a reverse proxy below a path. Yield its URL and the paths of its requests."""
    paths: list[str] = []

    async def forward(request: web.Request) -> web.Response:
        paths.append(request.path)
        url = f"http://127.0.0.1:{target}{request.path.removeprefix('/deep')}"
        lines = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with (
            aiohttp.ClientSession() as http,
            http.request(request.method, url, data=await request.read(), headers=lines) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    app = web.Application()
    app.router.add_route("*", "/deep/{rest:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{port}/deep/", paths
    finally:
        await runner.cleanup()


@pytest.mark.long
@in_sandboxes
async def test_agent_uses_the_public_url_only(tmp_path: Path) -> None:
    port = free_port()
    env = AgentEnvironment("program", script=write_program(tmp_path, TURNS))
    async with proxy(port) as (public, paths), ModelServer(scripted_model("hm", "42")) as model:
        options = {"public": public, "gateway_listen": f"127.0.0.1:{port}", "sandbox": ALL}
        async with scripted_engine(model, env, tmp_path, **options) as engine:
            rollouts = await run_rollouts(engine, [ROW, ROW])
    for rollout in rollouts:
        assert_trainable(rollout, 2)
        assert rollout.reward == 1.0, rollout.info
        assert get_url(rollout).startswith(f"{public}v1/rollouts/")
    assert sum(path.endswith("/chat/completions") for path in paths) == 4


@in_sandboxes
@pytest.mark.long
async def test_sandboxes_with_the_model_network_do_not_use_the_public_url(tmp_path: Path) -> None:
    """They can reach the gateway through their listener only."""
    port = free_port()
    env = AgentEnvironment("program", script=write_program(tmp_path, TURNS))
    options = {"public": f"http://127.0.0.1:{port}", "gateway_listen": f"127.0.0.1:{port}"}
    async with (
        ModelServer(scripted_model("hm", "42")) as model,
        scripted_engine(model, env, tmp_path, **options) as engine,
    ):
        (rollout,) = await run_rollouts(engine, [ROW])
    assert_trainable(rollout, 2)
    assert str(port) not in get_url(rollout)


@pytest.mark.long
@in_sandboxes
@needs_ssh
async def test_agent_survives_the_loss_of_its_tunnel(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_retries = TURNS.replace("range(600)", "range(1)")
    env = AgentEnvironment("program", script=write_program(tmp_path, without_retries))
    release = asyncio.Event()
    reply = scripted_model("hm", "42")

    def reply_after_release(request: Request) -> Answer:
        answer = reply(request)
        if len(request.body["messages"]) > 1:
            answer.hold = release
        return answer

    async with ModelServer(reply_after_release) as model:
        options = {"public": "ssh:here", "sandbox": ALL}
        async with scripted_engine(model, env, tmp_path, **options) as engine:
            gateway = engine.supervisor.gateway
            assert gateway is not None
            assert gateway.address is not None
            public_url = gateway.address.public
            running = asyncio.create_task(run_rollouts(engine, [ROW]))
            await asyncio.wait_for(model.wait_for_requests(2), 60)
            before = ssh_pids()
            send_signal(before, signal.SIGKILL)
            await wait_until(lambda: bool(ssh_pids() - before))
            release.set()
            (rollout,) = await running
    assert label(rollout.outcome) == "completed", (rollout.outcome, rollout.info)
    assert (rollout.reward, len(rollout.attempts)) == (1.0, 1), rollout.info
    assert get_url(rollout).startswith(f"{public_url}/v1/rollouts/")
    assert ssh_pids() == set()


# ---- checks


@pytest.mark.parametrize(
    ("public", "listen", "named"),
    [
        ("http://", "127.0.0.1:9000", "host:port"),
        ("http://remote:99999", "127.0.0.1:9000", "host:port"),
        ("http://remote:0", "127.0.0.1:9000", "host:port"),
        ("http://a b/", "127.0.0.1:9000", "host:port"),
        ("http://me:hidden@remote:80", "127.0.0.1:9000", "remote:80"),
        ("http://remote:80/?key=hidden", "127.0.0.1:9000", "remote:80"),
        ("remote:80", "", "'remote:80'"),
        ("http://remote:80", "", "--gateway-listen"),
        ("http://remote:80", "9000", "HOST:PORT"),
        ("http://remote:80", "0.0.0.0:0", "HOST:PORT"),
        ("http://remote:80", "0.0.0.0:http", "HOST:PORT"),
        ("", "0.0.0.0:9000", "--public-url"),
        ("ssh:remote", "0.0.0.0:9000", "--public-url"),
    ],
)
def test_invalid_addresses_are_refused_at_construction(public: str, listen: str, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        EngineConfig(environment="agent", public=public, gateway_listen=listen)
    assert "hidden" not in str(caught.value)


def test_valid_addresses_are_accepted() -> None:
    for public, listen in (("https://remote/deep/", "[::]:9000"), ("http://[::1]:80", "localhost:80"), ("", "")):
        EngineConfig(environment="agent", public=public, gateway_listen=listen)


@pytest.mark.parametrize(
    "public", ["", "http://127.0.0.1:9000", "http://localhost:9000", "http://[::1]:1", "ssh:remote"]
)
def test_address_that_containers_cannot_reach_is_a_problem(public: str) -> None:
    for provider in ("docker", "kubernetes", "ssh"):
        assert len(find_gateway_problems(SandboxSpec(provider=provider, network="all"), public)) == 1
    assert find_gateway_problems(SandboxSpec(provider="docker", network="model"), public) == []
    assert find_gateway_problems(SandboxSpec(provider="local", network="all"), public) == []
    assert find_gateway_problems(SandboxSpec(provider="docker", network="all"), "http://172.17.0.1:9000") == []


def unused_address(_: int) -> str:
    return f"http://127.0.0.1:{free_port()}"


def address_of_another_server(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@in_sandboxes
@pytest.mark.parametrize("public", [unused_address, address_of_another_server])
async def test_public_url_that_leads_elsewhere_is_refused_before_the_run(
    public: Callable[[int], str], tmp_path: Path
) -> None:
    env = AgentEnvironment("program", script=write_program(tmp_path, TURNS))
    prefix = set(list_children(os.getpid()))
    async with ModelServer("ok") as model:
        options = {"public": public(model.port), "gateway_listen": f"127.0.0.1:{free_port()}", "sandbox": ALL}
        with pytest.raises(UsageError, match=re.escape(options["public"])):
            async with scripted_engine(model, env, tmp_path, **options):
                raise AssertionError
    await wait_until(lambda: set(list_children(os.getpid())) <= prefix)


@in_sandboxes
async def test_occupied_port_is_refused_before_the_run(tmp_path: Path) -> None:
    env = AgentEnvironment("program", script=write_program(tmp_path, TURNS))
    async with ModelServer("ok") as model:
        options = {"public": model.url, "gateway_listen": f"127.0.0.1:{model.port}", "sandbox": ALL}
        with pytest.raises(UsageError, match=str(model.port)):
            async with scripted_engine(model, env, tmp_path, **options):
                raise AssertionError


@pytest.mark.long
@in_sandboxes
@needs_ssh
async def test_tunnel_that_cannot_be_opened_is_refused_before_the_run(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server.folder / "keys").write_text("")
    env = AgentEnvironment("program", script=write_program(tmp_path, TURNS))
    prefix = set(list_children(os.getpid()))
    async with ModelServer("ok") as model:
        with pytest.raises(RookeryError, match="Permission denied"):
            async with scripted_engine(model, env, tmp_path, public="ssh:here", sandbox=ALL):
                raise AssertionError
    await wait_until(lambda: set(list_children(os.getpid())) <= prefix)
