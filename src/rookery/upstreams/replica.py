"""One server of an upstream: its connections, its concurrency gate, and one HTTP exchange with it.

Runs in runner processes and gateway shards.

Guarantees:
- an exchange (one request and its response) returns the complete response or raises `ExchangeError`, whose `kind`
  decides whether the call may be retried;
- a response that is not streamed and longer than `MAX_RESPONSE_BYTES` is refused while it is received, not
  afterwards;
- the bytes of a stream are passed on as they arrive; a slow consumer slows the server down;
- a stream that ends in the middle is a failure, and may be retried only if nothing was passed on;
- cancelling a call, or its timeout, closes the connection: inference engines abort a call when that happens;
- time during which the server was frozen does not count towards a call's deadline;
- `CallProgress` records what a call received and when, which is how a hung server is recognised;
- no redirect is followed: the key is sent to this server only.

No proxy is taken from the environment.
"""

import asyncio
import base64
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from math import inf
from time import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from rookery import __version__
from rookery.core import UpstreamError, get_cause
from rookery.core.lifetimes import detached_context
from rookery.telemetry import tracing
from rookery.upstreams.concurrency_gate import ConcurrencyGate
from rookery.upstreams.error_replies import ServerError, parse_error
from rookery.upstreams.format import StreamParser, parse_version
from rookery.upstreams.health import Health
from rookery.upstreams.http_client import (
    Client,
    ConnectError,
    ConnectionDropped,
    EncodedHeaders,
    HttpClientError,
    IncompleteResponse,
    InvalidResponse,
    Response,
    ResponseTooLong,
    encode_headers,
)
from rookery.upstreams.protocol import OnDelta, UpstreamInfo
from rookery.upstreams.replica_choice import stable_hash
from rookery.upstreams.retry import FailureKind
from rookery.upstreams.urls import Address, redact

if TYPE_CHECKING:
    from rookery.upstreams.hang_detector import UpstreamEvidence

MAX_RESPONSE_BYTES: Final = 256 << 20
MAX_ERROR_BODY_BYTES: Final = 64 << 10
CONNECT_SECONDS: Final = 10.0
STREAM_END_SECONDS: Final = 5.0
"""Timeout in seconds for the end of a stream, after its finish reason has arrived."""
_STREAM_BUFFER_BYTES: Final = 64 << 10
"""Reading from the connection stops when more than this many bytes of a stream wait for a slow `on_delta`
callback."""
_MAX_DRAINING: Final = 256
MISSING: Final = (404, 405, 501)
"""HTTP statuses with which servers respond to a request for an endpoint that they do not have."""
_JSON_HEADERS: Final = {"Accept": "application/json", "Content-Type": "application/json"}
_EVENT_HEADERS: Final = {"Accept": "text/event-stream", "Content-Type": "application/json"}
_JSON: Final = encode_headers(_JSON_HEADERS)
_EVENTS: Final = encode_headers(_EVENT_HEADERS)


def _add_trace_context(*, streams: bool) -> EncodedHeaders:
    """Return the headers of a model call with its trace context, so that spans of the server join the trace."""
    headers = _EVENT_HEADERS if streams else _JSON_HEADERS
    context = tracing.write_traceparent()
    return encode_headers({**headers, "traceparent": context} if context else headers)


class RawResponse(NamedTuple):
    """A complete HTTP response."""

    status: int
    headers: Mapping[str, str]
    """The headers. Names are case-insensitive."""
    body: bytes

    def version(self, fallback: int) -> int:
        """Return the policy version in the header `X-Weight-Version`, or `fallback` if there is no valid one."""
        header = self.headers.get("X-Weight-Version")
        version = parse_version(header) if header is not None else None
        return fallback if version is None else version


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a replica, for logs and metrics."""

    name: str
    healthy: bool
    reason: str
    """The reason why the replica receives no calls at present; empty if it is healthy."""
    load: int
    """Calls in flight and calls that wait for the concurrency gate."""
    limit: int


class ExchangeError(Exception):
    """Raised for an exchange without a usable response.

    `error` is what the caller of the model call gets if there is no retry, `kind` decides whether there is one,
    and `retry_after` is the server's `Retry-After` in seconds.
    """

    def __init__(self, kind: FailureKind, error: UpstreamError, retry_after: float | None = None) -> None:
        super().__init__(str(error))
        self.kind: FailureKind = kind
        self.error = error
        self.retry_after = retry_after


class CallbackError(Exception):
    """Wraps an exception that `on_delta` raised. The server is not responsible for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class DeltaSink:
    """Parse the bytes of a streamed reply, and pass each piece to the caller's `on_delta`."""

    def __init__(self, parser: StreamParser, on_delta: OnDelta) -> None:
        self.parser = parser
        self.on_delta = on_delta
        self.delivered = False
        """True if a piece of the reply was passed to the caller."""

    async def feed(self, data: bytes) -> None:
        delta = self.parser.feed(data)
        if delta is not None:
            self.delivered = True
            try:
                await self.on_delta(delta)
            except Exception as error:
                raise CallbackError(error) from error


