"""Agents that call the inference engine directly (`record="off"`): no tokens, no gateway, no leaked API key."""

from pathlib import Path
from typing import Any

import pytest

from rookery.core import Failed, Limits, Sampling, SandboxSpec, UsageError, label
from rookery.engine import EngineConfig
from rookery.environments.agent import AgentEnvironment
from rookery.gateway.listener_forwarder import ForwardTarget, rewrite_head
from rookery.journal import RunReader
from rookery.journal.export import export_conversations, export_csv, export_jsonl
from rookery.training import BatchError, make_batch
from rookery.upstreams import UpstreamConfig
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.helpers import run_rollouts, scripted_engine, scripted_model, write_program
from tests.environments.agent.test_public_address import ROW
from tests.servers import Answer, ModelServer

__all__ = ["local_sandboxes"]
KEY = "sk-secret-of-the-test"
OPENAI = UpstreamConfig(urls=("http://127.0.0.1:9/v1",))
PROGRAM = """
import socket
open("notes.txt", "w").write("my key is " + os.environ["OPENAI_API_KEY"])
messages.append(ask(messages))
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1].split()[0])), 5)
except OSError:
    print("unreachable")
print(os.environ["OPENAI_API_KEY"], os.environ["MODEL"], file=sys.stderr)
print(messages[-1]["content"])
"""


def make_environment(tmp_path: Path, text: str = PROGRAM) -> AgentEnvironment:
    return AgentEnvironment("program", script=write_program(tmp_path, text))


@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.parametrize("network", ["model", "all"])
async def test_agent_calls_the_inference_engine_directly(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_API_KEY", KEY)
    sandbox = SandboxSpec(provider="local", network=network)
    inside = network == "model"
    async with ModelServer(scripted_model("42")) as model:
        env = make_environment(tmp_path)
        if not inside:
            with pytest.raises(UsageError):  # the agent would get the key
                scripted_engine(model, env, tmp_path, record="off", sandbox=sandbox)
        options = {"record": "off", "pass_key": not inside, "sandbox": sandbox}
        async with scripted_engine(model, env, tmp_path, **options) as engine:
            assert engine.supervisor.gateway is None
            row = {"prompt": f"{model.port} 6 * 7?", "answer": 42, "collect": ["notes.txt"]}
            (group,) = [group async for group in engine.groups([row])]
            with pytest.raises(UsageError):
                engine.groups([row], need_tokens=True)
            folder = engine.folder
    (rollout,) = group.rollouts
    assert (label(rollout.outcome), rollout.reward) == ("completed", 1.0), rollout.info
    assert (rollout.usage.turns, rollout.segments, rollout.info["recorded"]) == (0, [], False)
    (agent,) = rollout.info["agents"]
    assert agent["stdout"].startswith("unreachable") == inside
    assert agent["stderr"].split() == (["rookery", "test-model"] if inside else ["[API", "key]", "test-model"])
    calls = [request for request in model.requests if request.path.endswith("/chat/completions")]
    assert [call.headers["Authorization"] for call in calls] == [f"Bearer {KEY}"]

    assert folder is not None
    assert not [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    with pytest.raises(BatchError):
        make_batch([group])
    with RunReader(folder) as reader:
        for export in (export_jsonl, export_csv):
            assert export(reader, tmp_path / "plain").rollouts == 1
            with pytest.raises(UsageError):
                export(reader, tmp_path / "tokens", tokens=True)
        with pytest.raises(UsageError):
            export_conversations(reader, tmp_path / "talk", "openai")


@pytest.mark.usefixtures("local_sandboxes")
async def test_agent_that_ends_because_the_inference_engine_fails_is_an_infrastructure_failure(
    tmp_path: Path,
) -> None:
    async with (
        ModelServer(Answer("broken", status=500)) as model,
        scripted_engine(model, make_environment(tmp_path, "ask(messages)"), tmp_path, record="off") as engine,
    ):
        (rollout,) = await run_rollouts(engine, [ROW])
    assert isinstance(rollout.outcome, Failed), rollout.outcome
    assert (rollout.outcome.fault, rollout.outcome.cause) == ("infra", "upstream.error")


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": Sampling(temperature=0.5)},
        {"limits": Limits(turns=3)},
        {"cache": "replies"},
        {"gateway_url": "http://a:1"},
        {"tool_parser": "hermes"},
        {"record": "plain", "pass_key": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_settings_that_need_a_gateway_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        EngineConfig(**{"environment": "agent", "upstreams": {"policy": OPENAI}, "record": "off", **options})


@pytest.mark.parametrize("policy", ["embedded", "http://user:password@a:1/v1", "http://a:1/v1?version=2"])
def test_policies_that_agents_cannot_call_are_refused(policy: str, tmp_path: Path) -> None:
    from rookery import Engine

    with pytest.raises(UsageError):
        Engine(make_environment(tmp_path), policy=policy, record="off", out=tmp_path)


def test_forwarded_request_has_the_host_path_and_key_of_the_target() -> None:
    target = ForwardTarget.parse("https://far.example/api/", key="k")
    head = (
        b"POST /v1/chat HTTP/1.1\r\nHost: 127.0.0.1:1\r\nX-API-Key: mine\r\nConnection: Upgrade\r\n"
        b"Upgrade: h2c\r\nExpect: 100-continue\r\nA: b\r\n\r\n"
    )
    rewritten = rewrite_head(head, target)
    assert (rewritten.length, rewritten.expects) == (0, True)
    first, *lines = rewritten.data.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert first == b"POST /api/v1/chat HTTP/1.1"
    assert sorted(lines) == sorted(
        [b"Host: far.example", b"Connection: close", b"Authorization: Bearer k", b"x-api-key: k", b"A: b"]
    )


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://elsewhere/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET /../admin HTTP/1.1\r\n\r\n",
        b"GET /a/%2E%2e/admin HTTP/1.1\r\n\r\n",
        b"GET /a%2f..%5Cadmin HTTP/1.1\r\n\r\n",
        b"GET /a\\..\\admin?x HTTP/1.1\r\n\r\n",
        b"GET /%252e%252e/admin HTTP/1.1\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\n\r\n",
        b"GET /a\nX:b HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\nX-Other: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\rX-Other: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: \0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    ],
)
def test_invalid_requests_are_not_forwarded(head: bytes) -> None:
    with pytest.raises(ValueError):
        rewrite_head(head, ForwardTarget.parse("http://a:1", key="k"))
