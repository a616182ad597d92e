"""Any OpenAI-compatible server, over HTTP.

Promises:
- one call, one answer or one typed error: `UpstreamError`, or `Truncation("context")` where the server
  says that the conversation no longer fits;
- a key, a password in a URL and a query never reach a message, a log or a record;
- the deadline covers the answer, not the waiting for a place, which is reported as `queued`;
- places are given in the order they were asked for, at most `concurrency` at once per replica;
- cancelling a call closes its connection and frees its place;
- a call is tried again only where `retry.py` says so, and only its one answer is returned;
- a field that a server refuses is left out from then on, once a call without it went through;
- one unusable replica does not make the upstream unusable.
"""

import asyncio
import logging
import os
import random
from typing import Any, Final
from zlib import crc32

import msgspec

from rookery.core import Sampling, Truncation, UpstreamError, UsageError
from rookery.core.errors import describe
from rookery.upstreams import wire
from rookery.upstreams.protocol import (
    Delta,
    ModelReply,
    ModelRequest,
    News,
    PauseMode,
    UpstreamConfig,
    UpstreamInfo,
)
from rookery.upstreams.replica import Answer, Failure, Replica
from rookery.upstreams.retry import Backoff
from rookery.upstreams.urls import Address, redact

__all__ = ["OpenAIUpstream", "redact"]

log = logging.getLogger("rookery.upstreams")

AFFINITY_SLACK: Final = 8
"""How many calls more than the idlest replica the one with the warm cache may have and still be taken."""


