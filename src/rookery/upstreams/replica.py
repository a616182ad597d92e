"""One server: its connections, its places, and one exchange of bytes with it.

Promises:
- an exchange gives the whole answer or raises `Failure`, which says whether it may be tried again;
- an answer longer than `MAX_ANSWER` is refused while it comes in, not after;
- the bytes of a stream are passed on as they arrive; who is slow to take them slows the server down;
- a stream that ends in the middle is a failure, and one that may be tried again only if nothing was passed on;
- cancelling or running out of time closes the connection: engines learn to abort from that;
- time in which the server was frozen is not part of a call's deadline;
- what a call receives, and when, is kept in its `CallProgress`, by which a hung server is recognised;
- no redirect is followed and no proxy taken from the environment: the key goes to this server alone.
"""

import asyncio
import base64
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from math import inf
from time import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from yarl import URL

from rookery import __version__
from rookery.core import UpstreamError, cause_of
from rookery.core.apart import apart
from rookery.upstreams.choose import mark
from rookery.upstreams.complaints import Complaint, complaint
from rookery.upstreams.health import Health
from rookery.upstreams.http import (
    BadAnswer,
    Broken,
    Client,
    Dropped,
    HttpFailure,
    NotConnected,
    Response,
    TooLong,
    header_lines,
)
from rookery.upstreams.places import Places
from rookery.upstreams.retry import Kind
from rookery.upstreams.urls import Address, redact

if TYPE_CHECKING:
    from rookery.upstreams.hangs import UpstreamEvidence

MAX_ANSWER: Final = 256 << 20
MAX_COMPLAINT: Final = 64 << 10
CONNECT_SECONDS: Final = 10.0
FAREWELL_SECONDS: Final = 5.0
"""How long the end of a stream may take after the answer's finish."""
_AHEAD: Final = 64 << 10
"""Bytes of a stream that are read ahead of a slow `news`, about twice."""
_DRAINS: Final = 256
_JSON: Final = header_lines({"Accept": "application/json", "Content-Type": "application/json"})
_EVENTS: Final = header_lines({"Accept": "text/event-stream", "Content-Type": "application/json"})


class Answer(NamedTuple):
    """A complete HTTP answer."""

    status: int
    headers: Mapping[str, str]
    """By names in any case."""
    body: bytes


class Failure(Exception):  # noqa: N818  (never leaves the room: `error` does)
    """An exchange that gave no answer: the error to raise, and what kind it is to the retry controller."""

    def __init__(self, kind: Kind, error: UpstreamError, retry_after: float | None = None) -> None:
        super().__init__(str(error))
        self.kind: Kind = kind
        self.error = error
        self.retry_after = retry_after


class Unheard(Exception):  # noqa: N818  (never leaves the room: `error` does)
    """What `news` raised. It is not the server's doing."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Sink(Protocol):
    """Where the bytes of a stream go."""

    @property
    def whole(self) -> bool:
        """Whether the answer has its finish: what may still come is not needed."""
        ...

    @property
    def done(self) -> bool:
        """Whether the stream said that it has ended."""
        ...

    @property
    def told(self) -> bool:
        """Whether anything was passed on."""
        ...

    async def feed(self, data: bytes) -> None: ...


class CallProgress:
    """What one model call under way has received from its replica, and when. Times are the event loop's."""

    __slots__ = ("affinity", "bytes", "deadline", "heard", "hung", "last", "replica", "sent", "streamed")

    def __init__(self, replica: "Replica", affinity: str, now: float, *, streamed: bool) -> None:
        self.replica = replica
        self.affinity = affinity
        self.streamed = streamed
        self.sent = now
        self.heard = now
        """When the last byte came, or when the call was sent."""
        self.last = now
        """As `heard`, or when the call was last found to be working."""
        self.bytes = 0
        self.deadline: asyncio.Timeout | None = None
        self.hung: UpstreamEvidence | None = None
        """Why the call was given up, once its replica was found hung."""

    def received(self, count: int) -> None:
        """Note bytes of the answer."""
        self.bytes += count
        self.heard = self.last = asyncio.get_running_loop().time()
        self.replica.progressed(self)


