"""What every upstream behind HTTP does: choose a replica, send, read, try again, tell the news.

A kind is a subclass that says which endpoint is spoken how (`format.py`), and what its engine can be told besides.

Promises:
- one call, one answer or one typed error: `UpstreamError`, or `Truncation("context")` where the server
  says that the conversation no longer fits;
- a key, a password in a URL and a query never reach a message, a log or a record;
- the deadline covers the answer, not the waiting for a place, which is reported as `queued` and told to `held`;
- places are given in the order they were asked for, at most `concurrency` at once per replica, or as many as the
  engine says it can take;
- cancelling a call closes its connection, frees its place, and tells the engine where closing is not enough;
- a call is tried again only where `retry.py` says so, and only its one answer is returned;
- a replica that fails is left out as `health.py` says, and does not make the upstream unusable;
- a field that a server refuses is left out from then on, once a call without it went through.
"""

import asyncio
import logging
import os
import random
import secrets
from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec

from rookery.core import Sampling, Truncation, UpstreamError, UsageError
from rookery.core.errors import describe
from rookery.upstreams.choose import choose
from rookery.upstreams.complaints import context_full, refused_field
from rookery.upstreams.format import About, Ask, Complained, Format, Gather, WireError, version_number
from rookery.upstreams.hangs import RECENT_SECONDS, HangDetector, UpstreamEvidence
from rookery.upstreams.health import Sign
from rookery.upstreams.protocol import (
    CONCURRENCY,
    CallDelta,
    Delta,
    Held,
    ModelReply,
    ModelRequest,
    News,
    UpstreamConfig,
)
from rookery.upstreams.queueing import waited
from rookery.upstreams.replica import Answer, CallProgress, Failure, Replica, Unheard
from rookery.upstreams.retry import Backoff
from rookery.upstreams.servers import MISSING, Servers
from rookery.upstreams.urls import Address

log = logging.getLogger("rookery.upstreams")

_NO_HEADERS: Final[Mapping[str, str]] = {}
_SIGNS: Final[dict[str, Sign]] = {"connect": "gone", "dropped": "gone", "gateway": "gone", "error": "failing"}


