"""Base class of all upstreams that are HTTP servers: choose a replica, send the call, parse the reply, retry.

Runs in runner processes and gateway shards. A subclass defines which endpoint is used in which format
(`format.py`), and which control requests its inference engine supports.

Guarantees:
- a call returns one reply or raises one typed error: `UpstreamError`, or `Truncation("context")` if the server
  reports that the conversation no longer fits;
- a key, a password in a URL and a query string never appear in a message, a log or a record;
- each replica has a concurrency gate, which limits its calls in flight to the configured number or, without one,
  to the number that the inference engine reports;
- the deadline covers the reply, not the wait for the concurrency gate, which is reported as `queued`;
- cancelling a call closes its connection and releases its slot; if the inference engine needs it, an abort request
  with the call's ID is sent as well;
- a call is retried only as `retry.py` allows, and returns only one reply;
- a failing replica receives no calls for as long as `health.py` decides; the other replicas stay in use;
- a request field that a server rejects is omitted from all later calls, once a call without it has succeeded;
- health checks, queries of the concurrency limit and abort requests run in the background with a timeout. Only the
  probe of a replica that was found hung may sample a token;
- `freeze` sends the request to every replica, and raises if one that can be reached fails; `close` cancels all
  background tasks.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec

from rookery.core import Sampling, Truncation, UpstreamError, UsageError
from rookery.core.errors import describe
from rookery.upstreams.error_replies import find_refused_field, is_context_full
from rookery.upstreams.format import (
    ErrorReply,
    Format,
    ReplyContext,
    ReplyFormatError,
    StreamParser,
    WireOptions,
    delta_from_reply,
)
from rookery.upstreams.hang_detector import RECENT_SECONDS, HangDetector, UpstreamEvidence
from rookery.upstreams.health import SIGNALS_BY_FAILURE
from rookery.upstreams.protocol import (
    UNLIMITED,
    LoadMetrics,
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    PauseMode,
    UpstreamConfig,
    UpstreamInfo,
)
from rookery.upstreams.registry import read_key
from rookery.upstreams.replica import (
    MISSING,
    CallbackError,
    CallProgress,
    DeltaSink,
    ExchangeError,
    RawResponse,
    Replica,
    ReplicaState,
)
from rookery.upstreams.replica_choice import choose
from rookery.upstreams.replica_maintenance import PROBE_SECONDS, ReplicaMaintenance
from rookery.upstreams.retry import Backoff, FailureKind
from rookery.upstreams.urls import Address

__all__ = [
    "Format",
    "HttpUpstream",
    "LoadMetrics",
    "Replica",
    "ReplicaState",
    "ReplyContext",
    "ReplyFormatError",
    "StreamParser",
    "WireOptions",
]

log = logging.getLogger("rookery.upstreams")

CONCURRENCY_QUERY_SECONDS: Final = 10.0
T = TypeVar("T")
_UNFINISHED: Final = ("upstream.timeout", "upstream.cut", "upstream.hung")
"""Causes of failures after which the inference engine may still be working on the call."""


class _Resend(Exception):  # noqa: N818  (control flow: never leaves this module)
    """Raised to send the same call again at once, without a field or endpoint that the server rejects."""

    def __init__(self, omit: frozenset[str]) -> None:
        super().__init__()
        self.omit = omit


class _Call(msgspec.Struct, eq=False):
    """One model call, with its state over all tries."""

    request: ModelRequest
    """The caller's request with the model, the seed and the ID filled in."""
    timeout: float
    on_delta: OnDelta | None
    on_wait: OnWait | None
    omit: frozenset[str]
    """Rejected fields and, with a leading slash, paths of endpoints that the server lacks."""
    id: str
    """The caller's ID; empty if the request has none."""
    chose_seed: bool = False
    """True if the seed is not the caller's."""
    queued: float = 0.0
    """Seconds spent waiting for the concurrency gate."""
    elapsed: float = 0.0
    """Seconds of the tries and of the delays between them."""
    failures: int = 0
    dropped: int = 0
    """Number of failures of the kinds `dropped` and `error`."""
    avoid: Replica | None = None
    """The replica at which the last try failed."""
    resend_to: Replica | None = None
    """The replica that gets the call again, without what it rejected."""


