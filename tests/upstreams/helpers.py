"""What the tests of the `openai` upstream share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rookery.core import Message, UpstreamError
from rookery.upstreams import ModelRequest, UpstreamConfig
from rookery.upstreams.openai import OpenAIUpstream
from rookery.upstreams.retry import Backoff

KEY = "sk-sesame-0123456789"
ASK = ModelRequest(model="test-model", messages=(Message("user", "hi"),))


@asynccontextmanager
async def upstream(*urls: str, key: str | None = KEY, **config: Any) -> AsyncIterator[OpenAIUpstream]:
    built = OpenAIUpstream(UpstreamConfig(urls=urls, model="test-model", **config), key=key)
    built._backoff = Backoff(retries=built.config.retries, base=0.001)
    try:
        yield built
    finally:
        await built.close()


async def fails(built: OpenAIUpstream, cause: str, request: ModelRequest = ASK, timeout: float = 30) -> str:
    with pytest.raises(UpstreamError) as caught:
        await built.complete(request, timeout=timeout)
    assert caught.value.code == cause, caught.value
    message = str(caught.value)
    assert "127.0.0.1" in message
    assert KEY not in message
    assert message.endswith(".")
    return message
