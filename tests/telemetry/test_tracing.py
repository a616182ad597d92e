"""Traces: a real OTLP/HTTP receiver gets one tree of spans per rollout, from all processes of a run."""

import asyncio
import gzip
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from rookery import Engine
from rookery.core import Rollout, UsageError
from rookery.telemetry import tracing
from rookery.telemetry.tracing import TraceSettings, choose_parent
from tests.cli.sandbox_kit import local_sandboxes
from tests.servers import ModelServer
from tests.telemetry.conftest import ENV

__all__ = ["local_sandboxes"]
HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "question"


class Received:
    """The spans that a receiver got, by span ID, with the process that sent each."""

    def __init__(self) -> None:
        self.spans: dict[bytes, Span] = {}
        self.processes: dict[bytes, str] = {}
        self.raw = b""
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = read_attributes(resource.resource)
            assert about["service.name"] == "rookery"
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.span_id] = span
                    self.processes[span.span_id] = about["rookery.process"]
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans.values() if span.name == name]

    def parent(self, span: Span) -> Span:
        return self.spans[span.parent_span_id]


def read_attributes(owner: Any) -> dict[str, Any]:
    values = {}
    for pair in owner.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return values


@asynccontextmanager
async def receiver() -> AsyncIterator[Received]:
    """Serve `POST /v1/traces` as an OpenTelemetry collector does."""
    received = Received()
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/v1/traces", received.handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    received.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield received
    finally:
        await runner.cleanup()


async def run(model: ModelServer, tmp_path: Path, **options: Any) -> Rollout:
    tasks = [{"prompt": SECRET, **options.pop("data", {})}]
    async with Engine(ENV, policy=model.url, model="test-model", out=tmp_path, **options) as engine:
        groups = [group async for group in engine.groups(tasks, load_tokens=False)]
    return groups[0].rollouts[0]


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 1])
async def test_spans_of_a_rollout_are_one_tree(model: ModelServer, tmp_path: Path, runners: int) -> None:
    async with receiver() as received:
        record = await run(model, tmp_path, runners=runners, traces=received.url)
    assert tracing.active is None
    (rollout,) = received.named("rollout observed")
    assert not rollout.parent_span_id
    assert {span.trace_id for span in received.spans.values()} == {rollout.trace_id}
    about = read_attributes(rollout)
    assert (about["rookery.rollout"], about["rookery.outcome"], about["rookery.attempts"]) == (
        record.id,
        "completed",
        1,
    )
    (event,) = rollout.events
    assert read_attributes(event) == {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.5}
    (ran,), (scored,) = received.named("run"), received.named("score")
    assert received.parent(ran) == received.parent(scored) == rollout
    assert read_attributes(ran)["rookery.attempt"] == record.attempts[0].id
    chats = received.named("chat test-model")
    assert len(chats) == 3
    for chat in chats:
        assert received.parent(chat) == ran
        values = read_attributes(chat)
        assert chat.kind == Span.SPAN_KIND_CLIENT
        assert values["gen_ai.operation.name"] == "chat"
        assert values["gen_ai.request.model"] == "test-model"
        assert (values["gen_ai.usage.input_tokens"], values["gen_ai.usage.output_tokens"]) == (3, 2)
        assert values["gen_ai.conversation.id"] == record.id
    finishes = sorted(read_attributes(chat)["gen_ai.response.finish_reasons"][0] for chat in chats)
    assert finishes == ["stop", "stop", "tool_calls"]
    contexts = {request.headers["traceparent"].split("-")[2] for request in model.requests if request.body}
    assert contexts == {chat.span_id.hex() for chat in chats}, "inference engines can add their own spans"
    own = f"runner-{runners}" if runners else "supervisor"
    assert sorted(received.processes[chat.span_id] for chat in chats) == sorted(["gateway-0", own, own])
    tools = received.named("execute_tool lookup")
    assert [received.parent(one) for one in tools] == [ran, ran]
    codes = {read_attributes(one).get("error.type", ""): one.status.code for one in tools}
    assert codes == {"": Status.STATUS_CODE_UNSET, "error": Status.STATUS_CODE_ERROR}
    (graded,) = received.named("grade function")
    assert received.parent(graded) == scored
    for span in received.spans.values():
        assert rollout.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    sent = re.fullmatch(r"00-(\w{32})-(\w{16})-0[13]", record.info["environment"]["TRACEPARENT"])
    assert sent is not None
    assert (bytes.fromhex(sent[1]), bytes.fromhex(sent[2])) == (rollout.trace_id, ran.span_id)
    assert SECRET.encode() not in received.raw, "content is sent only on request"


