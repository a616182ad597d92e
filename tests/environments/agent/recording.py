"""Record the traffic of a real agent with the gateway by relaying its connections.

Every byte is forwarded unchanged in both directions. An exchange is one request with its response, in the order of
the requests. With `RECORD=1` the exchanges of a test are saved as a fixture of the ordinary tests, without the
agent's own prose.
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
class RecordedExchange:
    """One request and the part of its response that has arrived."""

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
        """The decoded body, or None if it is empty."""
        if not self.body:
            return None
        coding = {name.lower(): value for name, value in self.headers.items()}.get("content-encoding", "")
        if coding == "gzip":
            return msgspec.json.decode(zlib.decompress(self.body, wbits=31))
        assert coding in ("", "identity"), f"the content encoding {coding} is not supported"
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a streamed response."""
        lines = (line for line in self.answer.split(b"\n") if line.startswith(b"data: {"))
        return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines]


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:-2]
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@dataclass
class Recording:
    """The exchanges of one rollout."""

    exchanges: list[RecordedExchange] = field(default_factory=list)

    @property
    def posts(self) -> list[RecordedExchange]:
        return [exchange for exchange in self.exchanges if exchange.method == "POST"]

    def save(self, client: str, name: str) -> None:
        """Scrub and check the exchanges, and save them as a fixture if `RECORD` is set."""
        scrubber = Scrubber(OWN)
        fixtures = [
            Exchange(
                method=exchange.method,
                path=exchange.path,
                headers=scrubber.headers(exchange.headers),
                body=scrubber.body(exchange.json),
                status=exchange.status,
                answer=scrubber.body(parse_reply(exchange)),
            )
            for exchange in self.exchanges
        ]
        scrubbed = [(exchange.body, exchange.answer) for exchange in fixtures]
        assert not find_surviving_runs([exchange.json for exchange in self.exchanges], scrubbed, OWN)
        assert not find_foreign_text(scrubbed, OWN)
        if RECORD:
            save_conversation(client, name, fixtures)


@asynccontextmanager
async def record_traffic() -> AsyncIterator[Recording]:
    """Relay and record the connections of every gateway session that opens inside the block."""
    recording = Recording()
    relays: list[asyncio.Server] = []
    connections: set[asyncio.Task[Any]] = set()
    original = GatewayClient.attach_listener

    async def attach_relay(client: GatewayClient, session: str, listener: socket.socket) -> None:
        relayed = socket.create_server(("127.0.0.1", 0))
        port = relayed.getsockname()[1]

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            task.add_done_callback(connections.discard)
            await _relay_connection(recording, port, reader, writer)

        relays.append(await asyncio.start_server(relay, sock=listener, limit=_LIMIT))
        await original(client, session, relayed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatewayClient, "attach_listener", attach_relay)
        try:
            yield recording
        finally:
            for server in relays:
                server.close()
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)


async def _relay_connection(
    recording: Recording, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Relay one connection."""
    try:
        gateway_reader, gateway_writer = await asyncio.open_connection("127.0.0.1", port, limit=_LIMIT)
        try:
            while True:
                exchange = RecordedExchange(await reader.readuntil(b"\r\n\r\n"))
                recording.exchanges.append(exchange)
                gateway_writer.write(exchange.head)
                exchange.body = await _forward_body(reader, gateway_writer, _headers(exchange.head))
                head = await gateway_reader.readuntil(b"\r\n\r\n")
                exchange.status = int(head.split(b" ", 2)[1])
                writer.write(head)
                if exchange.method != "HEAD":
                    exchange.answer = await _forward_body(gateway_reader, writer, _headers(head))
                await writer.drain()
        finally:
            gateway_writer.close()
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # one end closed the connection
    finally:
        writer.close()


async def _forward_body(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]
) -> bytes:
    """Forward the body that follows a head, and return it."""
    lower_headers = {name.lower(): value for name, value in headers.items()}
    if "transfer-encoding" not in lower_headers:
        body = await reader.readexactly(int(lower_headers.get("content-length", "0")))
        writer.write(body)
        return body
    body, size = b"", -1
    while size:
        line = await reader.readline()
        size = int(line, 16)
        chunk = await reader.readexactly(size + 2)
        writer.write(line + chunk)
        body += chunk[:-2]
    return body


def parse_reply(exchange: RecordedExchange) -> dict[str, Any] | None:
    """Return the text, reasoning and calls of a streamed model reply; None if the response is not one."""
    if exchange.status != 200 or not exchange.events:
        return None
    reply: dict[str, Any] = {"text": "", "reasoning": "", "calls": []}
    for event in exchange.events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                block = event["content_block"]
                reply["calls"].append({"id": block["id"], "name": block["name"], "arguments": ""})
            case "content_block_delta":
                delta = event["delta"]
                reply["text"] += delta.get("text", "")
                reply["reasoning"] += delta.get("thinking", "")
                if "partial_json" in delta:
                    reply["calls"][-1]["arguments"] += delta["partial_json"]
            case "response.output_item.done":
                item = event["item"]
                if item["type"] == "message":
                    reply["text"] += "".join(part["text"] for part in item["content"])
                elif item["type"] == "reasoning":
                    reply["reasoning"] += "".join(part["text"] for part in item["content"])
                elif item["type"] == "function_call":
                    name = "__".join(part for part in (item.get("namespace"), item["name"]) if part)
                    reply["calls"].append({"id": item["call_id"], "name": name, "arguments": item["arguments"]})
            case _:
                pass
    return reply
