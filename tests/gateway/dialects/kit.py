"""Shard that renders chats and records tokens, and a check of the trajectories it records."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.gateway.chat_renderers.protocol import ChatRenderer
from rookery.gateway.chat_renderers.threaded import ThreadedRenderer
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.embedded import EmbeddedUpstream
from rookery.upstreams.protocol import Upstream
from tests.gateway.kit import HttpResponse, InProcessGateway, RegisteredSession, request, run_shard
from tests.gateway.session_kit import RecordingUpstream


@asynccontextmanager
async def run_token_shard(
    folder: Path, upstream: Upstream | None = None, rendering: ChatRenderer | None = None
) -> AsyncIterator[tuple[InProcessGateway, RecordingUpstream]]:
    """Run a shard in `tokens` mode over an upstream that records all calls (default: the embedded policy)."""
    inner = upstream or EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=("embedded",)))
    recording = RecordingUpstream(inner)
    async with run_shard(folder, recording) as gateway:
        threaded = ThreadedRenderer(rendering or EmbeddedRenderer())
        roles = cast("dict[str, Any]", gateway.shard.registry.roles)
        roles["policy"] = msgspec.structs.replace(roles["policy"], record="tokens", rendering=threaded)
        try:
            yield gateway, recording
        finally:
            await threaded.close()


async def check_exact_turns(
    gateway: InProcessGateway,
    session: RegisteredSession,
    recording: RecordingUpstream,
    *,
    segments: int | None = None,
) -> list[Any]:
    """Check that every turn holds exactly what the engine sampled and trains once; return the turns."""
    answer = await gateway.request("GET", f"/rollouts/{session.id}/trajectory", Accept="application/msgpack")
    trajectory = msgspec.msgpack.decode(answer.body)
    turns = {turn["index"]: turn for turn in trajectory["turns"]}
    prompts: dict[int, bytes] = {}
    for index, turn in sorted(turns.items()):
        before = b""
        if turn.get("prefix"):
            parent = turns[turn["parent"]]
            before = prompts[turn["parent"]] + parent["sampled"]
            assert len(before) == 4 * turn["prefix"]
        prompts[index] = before + turn["prompt"]
    sampled = sorted((prompts[index], turn["sampled"], turn.get("logprobs")) for index, turn in turns.items())
    assert sampled == sorted((request.tokens, reply.sampled, reply.logprobs) for request, reply in recording.calls)
    trained: list[int] = []
    for segment in trajectory["segments"]:
        trained += segment["turns"]
        for index in segment["turns"]:
            start, sampled_ids = len(prompts[index]), turns[index]["sampled"]
            assert segment["tokens"][:start] == prompts[index]
            assert segment["tokens"][start : start + len(sampled_ids)] == sampled_ids
            assert segment["mask"][start // 4 : (start + len(sampled_ids)) // 4] == b"\x01" * (
                len(sampled_ids) // 4
            )
        assert segment["mask"].count(1) == sum(len(turns[index]["sampled"]) // 4 for index in segment["turns"])
    assert sorted(trained) == sorted(turns), "every turn trains once"
    if segments is not None:
        assert len(trajectory["segments"]) == segments
    return [turns[index] for index in sorted(turns)]


async def post_stream(
    gateway: InProcessGateway, session: RegisteredSession, path: str, body: bytes, headers: dict[str, str]
) -> list[Any]:
    """Post a request and return the events of the streamed response."""
    async with await gateway.connect() as connection:
        connection.send(request("POST", f"{session.path}{path}", body, x_api_key=session.secret, **headers))
        return parse_named_events(await connection.read_response())


def parse_named_events(answer: HttpResponse) -> list[Any]:
    """Decode a complete stream of named events."""
    assert answer.status == 200, answer.body
    assert answer.complete
    events = []
    for part in answer.body.split(b"\n\n")[:-1]:
        name, data = part.split(b"\n")
        events.append(msgspec.json.decode(data.removeprefix(b"data: ")))
        assert name == f"event: {events[-1]['type']}".encode()
    return events
