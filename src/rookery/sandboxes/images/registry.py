"""Client for container registries (OCI distribution specification, pull only). Blocking.

Guarantees:
- data is hashed while it arrives, and data with another digest than requested is refused;
- an interrupted download continues where it stopped; a request to an overloaded registry is retried with back-off;
- credentials are sent to the registry and its token service only, over TLS (except to this machine), and not to
  other hosts after a redirect;
- no credential, token or signed URL appears in a message;
- sizes, redirects, retries and waits are limited.
"""

import errno
import hashlib
import http.client
import ipaddress
import random
import re
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from rookery.sandboxes.images import credentials, records, sources
from rookery.sandboxes.images.references import HUB, ImageReference, familiar_name
from rookery.sandboxes.images.sources import (
    INDEXES,
    MANIFESTS,
    FileRange,
    LayerBlob,
    OnBytes,
    ResolvedImage,
    image_unavailable,
)

T = TypeVar("T")
ATTEMPTS = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0
CONNECT_SECONDS, READ_SECONDS = 15.0, 60.0
MAX_REDIRECTS = 5
MAX_TOKEN = 1 << 20
CHUNK = 1 << 18
_HUB_HOST = f"registry-1.{HUB}"
_PAIR = re.compile(r'([a-zA-Z]+)="([^"]*)"')
_RETRYABLE_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_CONNECTION_ERRORS = (OSError, http.client.HTTPException)