class _Again(Exception):  # noqa: N818  (never leaves this file)
    """The same call once more, asked differently; not a failure."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask


class HttpUpstream(Servers):
    """Built anywhere, used in one event loop, closed with `close`."""

    reserved: ClassVar[frozenset[str]] = frozenset()
    """What `sampling.extra` may not set."""
    names: ClassVar[bool] = False
    """Whether every call gets a name, so that it can be aborted by it; else those have one that brought it."""

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:
        if not config.urls:
            raise UsageError(
                "no model server is named; give its URL, for example --policy http://127.0.0.1:8000/v1"
            )
        if (config.concurrency is not None and config.concurrency < 1) or config.retries < 0:
            raise UsageError("an upstream needs a concurrency of at least 1 and retries of at least 0")
        self._check_extra(config.sampling)
        addresses = {address.shown: address for address in map(Address, config.urls)}
        key = _key(config, key)
        share = max(1, config.share)
        # A bound that was named holds over all processes; the default is only an estimate.
        places = max(1, config.concurrency // share) if config.concurrency else -(-CONCURRENCY // share)
        replicas = [Replica(a, concurrency=places, key=key) for a in addresses.values()]
        super().__init__(config, replicas)
        self.name = config.kind
        self.tokens_in = True
        self.raw_in = True
        self.version = 0
        """The policy version that answers carry where the server does not say one."""
        self._backoff = Backoff(retries=config.retries)
        self._refused: frozenset[str] = frozenset()
        self._plain = config.sampling == Sampling()
        self._turn = 0
        self._between_tries: list[tuple[str, Replica, UpstreamError, float]] = []
        """Calls that will be tried again: affinity, replica, last failure, and when the call began."""
        self.hangs = HangDetector(self.vitals, lambda: config.model)

    # ------------------------------------------------------------------------------------- of each kind

    def format(self, replica: Replica, ask: Ask) -> Format:
        """How this call is spoken at this replica."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- calls

    async def complete(
        self, request: ModelRequest, *, timeout: float, news: News | None = None, held: Held | None = None
    ) -> ModelReply:
        """One answer. `timeout` is for the answer: waiting for a place comes on top and is `queued`."""
        loop = asyncio.get_running_loop()
        if bool(request.messages) == bool(request.tokens):
            raise UpstreamError("a call needs either messages or tokens", cause="upstream.rejected")
        ask = self._ask(request)
        said: tuple[Format, Ask, bytes] | None = None
        queued = elapsed = 0.0
        attempt = dropped = 0
        avoid: Replica | None = None
        again: Replica | None = None
        while True:
            replica = again or self._choose(request, avoid, loop.time())
            spoken = self.format(replica, ask)
            stream = news is not None and spoken.streams(request)
            if ask.stream is not stream:
                ask = msgspec.structs.replace(ask, stream=stream)
            if said is None or said[0] is not spoken or said[1] is not ask:
                said = spoken, ask, self._encode(spoken, ask)
            replica.load += 1
            try:
                if not replica.places.take_now():
                    queued += await waited(replica.places.take(), held)
                started = loop.time()
                try:
                    reply = await self._send(replica, said, timeout - elapsed, queued, news)
                finally:
                    replica.places.give()
                    elapsed += loop.time() - started
                replica.longest_answer = max(replica.longest_answer, loop.time() - started)
                self._served(replica, ask, started)
                return reply  # noqa: TRY300  (an else would part it from what it needs)
            except _Again as other:
                ask, again = other.ask, replica
                continue
            except Unheard as unheard:
                raise unheard.error from unheard.error.__cause__
            except Failure as failure:
                self._note(replica, failure, loop.time())
                delay = self._backoff.delay(
                    failure.kind,
                    attempt=attempt,
                    elapsed=elapsed,
                    deadline=timeout,
                    draw=random.random(),  # noqa: S311  (jitter)
                    dropped=dropped,
                    elsewhere=self._has_other(replica, failure.kind),
                    retry_after=failure.retry_after,
                )
                if delay is None:
                    raise failure.error from failure.__cause__
                log.debug("%s; trying again in %.2f s", failure.error, delay)
                failed_with = failure.error
                attempt += 1
                dropped += failure.kind in ("dropped", "error")
                avoid, again = replica, None
                ask = self._anew(ask, attempt)
            finally:
                replica.load -= 1
            waiting = (request.affinity, replica, failed_with, loop.time() - elapsed)
            self._between_tries.append(waiting)
            try:
                await asyncio.sleep(delay)
            finally:
                self._between_tries.remove(waiting)
            elapsed += delay

    async def _send(
        self,
        replica: Replica,
        said: tuple[Format, Ask, bytes],
        seconds: float,
        queued: float,
        news: News | None,
    ) -> ModelReply:
        spoken, ask, body = said
        version = self.version  # the weights that begin the answer
        url = replica.endpoint(spoken.path)
        now = asyncio.get_running_loop().time()
        call = CallProgress(replica, ask.request.affinity, now, streamed=ask.stream)
        replica.begun(call)
        self.hangs.watch(self.replicas)
        try:
            if ask.stream:
                assert news is not None
                sink = _Telling(spoken.gather(ask), news)
                answer = await replica.stream(url, body, seconds=seconds, sink=sink)
                if not answer.body and answer.status == 200:
                    return self._gathered(replica, sink, About(_said(answer, version), queued, replica.name))
            else:
                answer = await replica.exchange(url, body, seconds=seconds)
            if not 200 <= answer.status < 300:
                raise self._refusal(replica, spoken, ask, answer)
            reply = spoken.decode(answer.body, ask, About(_said(answer, version), queued, replica.name))
        except (asyncio.CancelledError, Unheard):
            self._abandon(replica, ask)
            raise
        except Failure as failure:
            if failure.error.code in ("upstream.timeout", "upstream.cut", "upstream.hung"):
                self._abandon(replica, ask)
            raise
        except WireError as error:
            self._abandon(replica, ask)
            raise Failure("final", replica.error("upstream.protocol", str(error))) from error
        except Complained as complained:
            answer = Answer(complained.said.status, _NO_HEADERS, complained.data)
            raise self._refusal(replica, spoken, ask, answer, told=sink.told) from None
        finally:
            replica.ended(call)
        if news is not None:
            await news(whole(reply))
        return reply

    def _gathered(self, replica: Replica, sink: "_Telling", about: About) -> ModelReply:
        if missing := sink.gather.ended():
            raise Failure("final" if sink.told else "dropped", replica.error("upstream.cut", missing))
        return sink.gather.reply(about)

    def _refusal(
        self, replica: Replica, spoken: Format, ask: Ask, answer: Answer, *, told: bool = False
    ) -> Exception:
        """What an answer that is not a success leads to."""
        failure, said = replica.refusal(answer)
        if told:
            failure.kind = "final"
            return failure
        if answer.status in (*MISSING, 403) and self.optional(spoken):
            return _Again(msgspec.structs.replace(ask, without=ask.without | {spoken.path}))
        if answer.status in (400, 413, 422):
            if context_full(said, ask.sampling.max_tokens):
                return Truncation("context", replica.scrub(f"{replica.name}: {said.text}"))
            sent = {"max_tokens"} if ask.sampling.max_tokens is not None else set()
            if ask.request.want_tokens:
                sent |= {"return_token_ids", "logprobs"}
            if ask.stream:
                sent.add("stream_options")
            if self._derived_seed(ask):
                sent.add("seed")
            if field := refused_field(said, answer.body, sent - ask.without):
                sampling = msgspec.structs.replace(ask.sampling, seed=None) if field == "seed" else ask.sampling
                return _Again(msgspec.structs.replace(ask, without=ask.without | {field}, sampling=sampling))
        return failure

    def _derived_seed(self, ask: Ask) -> bool:
        """Whether the call's seed is ours, so that the call can be made without it."""
        named = ask.request.sampling.seed is not None or self.config.sampling.seed is not None
        return ask.sampling.seed is not None and not named

    def optional(self, spoken: Format) -> bool:  # noqa: ARG002  (a kind may)
        """Return True if another endpoint can serve the call when a server lacks or disables this one."""
        return False

    def _anew(self, ask: Ask, attempt: int) -> Ask:
        """For another try, maybe elsewhere: what was found out about this server is none of the next one's."""
        fields = frozenset(name for name in ask.without if not name.startswith("/"))
        if not ask.id:
            return ask if len(fields) == len(ask.without) else msgspec.structs.replace(ask, without=fields)
        name = f"{ask.request.id or ask.id.partition('.')[0]}.{attempt}"  # the engine may still know the last one
        return msgspec.structs.replace(ask, without=fields, id=name)

    def _served(self, replica: Replica, ask: Ask, now: float) -> None:
        if ask.without is not self._refused:
            self._learn(replica, ask.without)
        replica.hung = False
        if replica.health.answered():
            log.warning("%s answers again", replica.name)
        if now >= replica.refresh_at:
            self.refresh(replica)

    def _learn(self, replica: Replica, without: frozenset[str]) -> None:
        # Only now, when a call without it went through: some servers quote the whole request in every complaint,
        # and would make us give up token data for a wrong temperature, or an endpoint for a wrong model.
        paths = frozenset(name for name in without if name.startswith("/"))
        if new := paths - replica.lacks:
            replica.lacks |= new
            log.info("%s has no %s; going on without", replica.name, ", ".join(sorted(new)))
        if new := without - paths - self._refused:
            self._refused |= new
            log.warning("%s refuses %s; going on without", replica.name, ", ".join(sorted(new)))

    def _note(self, replica: Replica, failure: Failure, now: float) -> None:
        sign = _SIGNS.get(failure.kind)
        if sign is None and failure.error.code in ("upstream.timeout", "upstream.cut"):
            sign = "failing"
        if (
            sign is not None
            and replica.health.failed(sign, str(failure.error), now=now)
            and len(self.replicas) > 1
        ):
            log.warning("a replica is left out for a while: %s", failure.error)

    # ---------------------------------------------------------------------------------------- requests

    def _ask(self, request: ModelRequest) -> Ask:
        sampling = request.sampling
        if sampling.extra:
            try:
                self._check_extra(sampling)
            except UsageError as error:
                raise UpstreamError(str(error), cause="upstream.rejected") from None
        if not self._plain and sampling is not self.config.sampling:
            sampling = sampling.over(self.config.sampling)
        if (
            self.config.seeded
            and sampling.seed is None
            and request.seed is not None
            and "seed" not in self._refused
        ):
            # 31 bits, which every server takes; the upper ones, since the lower ones repeat soonest.
            sampling = msgspec.structs.replace(sampling, seed=(request.seed >> 32) & 0x7FFF_FFFF)
        name = request.id or (secrets.token_hex(12) if self.names else "")
        return Ask(
            request=request,
            model=request.model or self.config.model,
            sampling=sampling,
            without=self._refused,
            reasoning=self.config.resend_reasoning,
            id=name,
        )

    def _encode(self, spoken: Format, ask: Ask) -> bytes:
        try:
            return spoken.encode(ask)
        except (TypeError, ValueError, RecursionError) as error:
            what = f"the request cannot be written as JSON: {describe(error)}"
            raise UpstreamError(what, cause="upstream.rejected") from error

    def _check_extra(self, sampling: Sampling) -> None:
        if taken := sorted(self.reserved & sampling.extra.keys()):
            raise UsageError(f"sampling.extra may not set {', '.join(taken)}: Rookery sets these itself")

    def _has_other(self, replica: Replica, kind: str) -> bool:
        """Whether another replica can be tried; after a hang, one that is not known to hang."""
        return any(other is not replica and not (kind == "hung" and other.hung) for other in self.replicas)

    async def examine(self, affinity: str) -> tuple[UpstreamEvidence, ...]:
        """Evidence about the calls under way with this affinity: whether their servers hang."""
        now = asyncio.get_running_loop().time()
        failing = [
            UpstreamEvidence(
                replica=replica.name,
                verdict="hung",
                reason="call_failed",
                streamed=False,
                seconds=round(now - since, 3),
                silent=round(now - since, 3),
                cause=error.code,
                failure=str(error),
            )
            for whose, replica, error, since in self._between_tries
            if whose == affinity and now - since > RECENT_SECONDS
        ]
        calls = [call for replica in self.replicas for call in replica.calls if call.affinity == affinity]
        return (*failing, *await asyncio.gather(*(self.hangs.examine(call) for call in calls)))

    async def gives_tokens(self, replica: Replica) -> bool:
        return await self.hangs.works_again(replica)

    async def close(self) -> None:
        self.hangs.close()
        await super().close()

    def _choose(self, request: ModelRequest, avoid: Replica | None, now: float) -> Replica:
        replicas = self.replicas
        if len(replicas) == 1:
            return replicas[0]
        self._turn += 1
        usable = [replica for replica in replicas if replica.health.well]
        if request.avoid:
            usable = [replica for replica in usable if replica.name not in request.avoid] or usable
        if any(not replica.health.well for replica in replicas):
            self.look(now)
        if avoid is not None:
            usable = [replica for replica in usable if replica is not avoid]
        if not usable:  # all are left out: the one that comes back first, and not the one that just failed
            others = [replica for replica in replicas if replica is not avoid]
            return min(others, key=lambda replica: replica.health.until or 0.0)
        return choose(usable, affinity=request.affinity, turn=self._turn)