class _Sent(NamedTuple):
    """One try of a call: what was sent to which replica."""

    replica: Replica
    format: Format
    options: WireOptions
    sink: DeltaSink | None
    """Receives the bytes of a streamed reply; None if the reply is not streamed."""


class HttpUpstream:
    """Upstream for an inference engine that is reached over HTTP, at one or more replicas.

    Use one instance from one event loop only.
    """

    health_path: ClassVar[str] = "models"
    """Endpoint for health checks. Any response below status 500 counts as healthy."""
    identity_paths: ClassVar[tuple[str, ...]] = ()
    """Endpoints that are queried to detect whether a server is of this kind; `is_identity` judges the response."""
    pause_paths: ClassVar[tuple[str, ...]] = ()
    """Endpoints that return a JSON object with a true value while the server is paused or sleeps."""
    load_metrics: ClassVar[LoadMetrics | Literal["all_kinds"] | None] = None
    """Names of the metrics at `/metrics` that show how busy the server is; None if it has no such metrics, and
    `all_kinds` for an unknown server, which may have those of any installed kind."""
    control_requests: ClassVar[dict[str, tuple[str, bytes]]] = {}
    """Path and body of the requests that stop and continue sampling. The keys are pause modes, and `thaw`."""
    reserved: ClassVar[frozenset[str]] = frozenset()
    """Request fields that users may not set in `sampling.extra`, because Rookery sets them itself."""
    needs_ids: ClassVar[bool] = False
    """If True, every call is sent with an ID, so that it can be aborted by that ID."""
    message_format: ClassVar[Format]
    """The format of calls with messages. Every kind must define it."""
    token_format: ClassVar[Format | None] = None
    """The format of calls with token IDs. None if this kind of server does not accept token IDs."""
    fallback_format: ClassVar[Format | None] = None
    """The format of calls with token IDs to servers that lack or disable the endpoint of `token_format`."""

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:
        if getattr(self, "message_format", None) is None:
            raise UsageError(
                f"the upstream kind {config.kind!r} cannot be used: its class {type(self).__qualname__} must set "
                "`message_format`, the format of calls with messages"
            )
        if not config.urls:
            raise UsageError(
                "no URL of an inference engine is set; pass one, for example --policy http://127.0.0.1:8000/v1"
            )
        if (config.concurrency is not None and config.concurrency < 1) or config.retries < 0:
            raise UsageError("the concurrency of an upstream must be at least 1, and its retries at least 0")
        self._check_extra(config.sampling)
        addresses = {address.shown: address for address in map(Address, config.urls)}
        key = read_key(config, key)
        share = max(1, config.share)
        slots = max(1, config.concurrency // share) if config.concurrency else UNLIMITED
        replicas = [Replica(a, concurrency=slots, key=key) for a in addresses.values()]
        self.config = config
        self.replicas = replicas
        reports_limit = type(self).query_concurrency_limit is not HttpUpstream.query_concurrency_limit
        if config.concurrency is None and reports_limit:
            for replica in replicas:
                replica.refresh_at = 0.0
        self.name = config.kind
        self.accepts_tokens = self.token_format is not None
        self.accepts_raw_json = True
        self.version = 0
        """The policy version recorded for replies in which the server reports none."""
        self.backoff = Backoff(retries=config.retries)
        self._rejected_fields: frozenset[str] = frozenset()
        self._only_replica = replicas[0] if len(replicas) == 1 else None
        self._fills_in = config.seeded or self.needs_ids
        """True if every request may lack something that this upstream fills in."""
        self._turn = 0
        self._between_tries: list[tuple[str, Replica, UpstreamError, float]] = []
        """Calls that wait for a retry: `ModelRequest.affinity`, replica, last error, and when the call began."""
        self.hangs = HangDetector(self.health_path, lambda: config.model, self.pause_paths, self.load_metrics)
        self.maintenance = ReplicaMaintenance(self.health_path, self.hangs, self.query_concurrency_limit, share)

    # ---- differs between kinds of engines

    async def query_concurrency_limit(self, replica: Replica) -> int | None:  # noqa: ARG002  (a kind may override it)
        """Query how many calls the inference engine processes at once. Return None if it does not report that.

        A kind of upstream overrides this if its inference engine reports the number. Raises `ExchangeError` if the
        query fails.
        """
        return None

    def abort_request(self, request: ModelRequest) -> tuple[str, bytes] | None:  # noqa: ARG002  (as above)
        """Return path and body of the request that aborts a call by its ID.

        None means that closing the connection is enough for this kind of inference engine.
        """
        return None

    def is_identity(self, body: bytes) -> bool:  # noqa: ARG002  (as above)
        """Return True if `body`, received from one of `identity_paths`, shows that the server is of this kind."""
        return False

    async def identify(self) -> bool:
        """Query the first replica. Return True if it responds and is a server of this kind."""
        for path in self.identity_paths:
            try:
                reply = await self.replicas[0].exchange(path, None, seconds=PROBE_SECONDS)
            except ExchangeError:
                return False
            if reply.status == 200 and self.is_identity(reply.body):
                return True
        return False

    # ---- calls

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        """Return the reply to one call; see `Upstream.complete`.

        `timeout` covers all tries and the delays between them, but not waiting for the concurrency gate.
        """
        loop = asyncio.get_running_loop()
        call = _Call(request, timeout, on_delta, on_wait, self._rejected_fields, request.id)
        if self._fills_in or request.sampling.extra or not request.model:
            self._fill_in(call)
        while True:
            replica = call.resend_to or self._only_replica or self._choose(request, call.avoid, loop.time())
            replica.load += 1
            try:
                return await self._try(call, replica)
            except _Resend as resend:
                self._omit(call, resend.omit)
                call.resend_to = replica
                continue
            except CallbackError as raised:
                raise raised.error from raised.error.__cause__
            except ExchangeError as failure:
                delay = self._plan_retry(call, replica, failure)
                if delay is None:
                    raise failure.error from failure.__cause__
                waiting = (request.affinity, replica, failure.error, loop.time() - call.elapsed)
            finally:
                replica.load -= 1
            self._between_tries.append(waiting)
            try:
                await asyncio.sleep(delay)
            finally:
                self._between_tries.remove(waiting)
            call.elapsed += delay

    async def _try(self, call: _Call, replica: Replica) -> ModelReply:
        """Send a call to one replica when its concurrency gate admits the call, and return the parsed reply.

        Raises `ExchangeError`, or `_Resend` if the call can be sent again without what the server rejected.
        """
        request, loop = call.request, asyncio.get_running_loop()
        endpoint = self.token_format if request.tokens else self.message_format
        if bool(request.messages) == bool(request.tokens):
            raise UpstreamError(
                f"a call to the upstream kind {self.name!r} needs either messages or token IDs",
                cause="upstream.rejected",
            )
        if endpoint is None:
            raise UpstreamError(
                f"the upstream kind {self.name!r} does not accept token IDs as prompts: send messages, with "
                "--record messages or plain, or use another --upstream-kind",
                cause="upstream.rejected",
            )
        if self.fallback_format is not None and (endpoint.path in replica.lacks or endpoint.path in call.omit):
            endpoint = self.fallback_format
        on_delta = call.on_delta
        sink = None
        if on_delta is not None and endpoint.streams(request):
            sink = DeltaSink(endpoint.stream_parser(request), on_delta)
        stream = sink is not None
        options = WireOptions(stream, call.omit, self.config.resend_reasoning)
        try:
            body = endpoint.encode(request, options)
        except (UsageError, TypeError, ValueError, RecursionError) as error:
            raise _encoding_error(error) from error
        sent = _Sent(replica, endpoint, options, sink)
        if not replica.gate.acquire_nowait():
            call.queued += await replica.gate.acquire(call.on_wait)
        started, version = loop.time(), self.version  # of the weights with which the reply begins
        try:
            if self.hangs.watcher is None:
                self.hangs.watch(self.replicas)
            progress = CallProgress(replica, request.affinity, started, started, started, stream)
            seconds = call.timeout - call.elapsed
            response = await replica.exchange(endpoint.path, body, seconds=seconds, call=progress, sink=sink)
            reply = self._read_reply(call, sent, response, version)
        except ErrorReply as raised:
            response = RawResponse(raised.error.status, {}, raised.data)
            raise self._refusal(call, sent, response) from None
        except ReplyFormatError as error:
            self._abandon(replica, request)
            raise ExchangeError("final", replica.error("upstream.protocol", str(error))) from error
        except (asyncio.CancelledError, CallbackError, ExchangeError) as error:
            if not isinstance(error, ExchangeError) or error.error.code in _UNFINISHED:
                self._abandon(replica, request)
            raise
        finally:
            replica.gate.release()
            call.elapsed += loop.time() - started
        self._note_success(replica, call.omit, started)
        if on_delta is not None and (sink is None or response.body):
            await on_delta(delta_from_reply(reply))
        return reply

    def _read_reply(self, call: _Call, sent: _Sent, response: RawResponse, version: int) -> ModelReply:
        """Parse the response to a call. `version` is the policy version to use if the response has none.

        Raises `ExchangeError`, `_Resend`, `Truncation`, `ErrorReply` or `ReplyFormatError` if it is not a complete
        reply.
        """
        context = ReplyContext(response.version(version), call.queued, sent.replica.name)
        if sent.sink is not None and not response.body and response.status == 200:
            if missing := sent.sink.parser.ended():
                kind: FailureKind = "final" if sent.sink.delivered else "dropped"
                raise ExchangeError(kind, sent.replica.error("upstream.cut", missing))
            return sent.sink.parser.reply(context)
        if not 200 <= response.status < 300:
            raise self._refusal(call, sent, response)
        return sent.format.decode(response.body, call.request, context)

    def _refusal(self, call: _Call, sent: _Sent, response: RawResponse) -> Exception:
        """Return the exception to raise for a response that is not a success.

        This is an `ExchangeError`, a `Truncation` if the context is full, or `_Resend` if the call can be sent
        again without what the server rejected.
        """
        replica, endpoint, options, sink = sent
        failure, server_error = replica.refusal(response)
        if sink is not None and sink.delivered:
            failure.kind = "final"
            return failure
        lacks_endpoint = response.status in (*MISSING, 403)
        if lacks_endpoint and endpoint is self.token_format and self.fallback_format is not None:
            return _Resend(call.omit | {endpoint.path})
        if response.status in (400, 413, 422):
            request, sampling = call.request, call.request.sampling
            if is_context_full(server_error, sampling.max_tokens):
                return Truncation("context", replica.scrub(f"{replica.name}: {server_error.text}"))
            fields = {"max_tokens"} if sampling.max_tokens is not None else set()
            if request.want_tokens:
                fields |= {"return_token_ids", "logprobs"}
            if options.stream:
                fields.add("stream_options")
            if call.chose_seed:
                fields.add("seed")
            if field := find_refused_field(server_error, response.body, fields - call.omit):
                return _Resend(call.omit | {field})
        return failure

    def _plan_retry(self, call: _Call, replica: Replica, failure: ExchangeError) -> float | None:
        """Note a failed try and, if the call is retried, prepare the call for the next try.

        Return the seconds until then; None if the call is not retried.
        """
        self._note_failure(replica, failure, asyncio.get_running_loop().time())
        delay = self.backoff.delay(
            failure.kind,
            attempt=call.failures,
            elapsed=call.elapsed,
            deadline=call.timeout,
            draw=random.random(),  # noqa: S311  (jitter)
            dropped=call.dropped,
            elsewhere=self._has_other(replica, failure.kind),
            retry_after=failure.retry_after,
        )
        if delay is None:
            return None
        log.debug("%s; retrying in %.2f s", failure.error, delay)
        call.failures += 1
        call.dropped += failure.kind in ("dropped", "error")
        call.avoid, call.resend_to = replica, None
        call.omit = frozenset(name for name in call.omit if not name.startswith("/"))  # another server may have it
        # Another ID, because the server may still know the last one. It does not begin with the last one, because
        # SGLang aborts every call whose ID begins with the ID in an abort request.
        if call.request.id:
            next_id = f"{call.failures}.{call.id}" if call.id else secrets.token_hex(12)
            call.request = msgspec.structs.replace(call.request, id=next_id)
        return delay

    def _note_success(self, replica: Replica, omit: frozenset[str], started: float) -> None:
        now = asyncio.get_running_loop().time()
        replica.longest_call = max(replica.longest_call, now - started)
        if omit is not self._rejected_fields:
            self._learn(replica, omit)
        replica.hung = False
        if replica.health.answered():
            log.warning("the replica %s answers again and receives calls", replica.name)
        if started >= replica.refresh_at:
            self.maintenance.refresh(replica)

    def _learn(self, replica: Replica, without: frozenset[str]) -> None:
        # Only after a call without it has succeeded: some servers quote the whole request in every error, so that
        # token data would be given up for a wrong temperature, or an endpoint for a wrong model.
        paths = frozenset(name for name in without if name.startswith("/"))
        if new := paths - replica.lacks:
            replica.lacks |= new
            log.info(
                "the replica %s has no endpoint %s; continuing without it", replica.name, ", ".join(sorted(new))
            )
        if new := without - paths - self._rejected_fields:
            self._rejected_fields |= new
            log.warning(
                "the replica %s rejects the request field %s; continuing without it",
                replica.name,
                ", ".join(sorted(new)),
            )

    def _note_failure(self, replica: Replica, failure: ExchangeError, now: float) -> None:
        signal = SIGNALS_BY_FAILURE.get(failure.kind)
        if signal is None and failure.error.code in ("upstream.timeout", "upstream.cut"):
            signal = "failing"
        excluded = signal is not None and replica.health.failed(signal, str(failure.error), now=now)
        if excluded and len(self.replicas) > 1:
            log.warning("a replica receives no calls until it answers a probe: %s", failure.error)

    # ---- requests

    def _fill_in(self, call: _Call) -> None:
        """Fill in the request's model, seed and ID if they are missing and needed, and check `sampling.extra`."""
        config, request, sampling = self.config, call.request, call.request.sampling
        changes: dict[str, Any] = {}
        if not request.model and config.model:
            changes["model"] = config.model
        if config.seeded and sampling.seed is None and request.seed is not None and "seed" not in call.omit:
            call.chose_seed = True
            # 31 bits, which every server accepts; the upper ones, since the lower ones repeat soonest.
            seed = (request.seed >> 32) & 0x7FFF_FFFF
            changes["sampling"] = msgspec.structs.replace(sampling, seed=seed)
        if self.needs_ids and not request.id:
            changes["id"] = secrets.token_hex(12)
        if changes:
            call.request = msgspec.structs.replace(request, **changes)
        try:
            self._check_extra(sampling)
        except UsageError as error:
            raise _encoding_error(error) from None

    def _omit(self, call: _Call, omit: frozenset[str]) -> None:
        """Leave out of a call what its server rejected."""
        call.omit = omit
        if call.chose_seed and "seed" in omit:
            call.chose_seed = False
            sampling = msgspec.structs.replace(call.request.sampling, seed=None)
            call.request = msgspec.structs.replace(call.request, sampling=sampling)

    def _check_extra(self, sampling: Sampling) -> None:
        if reserved := sorted(self.reserved & sampling.extra.keys()):
            raise UsageError(f"sampling.extra may not set {', '.join(reserved)}: Rookery sets these itself")

    def _has_other(self, replica: Replica, kind: str) -> bool:
        """Return True if another replica can be tried; after the failure `hung`, one that is not known to hang."""
        return any(other is not replica and not (kind == "hung" and other.hung) for other in self.replicas)

    async def examine(self, affinity: str) -> tuple[UpstreamEvidence, ...]:
        """Examine whether the servers that process the calls of one attempt hang. Return the evidence for each
        call.

        The calls are those in flight, or waiting for a retry, whose `ModelRequest.affinity` is `affinity`.
        """
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

    async def close(self) -> None:
        """Cancel background tasks and close all connections, which fails the calls in flight. Idempotent."""
        self.hangs.close()
        self.maintenance.cancel()
        for replica in self.replicas:
            await replica.close()
        await self.maintenance.wait()

    def _choose(self, request: ModelRequest, avoid: Replica | None, now: float) -> Replica:
        replicas = self.replicas
        self._turn += 1
        usable = [replica for replica in replicas if replica.health.healthy]
        if request.avoid:
            usable = [replica for replica in usable if replica.name not in request.avoid] or usable
        for replica in replicas:
            if not replica.health.healthy:
                self.maintenance.probe(replica, now)
        if avoid is not None:
            usable = [replica for replica in usable if replica is not avoid]
        if not usable:  # all are left out: take the one that is probed first, and not the one that just failed
            others = [replica for replica in replicas if replica is not avoid]
            return min(others, key=lambda replica: replica.health.until or 0.0)
        return choose(usable, affinity=request.affinity, turn=self._turn)

    def states(self) -> tuple[ReplicaState, ...]:
        """Return the state of each replica, for logs and metrics."""
        return tuple(replica.state() for replica in self.replicas)

    def _abandon(self, replica: Replica, request: ModelRequest) -> None:
        """Send an abort request for a call in the background, if closing the connection is not enough."""
        if (abort := self.abort_request(request)) is not None:
            self.maintenance.abort(replica, *abort)

    # ---- freezing

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        """Ask every replica to stop sampling. Return False if the kind of server or a replica does not support
        `mode`.

        A replica that cannot be reached counts as stopped. Raises `UpstreamError` if a replica fails.
        """
        results = await self._control(mode, timeout)
        for replica, able in zip(self.replicas, results, strict=False):
            if able and mode == "keep":
                replica.frozen()
        return bool(results) and all(results)

    async def thaw(self, *, timeout: float) -> None:
        """Ask every replica to continue sampling, and let the deadlines of their calls continue."""
        try:
            await self._control("thaw", timeout)
        finally:
            for replica in self.replicas:
                replica.thawed()

    async def _control(self, name: str, timeout: float) -> list[bool]:
        """Send a control request to every replica, and return which of them have its endpoint.

        The list is empty if this kind of server has no such request. Raises `UpstreamError` if a replica fails.
        """
        control = self.control_requests.get(name)
        able: list[bool] = []
        if control is not None:
            for result in await self._ask_replicas(partial(self._send_control, *control, timeout)):
                if isinstance(result, UpstreamError):
                    raise result
                able.append(result)
        return able

    async def _send_control(self, path: str, body: bytes, seconds: float, replica: Replica) -> bool:
        """Send a control request. Return False if the server lacks the endpoint; raise `ExchangeError` if the
        request fails.

        Returns True, with a warning in the log, if the server cannot be reached.
        """
        try:
            response = await replica.exchange(path, body, seconds=seconds)
        except ExchangeError as failure:
            if failure.kind == "connect":
                log.warning(
                    "the control request %s was not sent, because the replica is unreachable: %s",
                    path,
                    failure.error,
                )
                return True
            raise
        if response.status in MISSING:
            return False
        if not 200 <= response.status < 300:
            raise replica.refusal(response)[0]
        return True

    async def _ask_replicas(self, ask: Callable[[Replica], Awaitable[T]]) -> list[T | UpstreamError]:
        """Call `ask` for every replica concurrently, and return the results; an error stands for a failed call."""

        async def one(replica: Replica) -> T | UpstreamError:
            try:
                return await ask(replica)
            except UpstreamError as error:
                return error
            except ExchangeError as failure:
                failure.error.__cause__ = failure.__cause__
                return failure.error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(replica)) for replica in self.replicas]
        return [task.result() for task in tasks]

    # ---- check

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        """Return what a usable server reports, without sampling. Raise `UpstreamError` if none is usable."""
        results = await self._ask_replicas(partial(self._check, timeout))
        usable = [result for result in results if isinstance(result, UpstreamInfo)]
        errors = [result for result in results if isinstance(result, UpstreamError)]
        if not usable:
            raise errors[0]
        for error in errors:
            log.warning("a replica cannot be used: %s", error)
        if not errors:
            return usable[0]
        return msgspec.structs.replace(usable[0], details={"unusable": [str(error) for error in errors]})

    async def _check(self, seconds: float, replica: Replica) -> UpstreamInfo:
        info = await replica.check(self.config.model, seconds=seconds)
        if replica.refresh_at == 0.0:
            self.maintenance.refresh(replica)
        return info


def _encoding_error(error: Exception) -> UpstreamError:
    """Return the error for a request that cannot be encoded."""
    if isinstance(error, UsageError):
        return UpstreamError(str(error), cause="upstream.rejected")
    return UpstreamError(f"the request cannot be encoded as JSON: {describe(error)}", cause="upstream.rejected")
