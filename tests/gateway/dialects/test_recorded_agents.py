"""Replay of real requests of Claude Code and Codex, recorded by `make test-agents RECORD=1` in `recorded`.

Each request goes through a real gateway over a model that gives the recorded reply. The IDs of tool calls are new
in each replay, and are sent back as a client would send them.
"""

import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import MessageTokensCount
from anthropic.types.beta import BetaContentBlock, BetaRawMessageStreamEvent
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from rookery.core import Message, ToolCall
from rookery.environments.agent import find_launcher
from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.gateway.chat_renderers.protocol import ChatRenderer
from rookery.gateway.gateway_session import SANDBOX_KEY
from rookery.upstreams.embedded import chat
from rookery.upstreams.protocol import ModelRequest
from tests.gateway.chat_renderers.kit import open_family
from tests.gateway.dialects.agent_requests import join_blocks, join_output_items
from tests.gateway.dialects.kit import check_exact_turns, parse_named_events, run_token_shard
from tests.gateway.dialects.recordings import Exchange, list_clients, load_conversations
from tests.gateway.kit import HttpResponse, InProcessGateway, RawConnection, RegisteredSession, request
from tests.gateway.session_kit import RecordingUpstream, TokenScriptUpstream

CONVERSATIONS = [(client, name) for client in list_clients() for name in load_conversations(client)]
TREES = {
    ("claude-code", "beside"): [2],
    ("claude-code", "compaction"): [1, 1, 2],
    ("claude-code", "sub_agent"): [2, 3],
    ("claude-code", "terminal"): [1, 2],
    ("claude-code", "tool"): [2],
    ("codex", "compaction"): [1, 1, 2],
    ("codex", "sub_agent"): [2, 4],
    ("codex", "tool"): [2],
}
"""Number of turns in each segment."""
EVENTS: dict[str, TypeAdapter[Any]] = {
    "messages": TypeAdapter(BetaRawMessageStreamEvent),
    "responses": TypeAdapter(ResponseStreamEvent),
}
ITEMS: dict[str, TypeAdapter[Any]] = {
    "messages": TypeAdapter(BetaContentBlock),
    "responses": TypeAdapter(ResponseOutputItem),
}

# ---- models that give the recorded replies


def qwen(answer: dict[str, Any]) -> list[int]:
    """Encode a recorded reply for Qwen3, split at an unusual place; special tokens stay whole."""
    family = open_family("qwen3")
    calls = [f'{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}' for call in answer["calls"]]
    thought = f"<think>\n{answer['reasoning']}\n</think>\n\n" if answer["reasoning"] else ""
    text = thought + answer["text"]
    text = "\n".join([text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])
    cut = text.index(answer["reasoning"]) + 4
    return [*family.tokenizer.encode(text[:cut]), *family.tokenizer.encode(text[cut:]), family.stop_token_ids[0]]


def embedded(answer: dict[str, Any]) -> list[int]:
    """Encode a recorded reply for the embedded policy, whose format has no reasoning."""
    calls = tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in answer["calls"])
    return chat.message_ids(Message("assistant", answer["text"] or None, calls))[1:]


@dataclass(frozen=True)
class Format:
    """A chat format with the encoder of its replies."""

    ids: Callable[[dict[str, Any]], list[int]]
    renderer: Callable[[], ChatRenderer]
    thinks: bool


FORMATS = {
    "qwen3": Format(qwen, lambda: open_family("qwen3"), thinks=True),
    "embedded": Format(embedded, EmbeddedRenderer, thinks=False),
}


# ---- a client that sends the recorded requests


@dataclass
class Client:
    """Client that sends recorded requests to a session listener and validates the events it receives."""

    port: int
    thinks: bool
    _ids: dict[str, str] = field(default_factory=dict)
    """Maps the tool call IDs of the recording to those of this replay."""

    async def answered(self, exchange: Exchange, path: str = "") -> HttpResponse:
        body = None if exchange.body is None else self.body(exchange)
        headers = {name.replace("-", "_"): value or SANDBOX_KEY for name, value in exchange.headers.items()}
        async with await RawConnection.open(self.port) as connection:
            connection.send(request(exchange.method, path or exchange.path, body, **headers))
            return await connection.read_response(head_only=exchange.method == "HEAD")

    async def send(self, exchange: Exchange) -> list[dict[str, Any]]:
        """Send a request that calls a model; return the blocks or items of the reply."""
        assert exchange.answer is not None
        kind = kind_of(exchange)
        events = parse_named_events(await self.answered(exchange))
        for event in events:
            if event["type"] != "ping":  # their libraries skip it
                EVENTS[kind].validate_python(event)
        items = join_blocks(events) if kind == "messages" else join_output_items(events)
        for one in items:
            ITEMS[kind].validate_python(one)
        new = [one["id"] if kind == "messages" else one["call_id"] for one in items if one["type"] in CALLED]
        self._ids |= zip((call["id"] for call in exchange.answer["calls"]), new, strict=True)
        return items

    def body(self, exchange: Exchange) -> bytes:
        request_body = exchange.body if self.thinks else without_reasoning(exchange.body)
        text = json.dumps(request_body)
        return re.sub(r'(?<=")call_\d+_\d+(?=")', lambda match: self._ids.get(match[0], match[0]), text).encode()


