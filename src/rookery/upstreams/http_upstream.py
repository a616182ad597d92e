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
import os
import random
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import msgspec

from rookery.core import Sampling, Truncation, UpstreamError, UsageError
from rookery.core.errors import describe
from rookery.upstreams.error_replies import find_refused_field, is_context_full
from rookery.upstreams.format import (
    About,
    ErrorReply,
    Format,
    ReplyFormatError,
    StreamParser,
    WireOptions,
    delta_from_reply,
)
from rookery.upstreams.hang_detector import RECENT_SECONDS, HangDetector, UpstreamEvidence
from rookery.upstreams.health import Sign
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
from rookery.upstreams.replica import (
    MISSING,
    CallbackError,
    CallProgress,
    DeltaSink,
    Failure,
    RawResponse,
    Replica,
    ReplicaState,
)
from rookery.upstreams.replica_choice import choose
from rookery.upstreams.replica_maintenance import PROBE_SECONDS, ReplicaMaintenance
from rookery.upstreams.retry import Backoff, Kind
from rookery.upstreams.urls import Address

__all__ = [
    "About",
    "Format",
    "HttpUpstream",
    "LoadMetrics",
    "Replica",
    "ReplicaState",
    "ReplyFormatError",
    "StreamParser",
    "WireOptions",
]

log = logging.getLogger("rookery.upstreams")

SIZE_SECONDS: Final = 10.0
T = TypeVar("T")
_SIGNS: Final[dict[str, Sign]] = {"connect": "gone", "dropped": "gone", "gateway": "gone", "error": "failing"}


class _Resend(Exception):  # noqa: N818  (control flow: never leaves this module)
    """Raised to send the same call again at once, without a field or endpoint that the server rejects."""

    def __init__(self, omit: frozenset[str]) -> None:
        super().__init__()
        self.omit = omit


class _Encoded(NamedTuple):
    """A request as it is sent to one endpoint."""

    format: Format
    request: ModelRequest
    """The caller's request with the model, the seed and the ID filled in."""
    options: WireOptions
    body: bytes
    """The JSON of the request, in `format`."""
    chose_seed: bool
    """True if the seed is not the caller's."""


