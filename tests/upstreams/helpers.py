"""Shared helpers for tests of HTTP upstreams."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rookery.core import Message, UpstreamError
from rookery.upstreams import ModelReply, ModelRequest, UpstreamConfig
from rookery.upstreams.http_upstream import HttpUpstream
from rookery.upstreams.openai import OpenAIUpstream
from rookery.upstreams.protocol import Delta
from rookery.upstreams.retry import Backoff
from rookery.upstreams.sglang import SglangUpstream
from rookery.upstreams.vllm import VllmUpstream

KEY = "sk-sesame-0123456789"
REQUEST = ModelRequest(model="test-model", messages=(Message("user", "hi"),))


@asynccontextmanager
async def upstream(*urls: str, key: str | None = KEY, **config: Any) -> AsyncIterator[OpenAIUpstream]:
    built = OpenAIUpstream(UpstreamConfig(urls=urls, model="test-model", **config), key=key)
    built.backoff = Backoff(retries=built.config.retries, base=0.001)
    try:
        yield built
    finally:
        await built.close()


KINDS: dict[str, type[HttpUpstream]] = {"openai": OpenAIUpstream, "vllm": VllmUpstream, "sglang": SglangUpstream}


@asynccontextmanager
async def of_kind(kind: str, *urls: str, **config: Any) -> AsyncIterator[Any]:
    """Open an upstream of the kind whose retries do not wait."""
    built = KINDS[kind](UpstreamConfig(kind=kind, urls=urls, model="m", **config), key=KEY)
    built.backoff = Backoff(retries=built.config.retries, base=0.001)
    try:
        yield built
    finally:
        await built.close()


class DeltaLog:
    """Record the deltas of a call."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    async def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def __getattr__(self, name: str) -> Any:
        empty = b"" if name in ("sampled", "logprobs", "prompt") else ""
        return empty.join(getattr(delta, name) for delta in self.deltas)  # type: ignore[attr-defined]

    def calls(self) -> list[tuple[str, str, str]]:
        """Return ID, name and arguments of each tool call, joined from its pieces."""
        built: list[list[str]] = []
        for piece in (piece for delta in self.deltas for piece in delta.tool_calls):
            if piece.index == len(built):
                built.append(["", "", ""])
            for at, part in enumerate((piece.id, piece.name, piece.arguments)):
                built[piece.index][at] += part
        return [(one[0], one[1], one[2]) for one in built]

    def begins(self, reply: ModelReply) -> None:
        """Return whether the deltas are the beginning of the reply; here, all of it."""
        message = reply.message
        assert self.content == message.text
        assert self.reasoning == (message.reasoning or "")
        assert self.calls() == [(call.id, call.name, call.arguments) for call in message.tool_calls]
        assert (self.sampled, self.logprobs) == (reply.sampled, reply.logprobs)
        assert tuple(top for delta in self.deltas for top in delta.tops) == reply.tops


async def fails(built: OpenAIUpstream, cause: str, request: ModelRequest = REQUEST, timeout: float = 30) -> str:
    with pytest.raises(UpstreamError) as caught:
        await built.complete(request, timeout=timeout)
    assert caught.value.code == cause, caught.value
    message = str(caught.value)
    assert "127.0.0.1" in message
    assert KEY not in message
    assert message.endswith(".")
    return message


def overdue(built: HttpUpstream) -> None:
    """Let the deadline of the only call in flight expire now, so that the test does not depend on a short
    deadline."""
    (deadline,) = (one for replica in built.replicas for one in replica.deadlines)
    deadline.reschedule(0)