class Replica:
    """One server of an upstream. Everything it says about itself is free of secrets."""

    def __init__(self, address: Address, *, concurrency: int, key: str | None) -> None:
        self.name = address.shown
        self.salt = mark(address.shown)
        self.models = address.endpoint("models")
        self.places = Places(concurrency)
        self.health = Health()
        self.lacks: frozenset[str] = frozenset()
        """Endpoints that it was found not to have."""
        self.refresh_at = inf
        """When to ask it again how much it can take."""
        self.load = 0
        """Calls that wait for a place or hold one."""
        self._address = address
        self._endpoints: dict[str, URL] = {}
        self._deadlines: set[asyncio.Timeout] = set()
        self._frozen: dict[asyncio.Timeout, float] | None = None
        """Seconds that were left to each call when the server was frozen."""
        self._draining: set[asyncio.Task[None]] = set()
        self.calls: set[CallProgress] = set()
        """Model calls under way."""
        self._call_of_task: dict[asyncio.Task[Any] | None, CallProgress] = {}
        """The same by the task that makes the call."""
        self.hung = False
        """Whether it was found hung: it must give a token before it gets calls again."""
        self._progress: list[tuple[CallProgress, float]] = []
        """The two calls that made progress last, the latest first, and when."""
        self.longest_answer = 0.0
        """Seconds that the longest of its answers took."""
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
        return self.places.limit

    def endpoint(self, path: str) -> URL:
        url = self._endpoints.get(path)
        if url is None:
            url = self._endpoints[path] = self._address.endpoint(path)
        return url

    def error(self, cause: str, what: str) -> UpstreamError:
        """The error that names this server, what happened, and what to do."""
        text = self.scrub(f"{self.name}: {what}")
        return UpstreamError(f"{text.rstrip('.')}. {cause_of(cause).advice}", cause=cause)

    def scrub(self, text: str) -> str:
        """The text without the key, should a server have quoted it."""
        for secret in self._secrets:
            if len(secret) >= 4:  # "x" or "-" stands for no key at all, and occurs in every text
                text = text.replace(secret, "***")
        return text

    def _open(self) -> Client:
        if self._closed:
            raise Failure("final", self.error("upstream.unreachable", "this upstream is closed"))
        if self._client is None:
            self._client = Client(
                self.models.host or "",
                self.models.port or 0,
                ssl=self.models.scheme == "https",
                headers=self._headers,
                connect=CONNECT_SECONDS,
                buffer=_AHEAD,
                again=False,
            )
        return self._client

    async def close(self) -> None:
        self._closed = True
        for task in self._draining:
            task.cancel()
        if self._client is not None:
            await self._client.close()

    async def exchange(self, url: URL, body: bytes | None, *, seconds: float) -> Answer:
        """POST `body`, or GET where there is none; the complete answer, whatever its status."""
        call = self._call_of_task.get(asyncio.current_task())
        response: Response | None = None
        client = self._open()
        try:
            async with asyncio.timeout(seconds) as deadline:
                self._deadlines.add(deadline)
                if call is not None:
                    call.deadline = deadline
                try:
                    method = "GET" if body is None else "POST"
                    response = await client.send(method, url.raw_path_qs, _JSON, body or b"")
                    if call is not None:
                        call.received(1)
                    return Answer(response.status, response.headers, await self._read(response))
                finally:
                    self._deadlines.discard(deadline)
        except (HttpFailure, TimeoutError) as error:
            raise self._failure(error, seconds, answering=response is not None, call=call) from error

    async def stream(self, url: URL, body: bytes, *, seconds: float, sink: Sink) -> Answer:
        """POST `body`; the bytes of an event stream go to `sink` as they arrive, and the answer has none.

        Returns at the end of the stream, whether or not the answer is whole. Every other answer, an error's above
        all, comes back complete and without having gone anywhere."""
        call = self._call_of_task.get(asyncio.current_task())
        response: Response | None = None
        client = self._open()
        try:
            async with asyncio.timeout(seconds) as deadline:
                self._deadlines.add(deadline)
                if call is not None:
                    call.deadline = deadline
                try:
                    response = await client.send("POST", url.raw_path_qs, _EVENTS, body)
                    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
                    if response.status != 200 or kind != "text/event-stream":
                        return Answer(response.status, response.headers, await self._read(response))
                    await self._events(response, sink, deadline, call)
                    return Answer(response.status, response.headers, b"")
                finally:
                    self._deadlines.discard(deadline)
        except (HttpFailure, TimeoutError) as error:
            if response is not None and sink.whole:  # all of the answer is there: only its farewell is missing
                return Answer(response.status, response.headers, b"")
            if response is None or isinstance(error, TimeoutError | TooLong):
                failure = self._failure(error, seconds, answering=response is not None, call=call)
                if sink.told:
                    failure.kind = "final"
                raise failure from error
            what = f"the connection ended in the middle of the stream ({_reason(error)})"
            raise Failure("final" if sink.told else "dropped", self.error("upstream.cut", what)) from error
        finally:
            if response is not None:
                self._leave(response, drain=sink.done)

    async def _events(
        self, response: Response, sink: Sink, deadline: asyncio.Timeout, call: CallProgress | None
    ) -> None:
        hurried = False
        while not sink.done and (data := await response.chunk()):
            if call is not None:
                call.received(len(data))
            await sink.feed(data)
            if sink.whole and not hurried:
                hurried = True
                soon = asyncio.get_running_loop().time() + FAREWELL_SECONDS
                if (when := deadline.when()) is None or when > soon:
                    deadline.reschedule(soon)

    def _leave(self, response: Response, *, drain: bool) -> None:
        """Gives the connection back. Servers end a stream a moment after they said so: closing in that moment
        would cost a new connection for every call."""
        if drain and not response.done and len(self._draining) < _DRAINS and not self._closed:
            task = asyncio.get_running_loop().create_task(_drain(response), context=apart())
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)
        else:
            response.close()

    # ------------------------------------------------------------------------------------------ frozen

    def frozen(self) -> None:
        """The server stands still: what passes from now on is nobody's time."""
        if self._frozen is None:
            now = asyncio.get_running_loop().time()
            self._frozen = {}
            for deadline in self._deadlines:
                if (when := deadline.when()) is not None and not deadline.expired():
                    self._frozen[deadline] = max(0.0, when - now)
                    deadline.reschedule(None)

    def thawed(self) -> None:
        """It goes on: so do the deadlines of its calls."""
        left, self._frozen = self._frozen or {}, None
        now = asyncio.get_running_loop().time()
        for deadline, seconds in left.items():
            if deadline in self._deadlines:
                deadline.reschedule(now + seconds)

    @property
    def is_frozen(self) -> bool:
        return self._frozen is not None

    # ---- hung servers

    def progressed(self, call: CallProgress) -> None:
        """A model call received something."""
        now = asyncio.get_running_loop().time()
        latest = self._progress
        if latest and latest[0][0] is call:
            latest[0] = (call, now)
        else:
            self._progress = [(call, now), *latest[:1]]
        self._wake()

    def begun(self, call: CallProgress) -> None:
        """A model call begins; what the current task now exchanges with the server is part of it."""
        self.calls.add(call)
        self._call_of_task[asyncio.current_task()] = call

    def ended(self, call: CallProgress) -> None:
        """A model call is over, answered or not."""
        self.calls.discard(call)
        self._call_of_task.pop(asyncio.current_task(), None)
        self._wake()

    def _wake(self) -> None:
        if self._progress_waiters:
            for waiter in self._progress_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._progress_waiters.clear()

    def others_progress(self, call: CallProgress) -> float | None:
        """When a call other than this one last received something; None: never."""
        return next((when for other, when in self._progress if other is not call), None)

    def next_progress(self) -> "asyncio.Future[None]":
        """A future that is done when any call next receives something or ends."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._progress_waiters = [one for one in self._progress_waiters if not one.done()]
        self._progress_waiters.append(waiter)
        return waiter

    def calls_older_than(self, seconds: float) -> list[CallProgress]:
        now = asyncio.get_running_loop().time()
        return [call for call in self.calls if now - call.sent >= seconds]

    def mark_hung(self, now: float, reason: str) -> None:
        """Send it no further calls until it gives a token again, where there are other replicas."""
        self.hung = True
        self.health.failed("gone", f"{self.name} hangs ({reason})", now=now)

    def give_up(self, call: CallProgress, evidence: "UpstreamEvidence") -> None:
        """End a call under way with `upstream.hung`."""
        call.hung = evidence
        if call.deadline is not None and not call.deadline.expired():
            call.deadline.reschedule(asyncio.get_running_loop().time())

    def hung_error(self, evidence: "UpstreamEvidence") -> UpstreamError:
        """The error of a call whose server hangs."""
        error = self.error("upstream.hung", f"the server hangs: {evidence.text}")
        error.evidence = evidence
        return error

    # ------------------------------------------------------------------------------------------ failures

    def _failure(
        self,
        error: HttpFailure | TimeoutError,
        seconds: float,
        *,
        answering: bool,
        call: CallProgress | None = None,
    ) -> Failure:
        match error:
            case TimeoutError() if call is not None and call.hung is not None:
                return Failure("hung", self.hung_error(call.hung))
            case TimeoutError():
                what = f"no complete answer within {seconds:.3g} s"
                return Failure("final", self.error("upstream.timeout", what))
            case NotConnected():
                kind: Kind = "final" if error.why in ("tls", "closed") else "connect"
                return Failure(kind, self.error("upstream.unreachable", _reason(error)))
            case Dropped():
                return Failure("dropped", self.error("upstream.unreachable", _reason(error)))
            case Broken() if not answering:
                what = "the connection was closed before an answer came"
                return Failure("dropped", self.error("upstream.unreachable", what))
            case TooLong():
                what = f"the answer is longer than {MAX_ANSWER >> 20} MB"
                return Failure("final", self.error("upstream.protocol", what))
            case BadAnswer():
                what = f"the answer is not HTTP ({_reason(error)})"
                return Failure("final", self.error("upstream.protocol", what))
        return Failure("final", self.error("upstream.protocol", _reason(error)))

    async def _read(self, response: Response) -> bytes:
        if not 200 <= response.status < 300:
            return await response.read(MAX_COMPLAINT, cut=True)
        if (packed := response.headers.get("Content-Encoding", "identity")) != "identity":
            response.close()
            what = f"the answer is packed as {packed[:40]!r}, which was not asked for"
            raise Failure("final", self.error("upstream.protocol", what))
        return await response.read(MAX_ANSWER)

    def refusal(self, answer: Answer) -> tuple[Failure, Complaint]:
        """What an answer that is not a success means."""
        status = answer.status
        said = complaint(answer.body)
        words = f"answered {status}" + (f": {said.text}" if said.text else "")
        kind: Kind = "final"
        after = None
        if status in (429, 503, 529):
            kind, cause = "overloaded", "upstream.overloaded"
            after = retry_after(answer.headers.get("Retry-After"))
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
            if location := answer.headers.get("Location"):
                words = f"answered {status}: go to {redact(location)[:200]!r} instead"
        return Failure(kind, self.error(cause, words), after), said


async def _drain(response: Response) -> None:
    """Reads what is left, which is nothing but the end; so the connection can be used again."""
    try:
        async with asyncio.timeout(1.0):
            while await response.chunk():
                pass
    except (TimeoutError, HttpFailure):
        response.close()


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None where there is none that can be read."""
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