class _Telling:
    """The way of a stream: bytes in, news out."""

    __slots__ = ("gather", "news", "told")

    def __init__(self, gather: Gather, news: News) -> None:
        self.gather = gather
        self.news = news
        self.told = False

    @property
    def whole(self) -> bool:
        return self.gather.finish is not None

    @property
    def done(self) -> bool:
        return self.gather.done

    async def feed(self, data: bytes) -> None:
        delta = self.gather.feed(data)
        if delta is not None:
            self.told = True
            try:
                await self.news(delta)
            except Exception as error:
                raise Unheard(error) from error


def _said(answer: Answer, version: int) -> int:
    header = answer.headers.get("X-Weight-Version")
    said = version_number(header) if header is not None else None
    return version if said is None else said


def whole(reply: ModelReply) -> Delta:
    """An answer as one piece."""
    message = reply.message
    calls = tuple(CallDelta(n, call.id, call.name, call.arguments) for n, call in enumerate(message.tool_calls))
    return Delta(
        content=message.text,
        reasoning=message.reasoning or "",
        tool_calls=calls,
        sampled=reply.sampled,
        logprobs=reply.logprobs,
        prompt=reply.prompt,
        tops=reply.tops,
        logprob_content=reply.logprob_content,
    )


def _key(config: UpstreamConfig, key: str | None) -> str | None:
    names = [config.key_env] if config.key_env != "ROOKERY_API_KEY" else [config.key_env, "OPENAI_API_KEY"]
    if key is None:
        key = next((found for name in names if name and (found := os.environ.get(name))), None)
    key = key.strip() if key else None
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError("the model server's key holds characters that no HTTP header can; set it again")
    return key or None