@pytest.mark.long
async def test_content_is_sent_on_request_and_foreign_traces_are_ignored(
    model: ModelServer, tmp_path: Path
) -> None:
    async with receiver() as received:
        options = {"runners": 0, "traces": received.url, "trace_content": True}
        await run(model, tmp_path, data={"headers": {"traceparent": HEADER}}, **options)
    (rollout,) = received.named("rollout observed")
    assert {span.trace_id for span in received.spans.values()} == {rollout.trace_id}
    chats = [read_attributes(chat) for chat in received.named("chat test-model")]
    assert any(SECRET in chat["gen_ai.input.messages"] for chat in chats)
    assert any('"name":"lookup"' in chat["gen_ai.output.messages"] for chat in chats)
    results = {read_attributes(one)["gen_ai.tool.call.arguments"] for one in received.named("execute_tool lookup")}
    assert results == {'{"word": "rook"}', '{"word": "broken"}'}


@pytest.mark.long
async def test_unreachable_endpoint_does_not_disturb_the_run(
    model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with asyncio.timeout(60):
        record = await run(model, tmp_path, runners=1, traces="http://127.0.0.1:9")
    assert record.valid
    assert tracing.active is None


def test_header_is_used_only_within_the_trace_of_its_session() -> None:
    registered = HEADER.replace("b7ad6b7169203331", "00f067aa0ba902b7")
    assert choose_parent(registered, HEADER) == HEADER
    assert choose_parent(registered, HEADER.replace("0af7", "1af7")) == registered
    assert choose_parent(registered, "00-wrong") == registered
    assert choose_parent("", HEADER) == HEADER
    assert choose_parent("", "") == ""


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://host", "http://", "grpc://host:4317"])
def test_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError):
        TraceSettings(endpoint=endpoint).check()
    with pytest.raises(UsageError):
        Engine(ENV, policy="http://127.0.0.1:9", traces=endpoint)


def test_content_without_an_endpoint_is_refused() -> None:
    with pytest.raises(UsageError):
        Engine(ENV, policy="http://127.0.0.1:9", trace_content=True)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UsageError, match=re.escape("rookery-rl[otel]")):
        Engine(ENV, policy="http://127.0.0.1:9", traces="http://127.0.0.1:4318")


def test_runs_without_traces_import_nothing_of_opentelemetry() -> None:
    import subprocess

    code = "import rookery.engine.runner, rookery.gateway.shard, sys; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "False"


AGENT = """
import re
context = os.environ["TRACEPARENT"]
own = re.sub("-[0-9a-f]{16}-", "-00f067aa0ba902b7-", context)
body = json.dumps({"model": "any", "messages": messages}).encode()
headers = {"Authorization": "Bearer x", "Content-Type": "application/json", "traceparent": own}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(request, timeout=SECONDS).read()
ask(messages)
print(context)
"""


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
async def test_agent_in_a_sandbox_continues_the_trace(tmp_path: Path) -> None:
    from rookery.environments.agent import AgentEnvironment
    from tests.environments.agent.helpers import run_rollouts, scripted_engine, write_program

    env = AgentEnvironment("program", script=write_program(tmp_path, AGENT))
    async with (
        receiver() as received,
        ModelServer("ok") as server,
        scripted_engine(server, env, tmp_path, traces=received.url) as engine,
    ):
        (rollout,) = await run_rollouts(engine, [{"prompt": "question", "answer": "none"}])
    assert rollout.reward == 0.0
    (agent,), (ran,) = received.named("invoke_agent program"), received.named("run")
    assert received.parent(agent) == ran
    chats = [span for span in received.spans.values() if span.kind == Span.SPAN_KIND_CLIENT]
    assert {chat.trace_id for chat in chats} == {ran.trace_id}
    assert {chat.parent_span_id.hex() for chat in chats} == {"00f067aa0ba902b7", agent.span_id.hex()}
