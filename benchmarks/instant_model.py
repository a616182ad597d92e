"""The instant model: an HTTP server with canned chat completions, so that a benchmark measures only the caller.

It runs in its own process and has three endpoints. `/v1` returns 256 tokens with token IDs and log probabilities,
`/plain/v1` returns the same text without them, and `/tools/v1` requests a tool call twice and then replies like
`/plain/v1`.

Guarantees:
- every reply is a complete, valid chat completion in the format of vLLM, with a Content-Length;
- connections are kept alive; requests may arrive in pieces or pipelined;
- a request that is too large or malformed is answered with 400 and its connection is closed, so memory is bounded;
- the server exits when its standard input is closed, so it never outlives the process that started it.
"""

import argparse
import asyncio
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
import uvloop

from benchmarks import CHECKOUT

TOKENS = 256
PROMPT_TOKENS = 24
BACKLOG = 4096
MAX_HEAD = 64 * 1024
MAX_BODY = 16 * 1024 * 1024
MODEL = "instant"
_END = b"\r\n\r\n"
_WORDS = (" the", " answer", " is", " 42", ",", " since", " six", " times", " seven", " makes", " so", ".")


class InstantModel(NamedTuple):
    """Origin and PID of a running instant model."""

    origin: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.origin.rpartition(":")[2])

    @property
    def tokens_url(self) -> str:
        return f"{self.origin}/v1"

    @property
    def plain_url(self) -> str:
        return f"{self.origin}/plain/v1"

    @property
    def tools_url(self) -> str:
        return f"{self.origin}/tools/v1"


