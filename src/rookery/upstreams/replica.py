"""One server: its connections, its places, and one exchange of bytes with it.

Promises:
- an exchange gives the whole answer or raises `Failure`, which says whether it may be tried again;
- an answer longer than `MAX_ANSWER` is refused while it comes in, not after;
- cancelling or running out of time closes the connection: engines learn to abort from that;
- no redirect is followed and no proxy taken from the environment: the key goes to this server alone.
"""

import asyncio
import base64
from email.utils import parsedate_to_datetime
from io import BytesIO
from time import time
from typing import Final, NamedTuple

import aiohttp
from multidict import CIMultiDictProxy
from yarl import URL

from rookery import __version__
from rookery.core import UpstreamError, cause_of
from rookery.upstreams.retry import Kind
from rookery.upstreams.urls import Address, redact
from rookery.upstreams.wire import Complaint, complaint

MAX_ANSWER: Final = 256 << 20
MAX_COMPLAINT: Final = 64 << 10
CONNECT_SECONDS: Final = 10.0
_STREAMED: Final = 1 << 20  # above it aiohttp wants a stream rather than one write of everything
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)


class Answer(NamedTuple):
    """A complete HTTP answer."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes


class Failure(Exception):  # noqa: N818  (never leaves the room: `error` does)
    """An exchange that gave no answer: the error to raise, and what kind it is to the retry controller."""

    def __init__(self, kind: Kind, error: UpstreamError, retry_after: float | None = None) -> None:
        super().__init__(str(error))
        self.kind: Kind = kind
        self.error = error
        self.retry_after = retry_after


class Replica:
    """One server of an upstream. Everything it says about itself is free of secrets."""

    def __init__(self, address: Address, *, concurrency: int, key: str | None) -> None:
        self.name = address.shown
        self.chat = address.endpoint("chat/completions")
        self.completions = address.endpoint("completions")
        self.models = address.endpoint("models")
        self.places = asyncio.Semaphore(concurrency)
        self.load = 0
        """Calls that wait for a place or hold one."""
        self._headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # on a local network, inflating costs more than sending
            "Content-Type": "application/json",
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
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

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

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise Failure("final", self.error("upstream.unreachable", "this upstream is closed"))
        if self._session is None:
            # Places are the limit; a second one in the connector would only queue where nobody looks.
            # The threaded resolver resolves names as every other program on the machine does.
            connector = aiohttp.TCPConnector(
                limit=0, resolver=aiohttp.ThreadedResolver(), keepalive_timeout=30.0, ttl_dns_cache=10
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=_TIMEOUT,
                auto_decompress=False,
                trust_env=False,
                read_bufsize=_STREAMED,
            )
        return self._session

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def exchange(self, url: URL, body: bytes | None, *, seconds: float) -> Answer:
        """POST `body`, or GET where there is none; the complete answer, whatever its status."""
        response: aiohttp.ClientResponse | None = None
        session = self._open()
        try:
            async with asyncio.timeout(seconds):
                if body is None:
                    response = await session.get(url, allow_redirects=False)
                else:
                    data = body if len(body) < _STREAMED else BytesIO(body)
                    response = await session.post(url, data=data, allow_redirects=False)
                return Answer(response.status, response.headers, await self._read(response))
        except aiohttp.ClientSSLError as error:
            what = f"no secure connection ({_reason(error)})"
            raise Failure("final", self.error("upstream.unreachable", what)) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Failure("connect", self.error("upstream.unreachable", _unreached(error))) from error
        except TimeoutError as error:
            what = f"no complete answer within {seconds:.3g} s"
            raise Failure("final", self.error("upstream.timeout", what)) from error
        except aiohttp.ClientResponseError as error:
            what = f"the answer is not HTTP ({error.message})"
            raise Failure("final", self.error("upstream.protocol", what)) from error
        except (aiohttp.ClientError, OSError) as error:
            if response is not None:
                what = "the connection ended in the middle of the answer"
                raise Failure("final", self.error("upstream.protocol", what)) from error
            what = f"the connection was closed before an answer came ({_reason(error)})"
            raise Failure("dropped", self.error("upstream.unreachable", what)) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        good = 200 <= response.status < 300
        limit = MAX_ANSWER if good else MAX_COMPLAINT
        if good and (packed := response.headers.get("Content-Encoding", "identity")) != "identity":
            response.close()
            what = f"the answer is packed as {packed[:40]!r}, which was not asked for"
            raise Failure("final", self.error("upstream.protocol", what))
        length = response.content_length
        if length is not None and length <= limit:
            return await response.read()
        chunks: list[bytes] = []
        size = 0
        try:
            while chunk := await response.content.readany():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    break
        finally:
            if not response.content.is_eof():
                response.close()
        if good and size > limit:
            what = f"the answer is longer than {limit >> 20} MB"
            raise Failure("final", self.error("upstream.protocol", what))
        return b"".join(chunks)[:limit]

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
            kind, cause = ("gateway" if status == 502 else "final"), "upstream.error"
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


def _unreached(error: aiohttp.ClientError | TimeoutError) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the host's name cannot be resolved ({_reason(error)})"
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return "the connection was refused"
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_SECONDS:g} s"
    return f"no connection ({_reason(error)})"


def _reason(error: BaseException) -> str:
    inner = getattr(error, "os_error", None) or error
    return str(getattr(inner, "strerror", None) or inner).strip()[:200] or type(error).__name__
