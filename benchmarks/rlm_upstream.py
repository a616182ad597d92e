"""The upstream of the `rlm` bench: the instant model, as a root that runs the cell of its task, and as sub-models.

Promises:
- a root's first answer is the cell that its task's prompt holds, its second one ends the attempt;
- a sub-model answers a few tokens with ids, at once, or 100 ms later where its prompt asks for that;
- otherwise it is the instant model: connections are kept, memory is bounded, it ends with its standard input.
"""

import asyncio
from functools import partial
from typing import Any

import orjson

from benchmarks.instant_model import InstantProtocol, Replies, http_answer, main, token_reply

WAIT = "take 100 ms"
SECONDS = 0.1
CELL = "Run this: "
_CHAT = b"POST /v1/chat/completions "
TOKENS = 8


def reply_to(messages: list[dict[str, Any]]) -> str | None:
    """What a root says; None for a sub-model, which says the same to all."""
    prompt = next((one["content"] for one in messages if one["content"].startswith(CELL)), None)
    if prompt is None:
        return None
    return "done" if messages[-1]["content"] != prompt else f"<code>{prompt.removeprefix(CELL)}"


class RlmProtocol(InstantProtocol):
    """One connection."""

    __slots__ = ("sub",)

    def __init__(self, replies: Replies) -> None:
        super().__init__(replies)
        self.sub = http_answer("200 OK", token_reply(TOKENS))

    def answer(self, transport: asyncio.Transport, head: bytes, body: bytes) -> bool:
        if not head.startswith(_CHAT):
            return super().answer(transport, head, body)
        if WAIT.encode() in body and CELL.encode() not in body:
            transport.pause_reading()  # answers keep the order of their requests
            asyncio.get_running_loop().call_later(SECONDS, self._late, transport)
            return False
        said = reply_to(orjson.loads(body)["messages"]) if CELL.encode() in body else None
        if said is None:
            transport.write(self.sub)
        else:
            whole = token_reply(TOKENS)
            whole["choices"][0]["message"]["content"] = said
            transport.write(http_answer("200 OK", whole))
        return True

    def _late(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        transport.write(self.sub)
        transport.resume_reading()
        self.data_received(b"")


if __name__ == "__main__":
    main(partial(RlmProtocol, Replies()))