class CallProgress(msgspec.Struct, eq=False):
    """The data that a model call in flight has received, with times. Times are those of the event loop's clock."""

    replica: "Replica"
    affinity: str
    sent: float
    last_byte: float
    """Time at which the last byte arrived, or the call was sent if none has arrived."""
    last: float
    """Time from which the silence of the call is counted: `last_byte`, or later if an examination found it
    working."""
    streamed: bool
    bytes: int = 0
    deadline: asyncio.Timeout | None = None
    hung: "UpstreamEvidence | None" = None
    """The evidence, once the call was ended because its server hangs; otherwise None."""

    def received(self, count: int) -> None:
        """Record that `count` bytes of the reply arrived now."""
        self.bytes += count
        self.last_byte = self.last = now = asyncio.get_running_loop().time()
        self.replica.progressed(self, now)


class Replica:
    """One server of an upstream. Its name and error messages contain no secrets."""

    def __init__(self, address: Address, *, concurrency: int, key: str | None) -> None:
        self.name = address.shown
        self.salt = stable_hash(address.shown)
        self.gate = ConcurrencyGate(concurrency)
        self.health = Health()
        self.lacks: frozenset[str] = frozenset()
        """Paths of endpoints that the server does not have."""
        self.refresh_at = inf
        """Event loop time at which to query the server's concurrency limit again; infinity for never."""
        self.load = 0
        """Calls in flight and calls that wait for the concurrency gate."""
        self._address = address
        self._targets: dict[str, str] = {}
        """Cache of HTTP request targets, by endpoint path."""
        self.deadlines: set[asyncio.Timeout] = set()
        self._frozen: dict[asyncio.Timeout, float] | None = None
        """The seconds that were left until each deadline when the server stopped sampling; None if it is not
        frozen."""
        self.draining: set[asyncio.Task[None]] = set()
        self.calls: set[CallProgress] = set()
        """Model calls in flight."""
        self.hung = False
        """True if the server was found hung. Its next probe then requests a token, not only a health check."""
        self._progress: list[tuple[CallProgress, float]] = []
        """The two calls that received bytes last, each with the time, latest first."""
        self.longest_call = 0.0
        """The duration in seconds of the longest successful call to this server."""
        self._progress_waiters: list[asyncio.Future[None]] = []
        self._headers = {
            "Accept-Encoding": "identity",  # on a local network, inflating costs more than sending
            "User-Agent": f"rookery/{__version__}",
        }
        self._secrets: list[str] = []
        if address.login is not None:
            token = base64.b64encode(":".join(address.login).encode()).decode()
            self._headers["Authorization"] = f"Basic {token}"
            self._secrets += [token, address.login[1]]
        elif key:
            self._headers["Authorization"] = f"Bearer {key}"
            self._secrets.append(key)
        self._client: Client | None = None
        self._closed = False

    @property
    def limit(self) -> int:
        return self.gate.limit

    def state(self) -> ReplicaState:
        health = self.health
        return ReplicaState(
            name=self.name, healthy=health.healthy, reason=health.reason, load=self.load, limit=self.limit
        )

    def error(self, cause: str, what: str) -> UpstreamError:
        """Return an `UpstreamError` whose text names this server, says what happened, and adds the advice for
        `cause`."""
        text = self.scrub(f"{self.name}: {what}")
        return UpstreamError(f"{text.rstrip('.')}. {get_cause(cause).advice}", cause=cause)

    def scrub(self, text: str) -> str:
        """Replace the API key and the password in a text by `***`, in case the server quoted them."""
        for secret in self._secrets:
            if len(secret) >= 4:  # placeholders such as "x" and "-" occur in every text
                text = text.replace(secret, "***")
        return text

    def _open_client(self) -> Client:
        if self._closed:
            raise ExchangeError(
                "final", self.error("upstream.unreachable", "the upstream was closed before this call")
            )
        url = self._address.endpoint("")
        self._client = Client(
            url.host or "",
            url.port or 0,
            ssl=url.scheme == "https",
            headers=self._headers,
            connect=CONNECT_SECONDS,
            buffer=_STREAM_BUFFER_BYTES,
            retry_stale=False,
        )
        return self._client

    async def close(self) -> None:
        self._closed = True
        for task in self.draining:
            task.cancel()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def exchange(
        self,
        path: str,
        body: bytes | None,
        *,
        seconds: float,
        call: CallProgress | None = None,
        sink: DeltaSink | None = None,
    ) -> RawResponse:
        """Send a POST with `body` to an endpoint, or a GET if `body` is None. Return the response, whatever its
        status.

        `call` is the model call that the exchange belongs to; None for other requests. `seconds` is the timeout.
        With a `sink`, the bytes of an event stream are passed to the sink as they arrive, and the response is
        returned at the end of the stream, whether or not the reply is complete, with an empty body. Any other
        response, for example an error, is returned with its body, and `sink` receives nothing.
        """
        target = self._targets.get(path)
        if target is None:
            target = self._targets[path] = self._address.endpoint(path).raw_path_qs
        client = self._client or self._open_client()
        response: Response | None = None
        try:
            async with asyncio.timeout(seconds) as deadline:
                self.deadlines.add(deadline)
                if call is not None:
                    call.deadline = deadline
                    self.calls.add(call)
                try:
                    headers = _JSON if sink is None else _EVENTS
                    if call is not None and tracing.active is not None:
                        headers = _add_trace_context(streams=sink is not None)
                    response = await client.send("GET" if body is None else "POST", target, headers, body or b"")
                    if sink is not None and response.status == 200:
                        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
                        if kind == "text/event-stream":
                            await self._read_events(response, sink, deadline, call)
                            return RawResponse(response.status, response.headers, b"")
                    if sink is None and call is not None:
                        call.received(1)
                    return RawResponse(response.status, response.headers, await self._read(response))
                finally:
                    self.deadlines.discard(deadline)
        except (HttpClientError, TimeoutError) as error:
            if response is not None and sink is not None and sink.parser.finish is not None:
                # The reply is complete: only the end of the stream is missing.
                return RawResponse(response.status, response.headers, b"")
            raise self._failure(error, seconds, call, sink, answering=response is not None) from error
        finally:
            if sink is not None and response is not None:
                self._leave(response, drain=sink.parser.done)
            if call is not None:
                self.calls.discard(call)
                if self._progress_waiters:
                    self._wake()

    async def _read_events(
        self, response: Response, sink: DeltaSink, deadline: asyncio.Timeout, call: CallProgress | None
    ) -> None:
        parser, shortened = sink.parser, False
        while not parser.done and (data := await response.chunk()):
            if call is not None:
                call.received(len(data))
            await sink.feed(data)
            if parser.finish is not None and not shortened:
                shortened = True
                soon = asyncio.get_running_loop().time() + STREAM_END_SECONDS
                if (when := deadline.when()) is None or when > soon:
                    deadline.reschedule(soon)

    def _leave(self, response: Response, *, drain: bool) -> None:
        """Give up a streamed response. With `drain`, read its end in the background to keep the connection.

        Servers end the response a moment after they announce the end of the stream. Closing the connection in that
        moment would cost a new connection for every call.
        """
        if drain and not response.done and len(self.draining) < _MAX_DRAINING and not self._closed:
            task = asyncio.get_running_loop().create_task(_drain(response), context=detached_context())
            self.draining.add(task)
            task.add_done_callback(self.draining.discard)
        else:
            response.close()

    async def check(self, model: str, *, seconds: float) -> UpstreamInfo:
        """Return what the server reports about itself. Raises `UpstreamError` if it fails or does not serve
        `model`."""
        try:
            response = await self.exchange("models", None, seconds=seconds)
        except ExchangeError as failure:
            raise failure.error from failure.__cause__
        if response.status in MISSING:  # servers of one model often have no list
            return UpstreamInfo(url=self.name)
        if not 200 <= response.status < 300:
            raise self.refusal(response)[0].error
        try:
            listed = _decode_models(response.body).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.error("upstream.protocol", f"cannot parse the list of models ({error})") from error
        models = tuple(entry.id for entry in listed)
        if model and models and model not in models:
            more = f" and {len(models) - 10} more" if len(models) > 10 else ""
            available = ", ".join(models[:10]) + more
            raise self.error("upstream.rejected", f"the model {model!r} is not served; available: {available}")
        named = [entry for entry in listed if entry.id == model] or (listed if len(listed) == 1 else [])
        length = named[0].max_model_len if named else None
        context = length if isinstance(length, int) and length > 0 else None
        return UpstreamInfo(url=self.name, models=models, context=context)

    # ---- frozen

    def frozen(self) -> None:
        """Suspend the deadlines of all calls, because the server was asked to stop sampling."""
        if self._frozen is None:
            now = asyncio.get_running_loop().time()
            self._frozen = {}
            for deadline in self.deadlines:
                if (when := deadline.when()) is not None and not deadline.expired():
                    self._frozen[deadline] = max(0.0, when - now)
                    deadline.reschedule(None)

    def thawed(self) -> None:
        """Continue the suspended deadlines with the time that was left, because the server samples again."""
        left, self._frozen = self._frozen or {}, None
        now = asyncio.get_running_loop().time()
        for deadline, seconds in left.items():
            if deadline in self.deadlines:
                deadline.reschedule(now + seconds)

    @property
    def is_frozen(self) -> bool:
        return self._frozen is not None

    # ---- hung servers

    def progressed(self, call: CallProgress, now: float) -> None:
        """Record that `call` received bytes at the event loop time `now`."""
        latest = self._progress
        if latest and latest[0][0] is call:
            latest[0] = (call, now)
        else:
            self._progress = [(call, now), *latest[:1]]
        if self._progress_waiters:
            self._wake()

    def _wake(self) -> None:
        for waiter in self._progress_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._progress_waiters.clear()

    def last_progress_of_others(self, call: CallProgress) -> float | None:
        """Return when a call other than `call` last received bytes; None if no other call ever did."""
        return next((when for other, when in self._progress if other is not call), None)

    def next_progress(self) -> "asyncio.Future[None]":
        """Return a future that completes when the next call on this replica receives bytes or ends."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._progress_waiters = [one for one in self._progress_waiters if not one.done()]
        self._progress_waiters.append(waiter)
        return waiter

    def calls_older_than(self, seconds: float) -> list[CallProgress]:
        now = asyncio.get_running_loop().time()
        return [call for call in self.calls if now - call.sent >= seconds]

    def mark_hung(self, now: float, reason: str) -> None:
        """Mark the replica as hung and exclude it, so that other replicas receive the calls until it works
        again."""
        self.hung = True
        self.health.failed("gone", f"{self.name} hangs ({reason})", now=now)

    def give_up(self, call: CallProgress, evidence: "UpstreamEvidence") -> None:
        """End a call in flight, by an immediate timeout, with the error `upstream.hung`."""
        call.hung = evidence
        if call.deadline is not None and not call.deadline.expired():
            call.deadline.reschedule(asyncio.get_running_loop().time())

    def hung_error(self, evidence: "UpstreamEvidence") -> UpstreamError:
        """Return the error for a call whose server hangs, with the evidence attached."""
        error = self.error("upstream.hung", f"the server hangs: {evidence.text}")
        error.evidence = evidence
        return error

    # ---- failures

    def _failure(
        self,
        error: HttpClientError | TimeoutError,
        seconds: float,
        call: CallProgress | None,
        sink: DeltaSink | None,
        *,
        answering: bool,
    ) -> ExchangeError:
        """Return the failure for an exchange that ended without a complete response.

        `answering` is True if the head of the response had arrived.
        """
        if answering and sink is not None and not isinstance(error, TimeoutError | ResponseTooLong):
            what = f"the connection ended in the middle of the stream ({_reason(error)})"
            return ExchangeError("final" if sink.delivered else "dropped", self.error("upstream.cut", what))
        failure = self._exchange_failure(error, seconds, call, answering=answering)
        if sink is not None and sink.delivered:
            failure.kind = "final"
        return failure

    def _exchange_failure(
        self, error: HttpClientError | TimeoutError, seconds: float, call: CallProgress | None, *, answering: bool
    ) -> ExchangeError:
        match error:
            case TimeoutError() if call is not None and call.hung is not None:
                return ExchangeError("hung", self.hung_error(call.hung))
            case TimeoutError():
                what = f"no complete reply within {seconds:.3g} s"
                return ExchangeError("final", self.error("upstream.timeout", what))
            case ConnectError():
                kind: FailureKind = "final" if error.reason in ("tls", "closed") else "connect"
                return ExchangeError(kind, self.error("upstream.unreachable", _reason(error)))
            case ConnectionDropped():
                return ExchangeError("dropped", self.error("upstream.unreachable", _reason(error)))
            case IncompleteResponse() if not answering:
                what = "the connection was closed before a response arrived"
                return ExchangeError("dropped", self.error("upstream.unreachable", what))
            case ResponseTooLong():
                what = f"the response is longer than {MAX_RESPONSE_BYTES >> 20} MB"
                return ExchangeError("final", self.error("upstream.protocol", what))
            case InvalidResponse():
                what = f"the response is not valid HTTP ({_reason(error)})"
                return ExchangeError("final", self.error("upstream.protocol", what))
        return ExchangeError("final", self.error("upstream.protocol", _reason(error)))

    async def _read(self, response: Response) -> bytes:
        if not 200 <= response.status < 300:
            return await response.read(MAX_ERROR_BODY_BYTES, cut=True)
        if (packed := response.headers.get("Content-Encoding", "identity")) != "identity":
            response.close()
            what = f"the response has the content encoding {packed[:40]!r}, which was not requested"
            raise ExchangeError("final", self.error("upstream.protocol", what))
        return await response.read(MAX_RESPONSE_BYTES)

    def refusal(self, response: RawResponse) -> tuple[ExchangeError, ServerError]:
        """Convert a response with an error status or a redirect to a failure. Also return the server's parsed
        error."""
        status = response.status
        server_error = parse_error(response.body)
        message = f"answered {status}" + (f": {server_error.text}" if server_error.text else "")
        kind: FailureKind = "final"
        after = None
        if status in (429, 503, 529):
            kind, cause = "overloaded", "upstream.overloaded"
            after = retry_after(response.headers.get("Retry-After"))
        elif status >= 500:
            kind = "gateway" if status == 502 else "final" if status == 504 else "error"
            cause = "upstream.error"
        elif status in (401, 403):
            cause = "upstream.auth"
        elif status == 408:
            cause = "upstream.timeout"
        elif status >= 400:
            cause = "upstream.rejected"
        else:
            cause = "upstream.protocol"
            if location := response.headers.get("Location"):
                message = f"answered {status}, a redirect to {redact(location)[:200]!r}"
        return ExchangeError(kind, self.error(cause, message), after), server_error


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: Any = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


_decode_models = msgspec.json.Decoder(_Models).decode


async def _drain(response: Response) -> None:
    """Read a response to its end, for at most one second, so that its connection can be reused."""
    try:
        async with asyncio.timeout(1.0):
            while await response.chunk():
                pass
    except (TimeoutError, HttpClientError):
        response.close()


def retry_after(value: str | None) -> float | None:
    """Convert a Retry-After header, a number or a date, to seconds from now; None if it is missing or invalid."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time()
        except (ValueError, TypeError, OverflowError):
            return None
    return seconds if 0 <= seconds < float("inf") else 0.0 if seconds < 0 else None


def _reason(error: BaseException) -> str:
    return str(error).strip()[:200] or type(error).__name__
