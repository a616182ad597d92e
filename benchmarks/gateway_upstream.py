"""The upstream of the `gateway` bench: vLLM's chat completions, at once, with what a recorder needs.

Promises:
- an answer is whole, under a Content-Length, or a stream of one event for each token, each a chunk of its own;
- a stream's first token comes at once and the others 5 ms later, together: the first byte is seen alone;
- asked for its state, it is healthy and takes 4,096 requests at once;
- otherwise it is the instant model: connections are kept, memory is bounded, it ends with its standard input.
"""

import asyncio
from functools import partial

from benchmarks.gateway_payloads import asked, streamed_answer, whole_answer
from benchmarks.instant_model import InstantProtocol, Replies, http_answer, main

OTHERS_AFTER = 0.005
_CHAT = b"POST /v1/chat/completions "
_STREAMS = (b'"stream":true', b'"stream": true')
_WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class AskedReplies(Replies):
    """Answers what the last question of a request asks for."""

    def __init__(self) -> None:
        super().__init__()
        info = {"scheduler_config": {"max_num_seqs": 4096}, "parallel_config": {"data_parallel_size": 1}}
        self.told = {
            b"/health": http_answer("200 OK", {}),
            b"/server_info": http_answer("200 OK", {"vllm_config": info}),
        }

    def to(self, start: bytes, body: bytes) -> bytes:
        if not start.startswith(_CHAT):
            path = start.split(b" ", 2)[1].partition(b"?")[0] if start.startswith(b"GET ") else b""
            return self.told.get(path) or super().to(start, body)
        found = asked(body)
        if found is None:
            return self.refused
        answer = whole_answer(*found)
        return _WHOLE % len(answer) + answer


class UpstreamProtocol(InstantProtocol):
    """One connection."""

    __slots__ = ()

    def answer(self, transport: asyncio.Transport, head: bytes, body: bytes) -> bool:
        found = asked(body) if head.startswith(_CHAT) and any(mark in body for mark in _STREAMS) else None
        if found is None:
            return super().answer(transport, head, body)
        first, others = streamed_answer(*found)
        transport.write(_STREAM + first)
        # Nothing is read meanwhile, so that answers keep the order of their requests.
        transport.pause_reading()
        asyncio.get_running_loop().call_later(OTHERS_AFTER, self._go_on, transport, others)
        return False

    def _go_on(self, transport: asyncio.Transport, others: bytes) -> None:
        if transport.is_closing():
            return
        transport.write(others)
        transport.resume_reading()
        self.data_received(b"")


if __name__ == "__main__":
    main(partial(UpstreamProtocol, AskedReplies()))
