"""What an inference engine is to us: messages or token ids in; token ids, logprobs, finish and version out.

Promises, of every upstream:
- one call, one answer or one typed `UpstreamError`; a truncated answer is never a complete one;
- a call is retried only where nothing can have been sampled twice into a record: no connection, refused
  before it was read, 429 and 503; never after the deadline;
- the deadline covers the answer, not the waiting for a place, which is reported as `queued`;
- cancelling a call closes its connection, which is how engines learn to abort.
"""

from typing import Any, Protocol

import msgspec

from rookery.core import Extra, Finish, Message, Sampling, ToolSchema


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. Exactly one of `messages` and `tokens` is given."""

    model: str
    messages: tuple[Message, ...] = ()
    tokens: bytes = b""
    """Prompt ids, int32, for engines that take tokens in."""
    tools: tuple[ToolSchema, ...] = ()
    tool_choice: str | None = None
    """None, `auto`, `none`, `required`, or a tool's name."""
    sampling: Sampling = Sampling()
    want_tokens: bool = True
    """Ask for token ids and logprobs."""
    seed: int | None = None
    """Where the sampling names no seed and the engine can draw from one: what makes a run draw the same again."""
    affinity: str = ""
    """Requests with the same value like the same replica (its prefix cache)."""


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. The token arrays are empty where the engine does not give them; they are never guessed."""

    message: Message
    finish: Finish
    prompt: bytes = b""
    sampled: bytes = b""
    logprobs: bytes = b""
    version: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    queued: float = 0.0
    replica: str = ""
    extras: dict[str, Extra] = {}


class UpstreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found out."""

    url: str
    models: tuple[str, ...] = ()
    context: int | None = None
    """The model's longest sequence, where the server says it."""
    details: dict[str, Any] = {}


class Upstream(Protocol):
    """An inference engine."""

    name: str

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        """Raises `UpstreamError` in words when the server cannot be used; samples nothing."""
        ...

    async def complete(self, request: ModelRequest, *, timeout: float) -> ModelReply: ...

    async def close(self) -> None: ...


class UpstreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to reach an upstream. The key is never part of it: `key_env` names the variable that holds it."""

    kind: str = "openai"
    urls: tuple[str, ...] = ()
    model: str = ""
    key_env: str = "ROOKERY_API_KEY"
    concurrency: int = 256
    """Calls under way at once, per replica and process."""
    retries: int = 4
    sampling: Sampling = Sampling()
    resend_reasoning: bool = False
    """Whether the reasoning of earlier answers goes back to the server (as `reasoning_content`)."""
