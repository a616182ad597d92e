"""What a real agent says to the gateway, written down as it passes.

Promises:
- the agent and the gateway notice nothing: every byte goes on as it came, in both directions;
- an exchange is one request with its answer, in the order in which the requests came;
- with `RECORD=1` a test's exchanges become a fixture of the ordinary tests, without any prose that is not ours.
"""

import asyncio
import os
import socket
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pytest

from rookery.gateway.client import GatewayClient
from tests.gateway.dialects.recordings import OWN, Exchange, save_conversation
from tests.gateway.dialects.scrubber import Scrubber, find_foreign_text, find_surviving_runs

RECORD: Final = os.environ.get("RECORD", "") not in ("", "0")
_LIMIT: Final = 1 << 20


@dataclass
class Heard:
    """One request, and what was answered so far."""

    head: bytes
    body: bytes = b""
    status: int = 0
    answer: bytes = b""

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode()

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def headers(self) -> dict[str, str]:
        return _headers(self.head)

    @property
    def json(self) -> Any:
        """The body's; None where there is none."""
        if not self.body:
            return None
        coding = {name.lower(): value for name, value in self.headers.items()}.get("content-encoding", "")
        if coding == "gzip":
            return msgspec.json.decode(zlib.decompress(self.body, wbits=31))
        assert coding in ("", "identity"), f"a body in {coding} is read nowhere"
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a streamed answer."""
        lines = (line for line in self.answer.split(b"\n") if line.startswith(b"data: {"))
        return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines]


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:-2]
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@dataclass
class Recording:
    """The exchanges of one rollout."""

    heard: list[Heard] = field(default_factory=list)

    @property
    def posts(self) -> list[Heard]:
        return [one for one in self.heard if one.method == "POST"]

    def written(self, client: str, name: str) -> None:
        """Keeps them as a fixture, where that was asked for; scrubbed they are in any case, and looked through."""
        scrubber = Scrubber(OWN)
        exchanges = [
            Exchange(
                method=one.method,
                path=one.path,
                headers=scrubber.headers(one.headers),
                body=scrubber.body(one.json),
                status=one.status,
                answer=scrubber.body(score_answer(one)),
            )
            for one in self.heard
        ]
        told = [(one.body, one.answer) for one in exchanges]
        assert not find_surviving_runs([one.json for one in self.heard], told, OWN)
        assert not find_foreign_text(told, OWN)
        if RECORD:
            save_conversation(client, name, exchanges)


@asynccontextmanager
async def recording() -> AsyncIterator[Recording]:
    """Every door that opens meanwhile is listened at. Between the box and the shard stand two sockets of ours."""
    found = Recording()
    relays: list[asyncio.Server] = []
    under_way: set[asyncio.Task[Any]] = set()
    hand = GatewayClient.attach_listener

    async def handed(client: GatewayClient, session: str, listener: socket.socket) -> None:
        behind = socket.create_server(("127.0.0.1", 0))
        port = behind.getsockname()[1]

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            await _relayed(found, port, reader, writer)

        relays.append(await asyncio.start_server(relay, sock=listener, limit=_LIMIT))
        await hand(client, session, behind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatewayClient, "attach_listener", handed)
        try:
            yield found
        finally:
            for server in relays:
                server.close()
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)


async def _relayed(
    found: Recording, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection."""
    try:
        behind, shard = await asyncio.open_connection("127.0.0.1", port, limit=_LIMIT)
        try:
            while True:
                one = Heard(await reader.readuntil(b"\r\n\r\n"))
                found.heard.append(one)
                shard.write(one.head)
                one.body = await _passed(reader, shard, _headers(one.head))
                head = await behind.readuntil(b"\r\n\r\n")
                one.status = int(head.split(b" ", 2)[1])
                writer.write(head)
                if one.method != "HEAD":
                    one.answer = await _passed(behind, writer, _headers(head))
                await writer.drain()
        finally:
            shard.close()
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # either end went
    finally:
        writer.close()


async def _passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]) -> bytes:
    """The body that follows a head, passed on while it comes."""
    named = {name.lower(): value for name, value in headers.items()}
    if "transfer-encoding" not in named:
        body = await reader.readexactly(int(named.get("content-length", "0")))
        writer.write(body)
        return body
    body, size = b"", -1
    while size:
        line = await reader.readline()
        size = int(line, 16)
        piece = await reader.readexactly(size + 2)
        writer.write(line + piece)
        body += piece[:-2]
    return body


def score_answer(one: Heard) -> dict[str, Any] | None:
    """What a model said in an exchange: its text, reasoning and calls; None where none was asked."""
    if one.status != 200 or not one.events:
        return None
    said: dict[str, Any] = {"text": "", "reasoning": "", "calls": []}
    for event in one.events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                block = event["content_block"]
                said["calls"].append({"id": block["id"], "name": block["name"], "arguments": ""})
            case "content_block_delta":
                delta = event["delta"]
                said["text"] += delta.get("text", "")
                said["reasoning"] += delta.get("thinking", "")
                if "partial_json" in delta:
                    said["calls"][-1]["arguments"] += delta["partial_json"]
            case "response.output_item.done":
                item = event["item"]
                if item["type"] == "message":
                    said["text"] += "".join(part["text"] for part in item["content"])
                elif item["type"] == "reasoning":
                    said["reasoning"] += "".join(part["text"] for part in item["content"])
                elif item["type"] == "function_call":
                    name = "__".join(part for part in (item.get("namespace"), item["name"]) if part)
                    said["calls"].append({"id": item["call_id"], "name": name, "arguments": item["arguments"]})
            case _:
                pass
    return said