@asynccontextmanager
async def instant_model(module: str = "benchmarks.instant_model", *arguments: str) -> AsyncIterator[InstantModel]:
    """Run this server, or another module with the same interface, in its own process until the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        cwd=CHECKOUT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C goes to the benchmark only, which stops the server itself
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise RuntimeError("the instant model did not start; its error message is on stderr")
        yield InstantModel(f"http://127.0.0.1:{int(line)}", process.pid)
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            pass  # killed below
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def token_reply(tokens: int = TOKENS) -> dict[str, Any]:
    """Return a chat completion in the format of vLLM, with token IDs and log probabilities."""
    rng = random.Random(tokens)  # noqa: S311  (the same bytes at every start, with full-length floats)
    pieces = [_WORDS[i % len(_WORDS)] for i in range(tokens)]
    content = [
        {
            "token": piece,
            "logprob": -rng.expovariate(3.0),
            "bytes": list(piece.encode()),
            "top_logprobs": [],
        }
        for piece in pieces
    ]
    reply = plain_reply(tokens)
    choice = reply["choices"][0]
    choice["logprobs"] = {"content": content}
    choice["token_ids"] = [rng.randrange(150_000) for _ in pieces]
    reply["prompt_token_ids"] = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    return reply


def plain_reply(tokens: int = TOKENS) -> dict[str, Any]:
    """Return the same chat completion without token IDs and log probabilities."""
    text = "".join(_WORDS[i % len(_WORDS)] for i in range(tokens))
    return _completion({"role": "assistant", "content": text}, "stop", tokens)


def tool_reply(call: int) -> dict[str, Any]:
    """Return a chat completion that calls the tool `echo`."""
    function = {"name": "echo", "arguments": '{"text": "hi"}'}
    tool_call = {"id": f"call_{call}", "type": "function", "function": function}
    return _completion({"role": "assistant", "content": None, "tool_calls": [tool_call]}, "tool_calls", 16)


def _completion(message: dict[str, Any], finish: str, tokens: int) -> dict[str, Any]:
    return {
        "id": "chatcmpl-instant",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": tokens,
            "total_tokens": PROMPT_TOKENS + tokens,
        },
    }


def http_response(status: str, body: object, *, close: bool = False) -> bytes:
    """Return a complete HTTP response as bytes."""
    payload = orjson.dumps(body)
    connection = "close" if close else "keep-alive"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: {connection}\r\n\r\n"
    )
    return head.encode() + payload


class Replies:
    """All responses of the server, serialized once."""

    def __init__(self) -> None:
        self.tokens = http_response("200 OK", token_reply())
        self.plain = http_response("200 OK", plain_reply())
        self.tools = tuple(http_response("200 OK", tool_reply(call)) for call in range(2))
        models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]}
        self.models = http_response("200 OK", models)
        self.unknown = http_response("404 Not Found", {"error": {"message": "no such path", "code": 404}})
        self.bad_request = http_response(
            "400 Bad Request", {"error": {"message": "not understood", "code": 400}}, close=True
        )

    def reply_to(self, start: bytes, body: bytes) -> bytes:
        """Return the response to a request line and body."""
        if start.startswith(b"POST /v1/chat/completions "):
            return self.tokens
        if start.startswith(b"POST /plain/v1/chat/completions "):
            return self.plain
        if start.startswith(b"POST /tools/v1/chat/completions "):
            done = body.count(b'"tool_call_id"')
            return self.tools[done] if done < len(self.tools) else self.plain
        if start.startswith(b"GET ") and start.split(b" ", 2)[1].endswith(b"/v1/models"):
            return self.models
        return self.unknown


class InstantProtocol(asyncio.Protocol):
    """Serves one connection. It parses no more of a request than its length."""

    __slots__ = ("buffer", "replies", "transport")

    def __init__(self, replies: Replies) -> None:
        self.replies = replies
        self.buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        self.buffer = self.buffer + data if self.buffer else data
        while self.buffer:
            end = self.buffer.find(_END)
            if end < 0:
                if len(self.buffer) > MAX_HEAD:
                    self._refuse(self.transport)
                return
            length = body_length(self.buffer[:end])
            if length is None or length > MAX_BODY:
                self._refuse(self.transport)
                return
            start, stop = end + len(_END), end + len(_END) + length
            if len(self.buffer) < stop:
                return
            head, body = self.buffer[:end], self.buffer[start:stop]
            self.buffer = self.buffer[stop:]
            if not self.answer(self.transport, head, body):
                return

    def answer(self, transport: asyncio.Transport, head: bytes, body: bytes) -> bool:
        """Answer one request. Return False to make later requests wait until `data_received` is called again."""
        transport.write(self.replies.reply_to(head, body))
        return True

    def _refuse(self, transport: asyncio.Transport) -> None:
        self.buffer = b""
        transport.write(self.replies.bad_request)
        transport.close()


def body_length(head: bytes) -> int | None:
    """Return the body length that the headers announce, or None if it is chunked or invalid."""
    lowered = head.lower()
    if b"\r\ntransfer-encoding:" in lowered:
        return None
    at = lowered.find(b"\r\ncontent-length:")
    if at < 0:
        return 0
    value = lowered[at + 17 :].split(b"\r\n", 1)[0].strip()
    return int(value) if value.isdigit() and len(value) < 12 else None


class _StdinWatcher(asyncio.Protocol):
    """Sets an event when standard input is closed."""

    def __init__(self, ended: asyncio.Event) -> None:
        self.ended = ended

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.ended.set()


async def serve(port: int, port_file: Path | None, connection: Callable[[], asyncio.Protocol]) -> None:
    """Serve until standard input is closed. The port is printed to standard output."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    await loop.connect_read_pipe(partial(_StdinWatcher, ended), sys.stdin.buffer)
    listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
    server = await loop.create_server(connection, sock=listener, backlog=BACKLOG)
    bound = listener.getsockname()[1]
    print(bound, flush=True)
    if port_file is not None:
        staging = port_file.with_name(f"{port_file.name}.part")
        staging.write_text(f"{bound}\n")
        staging.replace(port_file)
    await ended.wait()
    # Open connections are not awaited: they end with the process.
    server.close()


def main(connection: Callable[[], asyncio.Protocol] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Serve canned chat completions, to measure the caller.")
    parser.add_argument("--port", type=int, default=0, help="0 selects a free port")
    parser.add_argument("--port-file", type=Path, help="also write the port to this file")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(args.port, args.port_file, connection or partial(InstantProtocol, Replies())))


if __name__ == "__main__":
    main()
