"""Upstream of the benchmark `gateway`: vLLM's chat completions without delay. Runs in its own process.

Behaviour:
- an answer is either complete with a Content-Length, or a stream with one event and one HTTP chunk per token;
- a stream's first token is sent at once and the others together 5 ms later, so the first byte can be timed;
- it reports that it is healthy and accepts 4,096 concurrent requests;
- everything else is as in `instant_model`: persistent connections, bounded memory, exit with standard input.
"""

import asyncio
from functools import partial

from benchmarks.gateway_payloads import full_answer, parse_question, stream_answer
from benchmarks.instant_model import InstantProtocol, Replies, http_response, main

REST_DELAY = 0.005
_CHAT = b"POST /v1/chat/completions "
_STREAM_FLAGS = (b'"stream":true', b'"stream": true')
_FULL_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class NumberedReplies(Replies):
    """Answers the question in the last message of a request."""

    def __init__(self) -> None:
        super().__init__()
        info = {"scheduler_config": {"max_num_seqs": 4096}, "parallel_config": {"data_parallel_size": 1}}
        self.status_replies = {
            b"/health": http_response("200 OK", {}),
            b"/server_info": http_response("200 OK", {"vllm_config": info}),
        }

    def reply_to(self, start: bytes, body: bytes) -> bytes:
        if not start.startswith(_CHAT):
            path = start.split(b" ", 2)[1].partition(b"?")[0] if start.startswith(b"GET ") else b""
            return self.status_replies.get(path) or super().reply_to(start, body)
        question = parse_question(body)
        if question is None:
            return self.bad_request
        answer = full_answer(*question)
        return _FULL_HEAD % len(answer) + answer


class UpstreamProtocol(InstantProtocol):
    """Serves one connection, with streams."""

    __slots__ = ()

    def answer(self, transport: asyncio.Transport, request_head: bytes, body: bytes) -> bool:
        question = (
            parse_question(body)
            if request_head.startswith(_CHAT) and any(mark in body for mark in _STREAM_FLAGS)
            else None
        )
        if question is None:
            return super().answer(transport, request_head, body)
        first, rest = stream_answer(*question)
        transport.write(_STREAM_HEAD + first)
        # Reading is paused so that answers keep the order of their requests.
        transport.pause_reading()
        asyncio.get_running_loop().call_later(REST_DELAY, self._send_rest, transport, rest)
        return False

    def _send_rest(self, transport: asyncio.Transport, rest: bytes) -> None:
        if transport.is_closing():
            return
        transport.write(rest)
        transport.resume_reading()
        self.data_received(b"")


if __name__ == "__main__":
    main(partial(UpstreamProtocol, NumberedReplies()))
