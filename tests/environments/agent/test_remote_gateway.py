"""Agents in sandboxes of other machines, and runs that use a gateway which already runs."""

import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rookery.core import SandboxSpec, UsageError
from rookery.engine import EngineConfig
from rookery.engine.run_services import GATEWAY_KEY_VARIABLE
from rookery.environments.agent import AgentEnvironment
from rookery.environments.agent.sandbox_probe import UPLOAD_DIRECTORY
from rookery.gateway.config import GatewayConfig
from rookery.gateway.shards import Gateway
from rookery.sandboxes.ssh_provider import HOSTS_VARIABLE, OPTIONS_VARIABLE
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.http_client.dial import default_context
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.helpers import (
    agents_directory,
    assert_trainable,
    run_rollouts,
    scripted_engine,
    scripted_model,
    write_program,
)
from tests.environments.agent.test_public_address import ROW, TURNS, get_url, proxy
from tests.gateway.shard_kit import KEY
from tests.servers import ModelServer
from tests.ssh_server import SshServer, needs_ssh
from tests.upstreams.test_http_tls import certificate, server_side

__all__ = ["certificate", "local_sandboxes", "server_side"]


@pytest.fixture
def ssh_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxSpec]:
    """Start an SSH server, and yield the spec of sandboxes on the machine that it stands for."""
    server = SshServer(tmp_path)
    server.start()
    try:
        monkeypatch.setenv(HOSTS_VARIABLE, "here")
        monkeypatch.setenv(OPTIONS_VARIABLE, f"-F {server.write_config()}")
        yield SandboxSpec(provider="ssh")
    finally:
        server.stop()


@pytest.mark.long
@needs_ssh
async def test_agent_on_another_machine_reaches_the_gateway(ssh_spec: SandboxSpec, tmp_path: Path) -> None:
    env = AgentEnvironment("program", script=write_program(tmp_path, TURNS))
    async with (
        ModelServer(scripted_model("hm", "42")) as model,
        scripted_engine(model, env, tmp_path, sandbox=ssh_spec) as engine,
    ):
        (rollout,) = await run_rollouts(engine, [ROW])
    assert_trainable(rollout, 2)


@pytest.mark.long
@needs_ssh
async def test_installed_agent_is_copied_to_another_machine(ssh_spec: SandboxSpec, tmp_path: Path) -> None:
    launcher = {
        "name": "shell",
        "needs": ["sh"],
        "command": ["sh", "-c", "echo {agent}; cat {agent}/x > answer.txt", "sh", "{prompt}"],
        "install": {"commands": [["sh", "-c", "echo yes > x"]]},
    }
    async with ModelServer("ok") as model:
        with agents_directory(tmp_path / "agents"):
            async with scripted_engine(model, AgentEnvironment(launcher), tmp_path, sandbox=ssh_spec) as engine:
                (rollout,) = await run_rollouts(engine, [{"prompt": "x", "answer": "yes"}])
    assert rollout.reward == 1.0, rollout.outcome
    assert rollout.info["agents"][0]["stdout"].strip() == UPLOAD_DIRECTORY


@pytest.mark.usefixtures("local_sandboxes")
async def test_run_uses_a_gateway_that_already_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = AgentEnvironment("program", script=write_program(tmp_path, TURNS))
    async with (
        ModelServer(scripted_model("hm", "42")) as model,
        Gateway(
            GatewayConfig(upstreams={"policy": UpstreamConfig(urls=(f"{model.url}/v1",))}, record="messages"),
            key=KEY,
        ) as gateway,
    ):
        url = f"http://127.0.0.1:{gateway.address.port}"
        monkeypatch.setenv(GATEWAY_KEY_VARIABLE, KEY)
        async with scripted_engine(model, env, tmp_path, gateway_url=url) as engine:
            assert engine.supervisor.gateway is not None
            assert engine.supervisor.gateway.pids() == []
            (rollout,) = await run_rollouts(engine, [ROW])
        assert_trainable(rollout, 2)
        assert "/v1/rollouts/" in get_url(rollout)
        for key in ("wrong", ""):
            monkeypatch.setenv(GATEWAY_KEY_VARIABLE, key)
            with pytest.raises(UsageError):
                async with scripted_engine(model, env, tmp_path / "refused", gateway_url=url):
                    pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="[probed] there is no openssl here")
@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.parametrize("network", ["model", "all"])
async def test_run_uses_a_gateway_behind_tls_and_a_path(
    network: Any,
    certificate: tuple[Path, Path],
    server_side: ssl.SSLContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    monkeypatch.setenv(GATEWAY_KEY_VARIABLE, KEY)
    default_context.cache_clear()
    trust = "os.environ['SSL_CERT_FILE'] = 'cert.pem'\nopen('cert.pem', 'w').write({!r})\n"
    program = trust.format(certificate[1].read_text()) + TURNS
    env = AgentEnvironment("program", script=write_program(tmp_path, program))
    try:
        async with (
            ModelServer(scripted_model("hm", "42")) as model,
            Gateway(
                GatewayConfig(upstreams={"policy": UpstreamConfig(urls=(f"{model.url}/v1",))}, record="messages"),
                key=KEY,
            ) as gateway,
            proxy(gateway.address.port, server_side) as (url, paths),
        ):
            sandbox = SandboxSpec(provider="local", network=network)
            async with scripted_engine(model, env, tmp_path, gateway_url=url, sandbox=sandbox) as engine:
                (rollout,) = await run_rollouts(engine, [ROW])
    finally:
        default_context.cache_clear()
    assert_trainable(rollout, 2)
    assert sum(path.endswith("/chat/completions") for path in paths) == 2


@pytest.mark.parametrize("url", ["ftp://a:1", "http://a:0", "http://user:password@a:1", "http://a:1?x=1", "a"])
def test_invalid_gateway_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(environment="agent", gateway_url=url)
    assert "--gateway" in str(caught.value)
    with pytest.raises(UsageError):
        EngineConfig(environment="agent", gateway_url="http://a:1", public="ssh:there")