class HttpUpstream:
    """Upstream for an inference engine that is reached over HTTP, at one or more replicas (servers of the same
    model).

    Use one instance from one event loop only.
    """

    health_path: ClassVar[str] = "models"
    """Endpoint for health checks. Any response below status 500 counts as healthy."""
    identity_paths: ClassVar[tuple[str, ...]] = ()
    """Endpoints that are queried to detect whether a server is of this kind; `is_identity` judges the response."""
    pause_paths: ClassVar[tuple[str, ...]] = ()
    """Endpoints that return a JSON object with a true value while the server is paused or sleeps."""
    load_metrics: ClassVar[LoadMetrics | None] = None
    """Names of the metrics at `/metrics` that show how busy the server is; None if it has no such metrics."""
    control_requests: ClassVar[dict[str, tuple[str, bytes]]] = {}
    """Path and body of the requests that stop and continue sampling. The keys are pause modes, and `thaw`."""
    reserved: ClassVar[frozenset[str]] = frozenset()
    """Request fields that users may not set in `sampling.extra`, because Rookery sets them itself."""
    needs_ids: ClassVar[bool] = False
    """If True, every call is sent with an ID, so that it can be aborted by that ID."""

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:
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
        if config.concurrency is None and type(self).size is not HttpUpstream.size:
            for replica in replicas:
                replica.refresh_at = 0.0
        self.name = config.kind
        self.accepts_tokens = True
        self.accepts_raw_json = True
        self.version = 0
        """The policy version recorded for replies in which the server reports none."""
        self.backoff = Backoff(retries=config.retries)
        self._rejected_fields: frozenset[str] = frozenset()
        self._turn = 0
        self._between_tries: list[tuple[str, Replica, UpstreamError, float]] = []
        """Calls that wait for a retry: `ModelRequest.affinity`, replica, last error, and when the call began."""
        self.hangs = HangDetector(self.health_path, lambda: config.model, self.pause_paths, self.load_metrics)
        self.maintenance = ReplicaMaintenance(self.health_path, self.hangs, self.size, share)

    # ---- differs between kinds of engines

    def choose_format(self, replica: Replica, request: ModelRequest, omit: frozenset[str]) -> Format:
        """Return the format of the endpoint to use for this call at this replica.

        `omit` holds rejected fields and, with a leading slash, paths of endpoints that the server lacks.
        """
        raise NotImplementedError

    def is_optional(self, endpoint: Format) -> bool:  # noqa: ARG002  (a kind may override it)
        """Return True if calls can use another endpoint at servers that lack or disable this one."""
        return False

    async def size(self, replica: Replica) -> int | None:  # noqa: ARG002  (a kind may override it)
        """Query how many calls the inference engine processes at once. Return None if it does not report that.

        A kind of upstream overrides this if its inference engine reports the number. Raises `Failure` if the query
        fails.
        """
        return None

    def abort_request(self, request: ModelRequest) -> tuple[str, bytes] | None:  # noqa: ARG002  (as above)
        """Return path and body of the request that aborts a call by its ID.

        None means that closing the connection is enough for this kind of inference engine.
        """
        return None

    def is_identity(self, body: bytes) -> bool:  # noqa: ARG002  (as above)
        """Return True if the body of a response from one of `identity_paths` shows that the server is of this
        kind."""
        return False

    async def identify(self) -> bool:
        """Query the first replica, and return True if it is a server of this kind; False also if it does not
        respond."""
        for path in self.identity_paths:
            try:
                reply = await self.replicas[0].exchange(path, None, seconds=PROBE_SECONDS)
            except Failure:
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
        call_id, omit = request.id, self._rejected_fields
        encoded: _Encoded | None = None
        queued = elapsed = 0.0
        attempt = dropped = 0
        avoid: Replica | None = None
        resend_to: Replica | None = None
        while True:
            only = self.replicas[0] if len(self.replicas) == 1 else None
            replica = resend_to or only or self._choose(request, avoid, loop.time())
            if encoded is None or len(self.replicas) > 1:
                encoded = self._encode(replica, request, omit, encoded, stream=on_delta is not None)
            replica.load += 1
            try:
                if not replica.gate.acquire_nowait():
                    queued += await replica.gate.acquire(on_wait)
                started = loop.time()
                try:
                    reply = await self._send(replica, encoded, timeout - elapsed, queued, on_delta)
                finally:
                    replica.gate.release()
                    elapsed += loop.time() - started
                replica.longest_call = max(replica.longest_call, loop.time() - started)
                self._note_success(replica, omit, started)
                return reply  # noqa: TRY300
            except _Resend as resend:
                omit, encoded, resend_to = resend.omit, None, replica
                continue
            except CallbackError as raised:
                raise raised.error from raised.error.__cause__
            except Failure as failure:
                self._note_failure(replica, failure, loop.time())
                delay = self.backoff.delay(
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
                log.debug("%s; retrying in %.2f s", failure.error, delay)
                error = failure.error
                attempt += 1
                dropped += failure.kind in ("dropped", "error")
                avoid, resend_to, encoded = replica, None, None
                omit = frozenset(name for name in omit if not name.startswith("/"))  # another server may have it
                if call_id:  # the inference engine may still know the last ID
                    request = msgspec.structs.replace(request, id=f"{call_id}.{attempt}")
            finally:
                replica.load -= 1
            waiting = (request.affinity, replica, error, loop.time() - elapsed)
            self._between_tries.append(waiting)
            try:
                await asyncio.sleep(delay)
            finally:
                self._between_tries.remove(waiting)
            elapsed += delay

    async def _send(
        self,
        replica: Replica,
        encoded: _Encoded,
        seconds: float,
        queued: float,
        on_delta: OnDelta | None,
    ) -> ModelReply:
        """Send an encoded request to one replica and return the parsed reply.

        `seconds` is the time limit. `queued` is how many seconds the request has waited for a free slot of a
        replica; the reply records it. `on_delta` receives the parts of the reply as they arrive, or the whole
        reply at the end if it is not streamed.
        """
        endpoint, request, options, body, _ = encoded
        version = self.version  # of the weights with which the reply begins
        now = asyncio.get_running_loop().time()
        call = CallProgress(replica, request.affinity, now, now, now, options.stream)
        sink: DeltaSink | None = None
        if options.stream:
            assert on_delta is not None
            sink = DeltaSink(endpoint.stream_parser(request), on_delta)
        if self.hangs.watcher is None:
            self.hangs.watch(self.replicas)
        try:
            answer = await replica.exchange(endpoint.path, body, seconds=seconds, call=call, sink=sink)
            if sink is not None and not answer.body and answer.status == 200:
                if missing := sink.parser.ended():
                    kind: Kind = "final" if sink.delivered else "dropped"
                    raise Failure(kind, replica.error("upstream.cut", missing))
                return sink.parser.reply(About(answer.version(version), queued, replica.name))
            if not 200 <= answer.status < 300:
                raise self._refusal(replica, encoded, answer)
            about = About(answer.version(version), queued, replica.name)
            reply = endpoint.decode(answer.body, request, about)
        except (asyncio.CancelledError, CallbackError):
            self._abandon(replica, request)
            raise
        except Failure as failure:
            if failure.error.code in ("upstream.timeout", "upstream.cut", "upstream.hung"):
                self._abandon(replica, request)
            raise
        except ReplyFormatError as error:
            self._abandon(replica, request)
            raise Failure("final", replica.error("upstream.protocol", str(error))) from error
        except ErrorReply as raised:
            answer = RawResponse(raised.error.status, {}, raised.data)
            delivered = sink is not None and sink.delivered
            raise self._refusal(replica, encoded, answer, delivered=delivered) from None
        if on_delta is not None:
            await on_delta(delta_from_reply(reply))
        return reply

    def _refusal(
        self,
        replica: Replica,
        encoded: _Encoded,
        answer: RawResponse,
        *,
        delivered: bool = False,
    ) -> Exception:
        """Return the exception to raise for a response that is not a success.

        This is a `Failure`, a `Truncation` if the context is full, or `_Resend` if the call can be sent again
        without what the server rejected. `delivered` is True if the caller has received a part of the reply.
        """
        endpoint, request, options, _, chose_seed = encoded
        failure, server_error = replica.refusal(answer)
        if delivered:
            failure.kind = "final"
            return failure
        omit = options.omit
        if answer.status in (*MISSING, 403) and self.is_optional(endpoint):
            return _Resend(omit | {endpoint.path})
        if answer.status in (400, 413, 422):
            sampling = request.sampling
            if is_context_full(server_error, sampling.max_tokens):
                return Truncation("context", replica.scrub(f"{replica.name}: {server_error.text}"))
            sent = {"max_tokens"} if sampling.max_tokens is not None else set()
            if request.want_tokens:
                sent |= {"return_token_ids", "logprobs"}
            if options.stream:
                sent.add("stream_options")
            if chose_seed:
                sent.add("seed")
            if field := find_refused_field(server_error, answer.body, sent - omit):
                return _Resend(omit | {field})
        return failure

    def _note_success(self, replica: Replica, omit: frozenset[str], now: float) -> None:
        if omit is not self._rejected_fields:
            self._learn(replica, omit)
        replica.hung = False
        if replica.health.answered():
            log.warning("the replica %s answers again and receives calls", replica.name)
        if now >= replica.refresh_at:
            self.maintenance.refresh(replica)

    def _learn(self, replica: Replica, without: frozenset[str]) -> None:
        # Only after a call without it has succeeded: some servers quote the whole request in every error, so that
        # token data would be given up for a wrong temperature, or an endpoint for a wrong model.
        paths = frozenset(name for name in without if name.startswith("/"))
        if new := paths - replica.lacks:
            replica.lacks |= new
            log.info(
                "the replica %s has no endpoint %s; continuing without it",
                replica.name,
                ", ".join(sorted(new)),
            )
        if new := without - paths - self._rejected_fields:
            self._rejected_fields |= new
            log.warning(
                "the replica %s rejects the request field %s; continuing without it",
                replica.name,
                ", ".join(sorted(new)),
            )

    def _note_failure(self, replica: Replica, failure: Failure, now: float) -> None:
        sign = _SIGNS.get(failure.kind)
        if sign is None and failure.error.code in ("upstream.timeout", "upstream.cut"):
            sign = "failing"
        if (
            sign is not None
            and replica.health.failed(sign, str(failure.error), now=now)
            and len(self.replicas) > 1
        ):
            log.warning("a replica receives no calls until it answers a probe: %s", failure.error)

    # ---- requests

    def _encode(
        self,
        replica: Replica,
        request: ModelRequest,
        omit: frozenset[str],
        before: _Encoded | None,
        *,
        stream: bool,
    ) -> _Encoded:
        """Validate a request, fill in its model, seed and ID if they are missing and needed, and encode it.

        Return `before` if the request was encoded for the same endpoint already. Fields in `omit` are left out.
        """
        endpoint = self.choose_format(replica, request, omit)
        if before is not None and before.format is endpoint:
            return before
        if bool(request.messages) == bool(request.tokens):
            raise UpstreamError("a call needs either messages or tokens", cause="upstream.rejected")
        config, sampling = self.config, request.sampling
        changes: dict[str, Any] = {}
        if not request.model and config.model:
            changes["model"] = config.model
        chose_seed = config.seeded and sampling.seed is None and request.seed is not None and "seed" not in omit
        if chose_seed:
            assert request.seed is not None
            # 31 bits, which every server accepts; the upper ones, since the lower ones repeat soonest.
            seed = (request.seed >> 32) & 0x7FFF_FFFF
            changes["sampling"] = msgspec.structs.replace(sampling, seed=seed)
        if self.needs_ids and not request.id:
            changes["id"] = secrets.token_hex(12)
        if changes:
            request = msgspec.structs.replace(request, **changes)
        options = WireOptions(stream and endpoint.streams(request), omit, config.resend_reasoning)
        try:
            if sampling.extra:
                self._check_extra(sampling)
            return _Encoded(endpoint, request, options, endpoint.encode(request, options), chose_seed)
        except UsageError as error:
            raise UpstreamError(str(error), cause="upstream.rejected") from None
        except (TypeError, ValueError, RecursionError) as error:
            what = f"the request cannot be encoded as JSON: {describe(error)}"
            raise UpstreamError(what, cause="upstream.rejected") from error

    def _check_extra(self, sampling: Sampling) -> None:
        if reserved := sorted(self.reserved & sampling.extra.keys()):
            raise UsageError(f"sampling.extra may not set {', '.join(reserved)}: Rookery sets these itself")

    def _has_other(self, replica: Replica, kind: str) -> bool:
        """Return True if another replica can be tried; after a failure of the kind `hung`, one not known to
        hang."""
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
        """Cancel background tasks and close every connection, which fails the calls in flight. Closing twice is
        fine."""
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
        """Send a control request. Return False if the server lacks the endpoint; raise `Failure` if the request
        fails.

        Returns True, with a warning in the log, if the server cannot be reached.
        """
        try:
            answer = await replica.exchange(path, body, seconds=seconds)
        except Failure as failure:
            if failure.kind == "connect":
                log.warning(
                    "the control request %s was not sent, because the replica is unreachable: %s",
                    path,
                    failure.error,
                )
                return True
            raise
        if answer.status in MISSING:
            return False
        if not 200 <= answer.status < 300:
            raise replica.refusal(answer)[0]
        return True

    async def _ask_replicas(self, ask: Callable[[Replica], Awaitable[T]]) -> list[T | UpstreamError]:
        """Call `ask` for every replica concurrently, and return the results; an error stands for a failed call."""

        async def one(replica: Replica) -> T | UpstreamError:
            try:
                return await ask(replica)
            except UpstreamError as error:
                return error
            except Failure as failure:
                failure.error.__cause__ = failure.__cause__
                return failure.error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(replica)) for replica in self.replicas]
        return [task.result() for task in tasks]

    # ---- check

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        """Return what the first usable server reports. Raises `UpstreamError` if no server can be used. Samples no
        token."""
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


def read_key(config: UpstreamConfig, key: str | None = None) -> str | None:
    """Return the API key of an upstream: `key`, or that in an environment variable; None if there is none."""
    names = [config.key_env] if config.key_env != "ROOKERY_API_KEY" else [config.key_env, "OPENAI_API_KEY"]
    if key is None:
        key = next((found for name in names if name and (found := os.environ.get(name))), None)
    key = key.strip() if key else None
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(
            "the inference engine's API key has characters that no HTTP header can contain; set it again"
        )
    return key or None
