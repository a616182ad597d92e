"""A gateway that renders and records tokens, and what must hold of every session's trajectory there."""

import base64
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
from tests.gateway.kit import Answered, Gateway, Registered, request, served
from tests.gateway.rooms import Noting


@asynccontextmanager
async def rendered(
    folder: Path, upstream: Upstream | None = None, rendering: ChatRenderer | None = None
) -> AsyncIterator[tuple[Gateway, Noting]]:
    """A shard that records tokens; without an upstream, of the real embedded policy. All calls are noted."""
    real = upstream or EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=("embedded",)))
    noting = Noting(real)
    async with served(folder, noting) as gateway:
        offloop = ThreadedRenderer(rendering or EmbeddedRenderer())
        roles = cast("dict[str, Any]", gateway.shard.registry.roles)
        roles["policy"] = msgspec.structs.replace(roles["policy"], record="tokens", rendering=offloop)
        try:
            yield gateway, noting
        finally:
            await offloop.close()


async def exact(
    gateway: Gateway, session: Registered, noting: Noting, *, segments: int | None = None
) -> list[Any]:
    """The turns, after it was checked that each is what the engine sampled, byte for byte, and trains once."""
    answer = await gateway.ask("GET", f"/rollouts/{session.id}/trajectory", Accept="application/msgpack")
    found = msgspec.msgpack.decode(answer.body)
    turns = {turn["index"]: turn for turn in found["turns"]}
    prompts: dict[int, bytes] = {}
    for index, turn in sorted(turns.items()):
        before = b""
        if turn.get("prefix"):
            parent = turns[turn["parent"]]
            before = prompts[turn["parent"]] + parent["sampled"]
            assert len(before) == 4 * turn["prefix"]
        prompts[index] = before + turn["prompt"]
    sampled = sorted((prompts[index], turn["sampled"], turn.get("logprobs")) for index, turn in turns.items())
    assert sampled == sorted((request.tokens, reply.sampled, reply.logprobs) for request, reply in noting.noted)
    trained: list[int] = []
    for segment in found["segments"]:
        trained += segment["turns"]
        for index in segment["turns"]:
            start, own = len(prompts[index]), turns[index]["sampled"]
            assert segment["tokens"][:start] == prompts[index]
            assert segment["tokens"][start : start + len(own)] == own
            assert segment["mask"][start // 4 : (start + len(own)) // 4] == b"\x01" * (len(own) // 4)
        assert segment["mask"].count(1) == sum(len(turns[index]["sampled"]) // 4 for index in segment["turns"])
    assert sorted(trained) == sorted(turns), "every turn trains once"
    if segments is not None:
        assert len(found["segments"]) == segments
    return [turns[index] for index in sorted(turns)]


async def sent(
    gateway: Gateway, session: Registered, path: str, body: bytes, headers: dict[str, str]
) -> list[Any]:
    """The events that come back."""
    async with await gateway.wire() as wire:
        wire.send(request("POST", f"{session.path}{path}", body, x_api_key=session.secret, **headers))
        return events_of(await wire.answer())


def events_of(answer: Answered) -> list[Any]:
    """Of a whole stream whose events have names."""
    assert answer.status == 200, answer.body
    assert answer.whole
    events = []
    for part in answer.body.split(b"\n\n")[:-1]:
        name, data = part.split(b"\n")
        events.append(msgspec.json.decode(data.removeprefix(b"data: ")))
        assert name == f"event: {events[-1]['type']}".encode()
    return events


def sealed(text: str) -> str:
    return "rk1." + base64.urlsafe_b64encode(text.encode()).decode()
