"""Upstream `function`: an async Python function in this process that gets prompt tokens and returns sampled
tokens.

Trainers give such a function to their rollout code, for example verl's `server_manager.generate`. `serve_function`
registers one and returns the configuration of an upstream that calls it:

    async def generate(call: TokenCall) -> TokenResult: ...

    with serve_function(generate, model="qwen", context=32768) as policy:
        async with Engine(env, policy=policy, runners=0, record="tokens", rendering={"tokenizer": path}) as engine:
            ...

Guarantees:
- a call returns one reply or raises one typed `UpstreamError`; an exception of the function is an infrastructure
  failure (`upstream.error`), and a call that takes too long is cancelled (`upstream.timeout`);
- a result whose tokens and log probabilities differ in number is refused (`upstream.protocol`);
- the function is found only in the process that registered it, so the engine needs `runners=0`.
"""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

import msgspec

from rookery.core import Extra, Finish, Message, Sampling, UpstreamError, UsageError, floats, ints
from rookery.core.errors import describe
from rookery.upstreams.protocol import (
    Delta,
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    Upstream,
    UpstreamConfig,
    UpstreamInfo,
)

KIND: Final = "function"


class TokenCall(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, as a token function receives it."""

    prompt: list[int]
    """Token IDs of the prompt."""
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    """Token IDs that end the reply when they are sampled."""
    session: str = ""
    """The same for all calls of an attempt, so that they can use the same replica's prefix cache."""
    seed: int | None = None


class TokenResult(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a token function."""

    tokens: Sequence[int]
    """Sampled token IDs."""
    logprobs: Sequence[float] | None = None
    """Log probability of each sampled token; None if unknown."""
    finish: Finish = "stop"
    version: int | None = None
    """Policy version that sampled the tokens; None if unknown, then the engine's current version is recorded."""
    extras: dict[str, Extra] = {}


TokenFunction: TypeAlias = Callable[[TokenCall], Awaitable[TokenResult]]


class _Served(NamedTuple):
    generate: TokenFunction
    model: str
    context: int | None


_served: dict[str, _Served] = {}
_numbers = itertools.count()


@contextmanager
def serve_function(
    generate: TokenFunction, *, model: str = "policy", context: int | None = None
) -> Iterator[UpstreamConfig]:
    """Register a token function, and return the configuration of the upstream that calls it.

    `model` is the name of the model in records, and `context` its maximum sequence length. The registration ends
    with the block.
    """
    name = f"{KIND}:{next(_numbers)}"
    _served[name] = _Served(generate, model, context)
    try:
        yield UpstreamConfig(kind=KIND, urls=(name,), model=model)
    finally:
        del _served[name]


class FunctionUpstream(Upstream):
    """Upstream that calls a registered token function."""

    name = KIND
    accepts_tokens = True
    accepts_raw_json = False

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:  # noqa: ARG002  (no key needed)
        address = config.urls[0] if len(config.urls) == 1 else ""
        if address not in _served:
            raise UsageError(
                f"no function is registered as {address or config.urls!r} in this process: use the configuration "
                "from serve_function inside its block, and an engine with runners=0"
            )
        self._served = _served[address]
        self.config = config
        self.version = 0

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:  # noqa: ARG002  (does not wait)
        served = self._served
        return UpstreamInfo(url=self.config.urls[0], models=(served.model,), context=served.context)

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,  # noqa: ARG002  (the function queues calls itself)
    ) -> ModelReply:
        if not request.tokens:
            raise UpstreamError(
                "a token function takes token IDs, not messages: use record='tokens'", cause="upstream.rejected"
            )
        call = TokenCall(
            prompt=memoryview(request.tokens).cast("i").tolist(),
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            session=request.affinity,
            seed=request.sampling.seed if request.sampling.seed is not None else request.seed,
        )
        result = await self._call(call, timeout)
        reply = ModelReply(
            message=Message("assistant", None),
            finish=result.finish,
            prompt=request.tokens,
            sampled=ints(result.tokens),
            logprobs=b"" if result.logprobs is None else floats(result.logprobs),
            version=self.version if result.version is None else result.version,
            prompt_tokens=len(call.prompt),
            sampled_tokens=len(result.tokens),
            replica=KIND,
            extras=result.extras,
        )
        if on_delta is not None:
            await on_delta(Delta(sampled=reply.sampled, logprobs=reply.logprobs, version=reply.version))
        return reply

    async def _call(self, call: TokenCall, timeout: float) -> TokenResult:
        try:
            async with asyncio.timeout(timeout):
                result = await self._served.generate(call)
        except TimeoutError as error:
            raise UpstreamError(
                f"the token function did not return within {timeout:g} seconds", cause="upstream.timeout"
            ) from error
        except UpstreamError:
            raise
        except Exception as error:
            raise UpstreamError(f"the token function raised {describe(error)}", cause="upstream.error") from error
        logprobs = result.logprobs
        if logprobs is not None and (len(logprobs) != len(result.tokens) or any(map(math.isnan, logprobs))):
            raise UpstreamError(
                f"the token function returned {len(result.tokens)} tokens and {len(logprobs)} log probabilities, "
                "or a log probability that is not a number",
                cause="upstream.protocol",
            )
        return result
