"""The floor of the `gateway` bench: the least that forwarding and reading an answer can cost in this language.

A connection's request is read to its JSON and sent on as it came, the answer's sampled ids and logprobs are
decoded and its bytes are sent back. The prompt's ids are looked through and not decoded: who has seen the last
turn needs to compare no more than their text. No sessions, no records, no streams, no errors that anybody could
understand: never for use.
"""

import asyncio
import sys
from functools import partial
from typing import cast

import msgspec
import orjson
import uvloop

from benchmarks.instant_model import BACKLOG, body_length

_HEAD_END = b"\r\n\r\n"


class _Logprob(msgspec.Struct, gc=False):
    token: str
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    message: msgspec.Raw
    logprobs: _Logprobs
    token_ids: list[int]


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: msgspec.Raw


class _Half(asyncio.Protocol):
    """Collects messages, head and body."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.buffer = bytearray()
        self.stop = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.stop < 0:
            end = self.buffer.find(_HEAD_END)
            if end < 0:
                return
            self.begin = end + 4
            self.stop = self.begin + (body_length(bytes(self.buffer[:end])) or 0)
        if len(self.buffer) >= self.stop:
            message, self.buffer, self.stop = bytes(self.buffer), bytearray(), -1
            self.message(message, message[self.begin :])

    def message(self, whole: bytes, body: bytes) -> None:
        raise NotImplementedError


class _Upstream(_Half):
    def __init__(self, idle: list["_Upstream"]) -> None:
        super().__init__()
        self.idle = idle
        self.client: asyncio.Transport | None = None

    def message(self, whole: bytes, body: bytes) -> None:
        _DECODER.decode(body)
        assert self.client is not None
        self.client.write(whole)
        self.idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self in self.idle:
            self.idle.remove(self)
        if self.client is not None:
            self.client.abort()


_DECODER = msgspec.json.Decoder(_Answer)


class _Client(_Half):
    def __init__(self, port: int, idle: list[_Upstream], tasks: set[asyncio.Task[None]]) -> None:
        super().__init__()
        self.port, self.idle, self.tasks = port, idle, tasks

    def message(self, whole: bytes, body: bytes) -> None:  # noqa: ARG002
        orjson.loads(body)
        # A task for each request, as everything that awaits needs one.
        task = asyncio.get_running_loop().create_task(self._forward(body))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _forward(self, body: bytes) -> None:
        if self.idle:
            upstream = self.idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, upstream = await loop.create_connection(partial(_Upstream, self.idle), "127.0.0.1", self.port)
        upstream.client = self.transport
        assert upstream.transport is not None
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        upstream.transport.write(head + body)


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    client = partial(_Client, port, [], set())
    server = await loop.create_server(client, "127.0.0.1", 0, backlog=BACKLOG)
    print(f"floor at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1])))
