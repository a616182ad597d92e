"""Floor of the benchmark `gateway`: the minimum that a recording proxy in Python costs. Runs in its own process.

It parses the request's JSON, forwards its bytes, decodes the sampled IDs and log probabilities of the answer,
writes them to a file together with the new message and the answer's message, and returns the answer's bytes. Every
proxy that records a call before it answers must do this. The prompt's IDs are neither decoded nor written, because
a gateway that has seen the previous turn only needs to compare their text; in a first turn this favours the
floor. It has no sessions, secrets, streams or error handling, and nothing reads its file: it is not for use.
"""

import asyncio
import struct
import sys
import tempfile
from functools import partial
from io import FileIO
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


class _MessageProtocol(asyncio.Protocol):
    """Collects HTTP messages with a Content-Length."""

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
            self.body_start = end + len(_HEAD_END)
            self.stop = self.body_start + (body_length(bytes(self.buffer[:end])) or 0)
        if len(self.buffer) >= self.stop:
            message, self.buffer, self.stop = bytes(self.buffer), bytearray(), -1
            self.message(message, message[self.body_start :])

    def message(self, whole: bytes, body: bytes) -> None:
        raise NotImplementedError


class _Upstream(_MessageProtocol):
    def __init__(self, idle: list["_Upstream"], record: FileIO) -> None:
        super().__init__()
        self.idle = idle
        self.record = record
        self.client: asyncio.Transport | None = None
        self.question = ""

    def message(self, whole: bytes, body: bytes) -> None:
        (choice,) = _DECODER.decode(body).choices
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        packed = struct.pack(f"<{len(choice.token_ids)}i{len(logprobs)}f", *choice.token_ids, *logprobs)
        self.record.write(b"".join((self.question.encode(), choice.message, packed)))
        assert self.client is not None
        self.client.write(whole)
        self.idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self in self.idle:
            self.idle.remove(self)
        if self.client is not None:
            self.client.abort()


_DECODER = msgspec.json.Decoder(_Answer)


class _Client(_MessageProtocol):
    def __init__(self, port: int, record: FileIO, idle: list[_Upstream], tasks: set[asyncio.Task[None]]) -> None:
        super().__init__()
        self.port, self.record, self.idle, self.tasks = port, record, idle, tasks

    def message(self, whole: bytes, body: bytes) -> None:  # noqa: ARG002
        question = orjson.loads(body)["messages"][-1]["content"]
        # A task per request, because any real proxy has to await something.
        task = asyncio.get_running_loop().create_task(self._forward(body, question))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _forward(self, body: bytes, question: str) -> None:
        if self.idle:
            upstream = self.idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, upstream = await loop.create_connection(
                partial(_Upstream, self.idle, self.record), "127.0.0.1", self.port
            )
        upstream.client, upstream.question = self.transport, question
        assert upstream.transport is not None
        request_head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        upstream.transport.write(request_head + body)


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryFile(buffering=0) as record:
        client = partial(_Client, port, record, [], set())
        server = await loop.create_server(client, "127.0.0.1", 0, backlog=BACKLOG)
        print(f"floor at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1])))
