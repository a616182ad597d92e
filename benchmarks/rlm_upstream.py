"""Upstream of the benchmark `rlm`: an instant root model and instant sub-models. Runs in its own process.

Behaviour:
- the first answer of the root model is the cell in its task's prompt, and its second answer ends the attempt;
- a sub-model returns a few tokens with IDs, at once, or after 100 ms if its prompt asks for that;
- everything else is as in `instant_model`: persistent connections, bounded memory, exit with standard input.
"""

import asyncio
from functools import partial
from typing import Any

import orjson

from benchmarks.instant_model import InstantProtocol, Replies, http_response, main, token_reply

WAIT = "take 100 ms"
WAIT_SECONDS = 0.1
CELL = "Run this: "
_CHAT = b"POST /v1/chat/completions "
TOKENS = 8


def root_reply(messages: list[dict[str, Any]]) -> str | None:
    """Return the text of the root model, or None if a sub-model was asked."""
    prompt = next((one["content"] for one in messages if one["content"].startswith(CELL)), None)
    if prompt is None:
        return None
    return "done" if messages[-1]["content"] != prompt else f"<code>{prompt.removeprefix(CELL)}"


class RlmProtocol(InstantProtocol):
    """Serves one connection."""

    __slots__ = ("sub_model_reply",)

    def __init__(self, replies: Replies) -> None:
        super().__init__(replies)
        self.sub_model_reply = http_response("200 OK", token_reply(TOKENS))

    def answer(self, transport: asyncio.Transport, head: bytes, body: bytes) -> bool:
        if not head.startswith(_CHAT):
            return super().answer(transport, head, body)
        if WAIT.encode() in body and CELL.encode() not in body:
            transport.pause_reading()  # answers keep the order of their requests
            asyncio.get_running_loop().call_later(WAIT_SECONDS, self._send_late, transport)
            return False
        text = root_reply(orjson.loads(body)["messages"]) if CELL.encode() in body else None
        if text is None:
            transport.write(self.sub_model_reply)
        else:
            whole = token_reply(TOKENS)
            whole["choices"][0]["message"]["content"] = text
            transport.write(http_response("200 OK", whole))
        return True

    def _send_late(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        transport.write(self.sub_model_reply)
        transport.resume_reading()
        self.data_received(b"")


if __name__ == "__main__":
    main(partial(RlmProtocol, Replies()))