@asynccontextmanager
async def open_listener(gateway: InProcessGateway, session: RegisteredSession) -> AsyncIterator[int]:
    """Yield the port of a listener that belongs to the session, as a sandbox has one."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    assert gateway.shard.server is not None
    server = await gateway.shard.server.listen(listener, session=session.id)
    try:
        yield port
    finally:
        await gateway.shard.server.stop_listening(server, session.id)


CALLED = ("tool_use", "function_call")
THOUGHTS = ("thinking", "reasoning")


def kind_of(exchange: Exchange) -> str:
    return "messages" if "/messages" in exchange.path else "responses"


def without_reasoning(value: Any) -> Any:
    """Remove the reasoning from a request, as a client does that does not return it."""
    if isinstance(value, list):
        return [
            without_reasoning(one) for one in value if not (isinstance(one, dict) and one.get("type") in THOUGHTS)
        ]
    return {name: without_reasoning(one) for name, one in value.items()} if isinstance(value, dict) else value


def model_exchanges(exchanges: list[Exchange]) -> list[Exchange]:
    return [one for one in exchanges if one.answer is not None]


# ---- the expected tree of turns


def without_cache_hints(value: Any) -> Any:
    """Remove the cache hints, which an agent moves from turn to turn."""
    if isinstance(value, list):
        return [without_cache_hints(one) for one in value]
    if not isinstance(value, dict):
        return value
    copy = {name: without_cache_hints(one) for name, one in value.items() if name != "cache_control"}
    match copy.get("content"):
        case [{"type": "text", "text": str(text), **rest}] if not rest and copy.get("role") == "system":
            copy["content"] = text
        case _:
            pass
    return copy


def parents_of(exchanges: list[Exchange]) -> list[int | None]:
    """Return for each request the index of the exchange whose reply it continues."""
    parents: list[int | None] = []
    seen: list[tuple[Any, list[Any]]] = []
    for exchange in exchanges:
        body = without_cache_hints(exchange.body)
        first = [part for part in body.get("system") or () if not part["text"].startswith("x-anthropic-billing")]
        history: list[Any] = body["messages"] if "messages" in body else body["input"]
        head = (first, body.get("tools"))
        best: int | None = None
        for at, (other, earlier) in enumerate(seen):
            if head != other or history[: len(earlier)] != earlier or len(history) == len(earlier):
                continue
            answer = exchanges[at].answer or {}
            longest = best is None or len(earlier) >= len(seen[best][1])
            if longest and (answer["reasoning"] or answer["text"]) in json.dumps(history[len(earlier)]):
                best = at
        seen.append((head, history))
        parents.append(best)
    return parents


# ---- tests


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.needs("tokenizers")), "embedded"])
@pytest.mark.parametrize(("client", "conversation"), CONVERSATIONS)
async def test_recorded_conversation_replays_with_exact_tokens(
    tmp_path: Path, client: str, conversation: str, name: str
) -> None:
    form, exchanges = FORMATS[name], load_conversations(client)[conversation]
    turns = model_exchanges(exchanges)
    left = [form.ids(turn.answer or {}) for turn in turns]

    def answer(_: ModelRequest) -> list[int]:
        return left.pop(0)

    renderer = form.renderer()
    async with run_token_shard(tmp_path, TokenScriptUpstream(answer, renderer), renderer) as (gateway, recording):
        session = await gateway.register(id="agent")
        async with open_listener(gateway, session) as port:
            agent = Client(port, form.thinks)
            for exchange in exchanges:
                if exchange.answer is not None:
                    check_reply(exchange.answer, await agent.send(exchange), thinks=form.thinks)
                    await check_token_count(agent, exchange, recording)
                else:
                    await check_side_request(agent, exchange, recording)
        assert not left
        recorded = await check_exact_turns(gateway, session, recording, segments=len(TREES[client, conversation]))
        assert [turn.get("parent") for turn in recorded] == parents_of(turns)
        assert all(turn.get("prefix") for turn in recorded if turn.get("parent") is not None)
        trajectory = await gateway.trajectory(session)
        assert sorted(len(one["turns"]) for one in trajectory["segments"]) == TREES[client, conversation]


def check_reply(answer: dict[str, Any], items: list[dict[str, Any]], *, thinks: bool) -> None:
    """Check that the client received the text, calls and reasoning of the recorded reply in order."""
    text = "".join(
        one["text"] if one["type"] == "text" else "".join(part["text"] for part in one["content"])
        for one in items
        if one["type"] in ("text", "message")
    )
    assert text.strip() == answer["text"].strip()
    calls = [one for one in items if one["type"] in CALLED]
    names = [
        "__".join(filter(None, (one.get("namespace"), one["name"]))) if "namespace" in one else one["name"]
        for one in calls
    ]
    assert names == [call["name"] for call in answer["calls"]]
    inputs = [one["input"] if "input" in one else json.loads(one["arguments"]) for one in calls]
    assert inputs == [json.loads(call["arguments"]) for call in answer["calls"]]
    if thinks and answer["reasoning"]:
        assert items[0]["type"] in THOUGHTS
        assert answer["reasoning"] in json.dumps(items[0])


async def check_token_count(agent: Client, exchange: Exchange, recording: RecordingUpstream) -> None:
    """Check that the token count of the request equals the length of the prompt that the engine got."""
    if kind_of(exchange) == "messages":
        answer = await agent.answered(exchange, exchange.path.replace("/messages", "/messages/count_tokens"))
        assert answer.json == {"input_tokens": len(recording.calls[-1][0].tokens) // 4}


async def check_side_request(agent: Client, exchange: Exchange, recording: RecordingUpstream) -> None:
    """Check that a request without a model call gets the recorded status and records no turn."""
    before = len(recording.calls)
    answer = await agent.answered(exchange)
    assert answer.status == exchange.status, answer.body
    if exchange.method == "POST":
        assert exchange.path.startswith("/v1/messages/count_tokens")
        assert MessageTokensCount.model_validate(answer.json).input_tokens > 0
    assert len(recording.calls) == before


def test_every_recorded_conversation_has_an_expected_tree() -> None:
    assert sorted(CONVERSATIONS) == sorted(TREES)


@pytest.mark.parametrize("client", list_clients())
def test_recordings_match_the_installed_agent_versions(client: str) -> None:
    (package,) = find_launcher(client).install.node
    turns = [turn for one in load_conversations(client).values() for turn in model_exchanges(one)]
    agents = {value for turn in turns for name, value in turn.headers.items() if name.lower() == "user-agent"}
    assert {value.partition("/")[2] for value in agents} == {package.rpartition("@")[2]}, "RECORD=1 records anew"


@pytest.mark.parametrize("client", list_clients())
def test_recordings_contain_the_typical_features_of_each_agent(client: str) -> None:
    conversations = load_conversations(client)
    turns = [turn for one in conversations.values() for turn in model_exchanges(one)]
    assert all(turn.status == 200 and turn.body["stream"] for turn in turns)
    text = json.dumps([turn.body for turn in turns])
    if client == "codex":
        kinds = {tool["type"] for turn in turns for tool in turn.body.get("tools", ())}
        assert kinds >= {"function", "namespace", "web_search"}
        assert all(turn.body["include"] == ["reasoning.encrypted_content"] for turn in turns)
        assert "rk1." in text
        assert "session-id" in turns[0].headers
        return
    assert any(message["role"] == "system" for turn in turns for message in turn.body["messages"])
    titles = [turn for turn in turns if "format" in turn.body["output_config"]]
    assert titles, "the title of a session is requested separately"
    assert all(
        turn.body["thinking"]["type"] == "adaptive" and turn.body["context_management"]
        for turn in turns
        if turn not in titles
    )
    assert all(turn.body["system"][0]["text"].startswith("x-anthropic-billing-header:") for turn in turns)
    positions = {str([cache_hints(message) for message in turn.body["messages"]]) for turn in turns}
    assert len(positions) > 1, "the cache hints move from turn to turn"
    assert '"signature"' in text
    assert {one.method for one in conversations["beside"]} == {"HEAD", "POST"}


def cache_hints(message: dict[str, Any]) -> list[bool]:
    content = message["content"]
    return ["cache_control" in block for block in content] if isinstance(content, list) else []