class _RetryableError(Exception):
    """A temporary failure of a request, which may be repeated, not earlier than `after` seconds later."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class RegistrySource:
    def __init__(self, reference: ImageReference, platform: str) -> None:
        self._reference = reference
        self._platform = platform
        self._host = _HUB_HOST if reference.registry == HUB else reference.registry
        self._secure = not _is_this_machine(self._host)
        self._name = familiar_name(reference.name)
        self._token = ""
        self._login: credentials.RegistryLogin | None = None
        self._login_searched = False
        self._basic = False

    def close(self) -> None:
        self._token = ""
        self._login = None

    # ---- the source

    def resolve(self) -> ResolvedImage:
        name = self._name
        digest, manifest = self._manifest(self._reference.digest or self._reference.tag)
        first = digest
        if "manifests" in manifest:
            one = sources.choose_manifest(name, manifest["manifests"] or [], self._platform)
            digest, manifest = self._manifest(one["digest"])
        wanted = (manifest.get("config") or {}).get("digest")
        if not records.is_digest(wanted):
            raise records.unusable_image(name, "its manifest has no configuration")
        config = self._get_small(f"blobs/{wanted}", sources.MAX_CONFIG, ())
        if records.sha256_digest(config) != wanted:
            raise records.unusable_image(name, "the digest of its configuration does not match its manifest")
        blobs = sources.parse_layers(name, manifest, records.parse_config(name, config)[1])
        return ResolvedImage(config=config, layers=blobs, origin="registry", digest=first)

    def _manifest(self, what: str) -> tuple[str, dict[str, Any]]:
        data = self._get_small(f"manifests/{what}", sources.MAX_MANIFEST, (*INDEXES, *MANIFESTS))
        digest = records.sha256_digest(data)
        if what.startswith("sha256:") and what != digest:
            raise records.unusable_image(self._name, "the digest of its manifest does not match")
        return digest, sources.parse_manifest(self._name, data)

    def _get_small(self, path: str, limit: int, accept: tuple[str, ...]) -> bytes:
        def once() -> bytes:
            with self._get(path, {"Accept": ", ".join(accept)} if accept else {}) as reply:
                data = reply.read(limit + 1)
            if len(data) > limit:
                raise records.unusable_image(
                    self._name, f"its manifest or configuration is larger than the limit of {limit} bytes"
                )
            length = reply.headers.get("Content-Length")
            if length is not None and length.isdecimal() and int(length) != len(data):
                raise _RetryableError("the connection was cut")
            return data

        return self._retry(once)

    def fetch(self, blob: LayerBlob, target: Path, on_bytes: OnBytes) -> FileRange:
        """Download a layer to `target`. An interrupted download continues where it stopped."""
        with target.open("wb") as file:
            part = _PartialDownload(file, blob, self._name, on_bytes)

            def once() -> None:
                ask = {"Range": f"bytes={part.at}-"} if part.at else {}
                with self._get(f"blobs/{blob.digest}", ask) as reply:
                    if part.at and reply.status != 206:
                        part.restart()  # the server does not support ranges
                    while chunk := reply.read(CHUNK):
                        part.add(chunk)
                part.finish()

            self._retry(once, lambda: part.at)
        return FileRange(str(target), 0, blob.size)

    # ---- requests

    def _retry(self, once: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Call `once` until it succeeds, with back-off, at most `ATTEMPTS` times in a row without progress.

        `progress` returns the number of bytes downloaded so far. The total number of calls is limited, too.
        """
        tries, pause, most, seen = 0, FIRST_PAUSE, 20 * ATTEMPTS, progress()
        while True:
            try:
                return once()
            except _RetryableError as error:
                reason, after = str(error), error.after
            except _CONNECTION_ERRORS as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                    raise image_unavailable(
                        f"the image {self._name} cannot be stored", _describe(error)
                    ) from error
                reason, after = _describe(error), 0.0
            most -= 1
            if progress() > seen:
                tries, pause, seen = 0, FIRST_PAUSE, progress()
            tries += 1
            if tries >= ATTEMPTS or most <= 0:
                raise image_unavailable(f"the image {self._name} could not be fetched from {self._host}", reason)
            time.sleep(min(LONGEST_PAUSE, max(after, pause * random.uniform(0.7, 1.3))))  # noqa: S311
            pause *= 2

    @contextmanager
    def _get(self, path: str, headers: Mapping[str, str]) -> "Iterator[http.client.HTTPResponse]":
        """Yield the response to an authorised GET request. The connection is closed at the end of the block."""
        scheme = "https" if self._secure else "http"
        url = f"{scheme}://{self._host}/v2/{self._reference.repository}/{path}"
        for first in (True, False):
            connection, reply = _send_request(url, {**headers, **self._auth_headers()})
            try:
                if reply.status in _REDIRECT_STATUSES:
                    connection, reply = self._follow_redirects(connection, reply, url, headers)
                if reply.status == 401 and first:
                    self._authenticate(reply.headers.get("WWW-Authenticate") or "")
                    continue
                self._check_status(reply)
                yield reply
                return
            finally:
                connection.close()

    def _follow_redirects(
        self, connection: http.client.HTTPConnection, reply: http.client.HTTPResponse, url: str, headers: Any
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        for _ in range(MAX_REDIRECTS):
            where = reply.headers.get("Location") or ""
            connection.close()
            there = urllib.parse.urljoin(url, where)
            parts = urllib.parse.urlsplit(there)
            if parts.scheme not in ("https", "http") or not parts.hostname:
                raise image_unavailable(
                    f"the image {self._name} could not be fetched", "a redirect has no valid target"
                )
            if parts.scheme == "http" and not _is_this_machine(parts.netloc):
                raise image_unavailable(
                    f"the image {self._name} could not be fetched",
                    f"a redirect leads to {parts.hostname} without TLS",
                )
            # Compared with the registry, not with the previous host: a second redirect may stay on the other
            # host.
            same = (parts.scheme, parts.netloc) == ("https" if self._secure else "http", self._host)
            connection, reply = _send_request(there, {**headers, **(self._auth_headers() if same else {})})
            url = there
            if reply.status not in _REDIRECT_STATUSES:
                return connection, reply
        connection.close()
        raise image_unavailable(f"the image {self._name} could not be fetched", "too many redirects")

    def _check_status(self, reply: http.client.HTTPResponse) -> None:
        status, registry = reply.status, self._reference.registry
        if status in (200, 206):
            return
        if status in _RETRYABLE_STATUSES:
            raise _RetryableError(
                f"the registry answers {status} ({_reason_phrase(status)})",
                _parse_retry_after(reply.headers.get("Retry-After")),
            )
        if status in (401, 403):
            raise records.unusable_image(
                self._name,
                f"the registry refuses access ({status}): the image does not exist or needs credentials; "
                f"log in with `docker login {registry}`",
            )
        if status == 404:
            raise records.unusable_image(
                self._name,
                f"the registry {registry} does not have it; check the name, or import it with "
                f"`rookery images import SOURCE {self._name}`",
            )
        raise records.unusable_image(
            self._name, f"the registry {registry} answers {status} ({_reason_phrase(status)})"
        )

    # ---- authentication

    def _auth_headers(self) -> dict[str, str]:
        if self._basic and self._login is not None:
            return {"Authorization": self._login.basic()}
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _authenticate(self, challenge: str) -> None:
        if not self._login_searched:
            self._login = credentials.find_login(self._reference.registry)
            self._login_searched = True
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic":
            self._basic = self._login is not None
            return
        parameters = {key.lower(): value for key, value in _PAIR.findall(rest)}
        realm = parameters.get("realm", "")
        parts = urllib.parse.urlsplit(realm)
        safe = parts.scheme == "https" or (parts.scheme == "http" and _is_this_machine(parts.netloc))
        if kind.lower() != "bearer" or not parts.hostname or not safe:
            raise image_unavailable(
                f"the image {self._name} could not be fetched",
                f"{self._host} requires an unsupported kind of authentication",
            )
        self._token = self._request_token(realm, parameters)

    def _request_token(self, realm: str, parameters: Mapping[str, str]) -> str:
        scope = parameters.get("scope") or f"repository:{self._reference.repository}:pull"
        query = {"service": parameters.get("service", ""), "scope": scope}
        login = self._login
        if login is not None and login.identity_token:
            body = {
                **query,
                "grant_type": "refresh_token",
                "client_id": "rookery",
                "refresh_token": login.identity_token,
            }
            form = {"Content-Type": "application/x-www-form-urlencoded"}
            connection, reply = _send_request(realm, form, urllib.parse.urlencode(body).encode())
        else:
            join = "&" if urllib.parse.urlsplit(realm).query else "?"
            headers = {"Authorization": login.basic()} if login is not None else {}
            connection, reply = _send_request(f"{realm}{join}{urllib.parse.urlencode(query)}", headers)
        host = urllib.parse.urlsplit(realm).hostname
        try:
            if reply.status in _RETRYABLE_STATUSES:
                raise _RetryableError(
                    f"{host} answers {reply.status}", _parse_retry_after(reply.headers.get("Retry-After"))
                )
            if reply.status in (400, 401, 403):
                raise records.unusable_image(
                    self._name,
                    f"{host} refuses the stored credentials ({reply.status}): "
                    f"`docker login {self._reference.registry}` stores new ones"
                    if login is not None
                    else f"{host} requires credentials: log in with `docker login {self._reference.registry}`",
                )
            if reply.status != 200:
                raise image_unavailable(
                    f"no access token for the image {self._name} could be obtained",
                    f"{host} answers {reply.status}",
                )
            found = msgspec.json.decode(reply.read(MAX_TOKEN))
            token = found.get("token") or found.get("access_token") if isinstance(found, dict) else None
        except (msgspec.MsgspecError, RecursionError):
            token = None
        finally:
            connection.close()
        if not isinstance(token, str) or not token or not token.isprintable():
            raise image_unavailable(
                f"no access token for the image {self._name} could be obtained", f"{host} returned no token"
            )
        return token


class _PartialDownload:
    """A layer while it is downloaded: the file, the digest of its content so far, and the checks at the end."""

    def __init__(self, file: "BinaryIO", blob: LayerBlob, name: str, on_bytes: OnBytes) -> None:
        self._file, self._blob, self._name, self._on_bytes = file, blob, name, on_bytes
        self._digest = hashlib.sha256()
        self.at = 0

    def restart(self) -> None:
        self._on_bytes(-self.at)
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.at = 0

    def add(self, chunk: bytes) -> None:
        if self.at + len(chunk) > self._blob.size:
            raise records.unusable_image(
                self._name, f"its layer {self._blob.digest[:19]}… is longer than its manifest says"
            )
        self._file.write(chunk)
        self._digest.update(chunk)
        self.at += len(chunk)
        self._on_bytes(len(chunk))

    def finish(self) -> None:
        if self.at < self._blob.size:
            raise _RetryableError("the connection was cut")
        if f"sha256:{self._digest.hexdigest()}" != self._blob.digest:
            self.restart()
            raise _RetryableError(f"the layer {self._blob.digest[:19]}… has another digest than the manifest says")


def _send_request(
    url: str, headers: Mapping[str, str], body: bytes | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Send one request on a new connection. Proxy settings of the environment are ignored."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=CONNECT_SECONDS, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
        connection.sock.settimeout(READ_SECONDS)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request(
            "POST" if body is not None else "GET", target, body, {"User-Agent": "rookery", **headers}
        )
        return connection, connection.getresponse()
    except ssl.SSLCertVerificationError as error:
        connection.close()
        raise image_unavailable(
            f"{parts.hostname} has no trusted TLS certificate", error.verify_message
        ) from error
    except BaseException:
        connection.close()
        raise


def _is_this_machine(netloc: str) -> bool:
    """Return whether a host (`host` or `host:port`) is this machine, which does not need TLS, as for Docker."""
    host = urllib.parse.urlsplit(f"//{netloc}").hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _describe(error: BaseException) -> str:
    """Describe a connection error, without text that may contain parts of a URL, which can be secret."""
    if isinstance(error, TimeoutError):
        return "the server did not answer in time"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "the connection was cut" if isinstance(error, http.client.IncompleteRead) else type(error).__name__


def _reason_phrase(status: int) -> str:
    return http.client.responses.get(status, "unknown")


def _parse_retry_after(text: str | None) -> float:
    return float(text) if text is not None and text.isdecimal() and len(text) < 6 else 0.0