class OpenAIUpstream:
    """The `openai` upstream. Built anywhere, used in one event loop, closed with `close`."""

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:
        if not config.urls:
            raise UsageError(
                "no model server is named; give its URL, for example --policy http://127.0.0.1:8000/v1"
            )
        if config.concurrency < 1 or config.retries < 0:
            raise UsageError("an upstream needs a concurrency of at least 1 and retries of at least 0")
        _check_extra(config.sampling)
        addresses = {address.shown: address for address in map(Address, config.urls)}
        key = _key(config, key)
        self.config = config
        self.name = config.kind
        self.tokens_in = True
        self.version = 0
        """The policy version that answers carry where the server does not say one."""
        self.replicas = [Replica(a, concurrency=config.concurrency, key=key) for a in addresses.values()]
        self._backoff = Backoff(retries=config.retries)
        self._refused: frozenset[str] = frozenset()
        self._plain = config.sampling == Sampling()
        self._next = 0

    async def close(self) -> None:
        """Ends what is under way and closes every connection. Closing twice is fine."""
        for replica in self.replicas:
            await replica.close()

    # ------------------------------------------------------------------------------------------- calls

    async def complete(self, request: ModelRequest, *, timeout: float, news: News | None = None) -> ModelReply:
        """One answer. `timeout` is for the answer: waiting for a place comes on top and is `queued`."""
        loop = asyncio.get_running_loop()
        if bool(request.messages) == bool(request.tokens):
            raise UpstreamError("a call needs either messages or tokens", cause="upstream.rejected")
        sampling = self._sampling(request)
        without = self._refused
        body = self._encode(request, sampling, without)
        queued = elapsed = 0.0
        attempt = dropped = 0
        avoid: Replica | None = None
        while True:
            replica = self._choose(request.affinity, avoid)
            replica.load += 1
            try:
                if replica.places.locked():
                    asked = loop.time()
                    await replica.places.acquire()
                    queued += loop.time() - asked
                else:
                    await replica.places.acquire()
                started = loop.time()
                try:
                    answer = await self._send(replica, request, body, timeout - elapsed)
                    if 200 <= answer[0].status < 300:
                        reply = self._decode(replica, request, answer, queued)
                        self._learn(without)
                        if news is not None:
                            await news(whole(reply))
                        return reply
                    refused = self._refusal(replica, request, sampling, without, answer[0])
                finally:
                    replica.places.release()
                    elapsed += loop.time() - started
                without |= {refused}
                body = self._encode(request, sampling, without)
                continue
            except Failure as failure:
                delay = self._backoff.delay(
                    failure.kind,
                    attempt=attempt,
                    elapsed=elapsed,
                    deadline=timeout,
                    draw=random.random(),  # noqa: S311  (jitter)
                    dropped=dropped,
                    retry_after=failure.retry_after,
                )
                if delay is None:
                    raise failure.error from failure.__cause__
                log.debug("%s; trying again in %.2f s", failure.error, delay)
                attempt += 1
                dropped += failure.kind == "dropped"
                avoid = replica
            finally:
                replica.load -= 1
            await asyncio.sleep(delay)
            elapsed += delay

    async def freeze(self, mode: PauseMode, *, timeout: float) -> None:
        """A plain server has no such call."""

    async def thaw(self, *, timeout: float) -> None:
        """As `freeze`."""

    async def _send(
        self, replica: Replica, request: ModelRequest, body: bytes, seconds: float
    ) -> tuple[Answer, int]:
        version = self.version  # the weights that begin the answer
        url = replica.completions if request.tokens else replica.chat
        return await replica.exchange(url, body, seconds=seconds), version

    def _decode(
        self, replica: Replica, request: ModelRequest, answer: tuple[Answer, int], queued: float
    ) -> ModelReply:
        (_, headers, data), version = answer
        header = headers.get("X-Weight-Version")
        if header is not None and (said := wire.version_number(header)) is not None:
            version = said
        try:
            return wire.decode_reply(
                data,
                want_tokens=request.want_tokens,
                prompt=request.tokens,
                version=version,
                queued=queued,
                replica=replica.name,
            )
        except wire.WireError as error:
            raise Failure("final", replica.error("upstream.protocol", str(error))) from error

    def _refusal(
        self, replica: Replica, request: ModelRequest, sampling: Sampling, without: frozenset[str], answer: Answer
    ) -> str:
        """The field to leave out and try again without; every other refusal raises."""
        failure, said = replica.refusal(answer)
        if answer.status in (400, 413, 422):
            if wire.context_full(said, sampling.max_tokens):
                raise Truncation("context", replica.scrub(f"{replica.name}: {said.text}"))
            sent = {"max_tokens"} if sampling.max_tokens is not None else set()
            if request.want_tokens:
                sent |= {"return_token_ids", "logprobs"}
            if field := wire.refused_field(said, answer.body, sent - without):
                return field
        raise failure

    def _learn(self, without: frozenset[str]) -> None:
        # Only now, when a call without the field went through: some servers quote the whole request in
        # every complaint, and would make us give up token data for a wrong temperature.
        if new := without - self._refused:
            self._refused |= new
            log.warning("%s refuses %s; going on without", self.replicas[0].name, ", ".join(sorted(new)))

    def _sampling(self, request: ModelRequest) -> Sampling:
        if request.sampling.extra:
            try:
                _check_extra(request.sampling)
            except UsageError as error:
                raise UpstreamError(str(error), cause="upstream.rejected") from None
        if self._plain or request.sampling is self.config.sampling:
            return request.sampling
        return request.sampling.over(self.config.sampling)

    def _encode(self, request: ModelRequest, sampling: Sampling, without: frozenset[str]) -> bytes:
        try:
            return wire.encode_request(
                request,
                model=request.model or self.config.model,
                sampling=sampling,
                without=without,
                reasoning=self.config.resend_reasoning,
            )
        except (TypeError, ValueError, RecursionError) as error:
            what = f"the request cannot be written as JSON: {describe(error)}"
            raise UpstreamError(what, cause="upstream.rejected") from error

    def _choose(self, affinity: str, avoid: Replica | None) -> Replica:
        replicas = self.replicas
        if len(replicas) == 1:
            return replicas[0]
        self._next = (self._next + 1) % len(replicas)
        turned = replicas[self._next :] + replicas[: self._next]
        idlest = min((replica for replica in turned if replica is not avoid), key=lambda replica: replica.load)
        if affinity:
            home = replicas[crc32(affinity.encode("utf-8", "replace")) % len(replicas)]
            if home is not avoid and home.load - idlest.load <= AFFINITY_SLACK:
                return home
        return idlest

    # ------------------------------------------------------------------------------------------- check

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        """What the servers say they serve; raises when none of them can be used. Samples nothing."""
        async with asyncio.TaskGroup() as group:
            checks = [group.create_task(self._check(replica, timeout)) for replica in self.replicas]
        results = [check.result() for check in checks]
        usable = [result for result in results if isinstance(result, UpstreamInfo)]
        errors = [result for result in results if isinstance(result, UpstreamError)]
        if not usable:
            raise errors[0]
        for error in errors:
            log.warning("a replica cannot be used: %s", error)
        if not errors:
            return usable[0]
        return msgspec.structs.replace(usable[0], details={"unusable": [str(error) for error in errors]})

    async def _check(self, replica: Replica, seconds: float) -> UpstreamInfo | UpstreamError:
        try:
            answer = await replica.exchange(replica.models, None, seconds=seconds)
        except Failure as failure:
            failure.error.__cause__ = failure.__cause__
            return failure.error
        if answer.status in (404, 405, 501):  # servers of one model often have no list
            return UpstreamInfo(url=replica.name)
        if not 200 <= answer.status < 300:
            return replica.refusal(answer)[0].error
        try:
            listed = _decode_models(answer.body).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return replica.error("upstream.protocol", f"the list of models cannot be read ({error})")
        models = tuple(entry.id for entry in listed)
        wanted = self.config.model
        if wanted and models and wanted not in models:
            more = f" and {len(models) - 10} more" if len(models) > 10 else ""
            there = ", ".join(models[:10]) + more
            return replica.error("upstream.rejected", f"the model {wanted!r} is not served; there is: {there}")
        named = [entry for entry in listed if entry.id == wanted] or (listed if len(listed) == 1 else [])
        length = named[0].max_model_len if named else None
        context = length if isinstance(length, int) and length > 0 else None
        return UpstreamInfo(url=replica.name, models=models, context=context)


def whole(reply: ModelReply) -> Delta:
    """An answer as one piece."""
    return Delta(content=reply.message.text, sampled=reply.sampled, logprobs=reply.logprobs, prompt=reply.prompt)


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: Any = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


_decode_models = msgspec.json.Decoder(_Models).decode


def _check_extra(sampling: Sampling) -> None:
    if taken := sorted(wire.RESERVED & sampling.extra.keys()):
        raise UsageError(f"sampling.extra may not set {', '.join(taken)}: Rookery sets these itself")


def _key(config: UpstreamConfig, key: str | None) -> str | None:
    names = [config.key_env] if config.key_env != "ROOKERY_API_KEY" else [config.key_env, "OPENAI_API_KEY"]
    if key is None:
        key = next((found for name in names if name and (found := os.environ.get(name))), None)
    key = key.strip() if key else None
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError("the model server's key holds characters that no HTTP header can; set it again")
    return key or None
