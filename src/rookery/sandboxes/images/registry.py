"""A registry, over HTTP: what the distribution protocol's version 2 calls pulling.

Promises:
- what comes is digested while it comes: nothing is kept under a digest that it does not have;
- a connection that is cut goes on where it was; a registry that says it is busy is asked again, later and later;
- keys go to the registry and to the place that it names for tokens, over TLS (this machine itself excepted); where
  a redirect leads to another host, none goes along;
- no key, token or signed address is ever in a message;
- sizes, redirects, attempts and waits are bounded.
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
from rookery.sandboxes.images.references import HUB, Reference, shown
from rookery.sandboxes.images.sources import INDEXES, MANIFESTS, Blob, Found, OnBytes, Span, unavailable

T = TypeVar("T")
ATTEMPTS = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0
CONNECT_SECONDS, READ_SECONDS = 15.0, 60.0
MAX_REDIRECTS = 5
MAX_TOKEN = 1 << 20
CHUNK = 1 << 18
_HUB_HOST = f"registry-1.{HUB}"
_PAIR = re.compile(r'([a-zA-Z]+)="([^"]*)"')
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_MOVED = (301, 302, 303, 307, 308)
_TROUBLE = (OSError, http.client.HTTPException)


class _Again(Exception):  # noqa: N818  (no error: a reason to ask once more)
    """Something that may be over the next time."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


class RegistrySource:
    def __init__(self, reference: Reference, platform: str, *, pause: float = FIRST_PAUSE) -> None:
        self._reference = reference
        self._platform = platform
        self._pause = pause
        self._host = _HUB_HOST if reference.registry == HUB else reference.registry
        self._secure = not _is_this_machine(self._host)
        self._name = shown(reference.name)
        self._token = ""
        self._login: credentials.Login | None = None
        self._looked = False
        self._basic = False

    def close(self) -> None:
        self._token = ""
        self._login = None

    # ---- the source

    def find(self) -> Found:
        name = self._name
        digest, manifest = self._manifest(self._reference.digest or self._reference.tag)
        first = digest
        if "manifests" in manifest:
            one = sources.chosen(name, manifest["manifests"] or [], self._platform)
            digest, manifest = self._manifest(one["digest"])
        wanted = (manifest.get("config") or {}).get("digest")
        if not records.is_digest(wanted):
            raise records.broken(name, "its manifest does not name its configuration")
        config = self._small(f"blobs/{wanted}", sources.MAX_CONFIG, ())
        if records.digest_of(config) != wanted:
            raise records.broken(name, "its configuration has another content than was signed for")
        blobs = sources.blobs_of(name, manifest, records.config_of(name, config)[1])
        return Found(config=config, layers=blobs, origin="registry", digest=first)

    def _manifest(self, what: str) -> tuple[str, dict[str, Any]]:
        data = self._small(f"manifests/{what}", sources.MAX_MANIFEST, (*INDEXES, *MANIFESTS))
        digest = records.digest_of(data)
        if what.startswith("sha256:") and what != digest:
            raise records.broken(self._name, "its manifest has another content than was signed for")
        return digest, sources.manifest_of(self._name, data)

    def _small(self, path: str, limit: int, accept: tuple[str, ...]) -> bytes:
        def once() -> bytes:
            with self._get(path, {"Accept": ", ".join(accept)} if accept else {}) as reply:
                data = reply.read(limit + 1)
            if len(data) > limit:
                raise records.broken(self._name, "what describes it is too long")
            length = reply.headers.get("Content-Length")
            if length is not None and length.isdecimal() and int(length) != len(data):
                raise _Again("the connection was cut")
            return data

        return self._tried(once)

    def fetch(self, blob: Blob, target: Path, on_bytes: OnBytes) -> Span:
        """Goes on where a cut connection left it."""
        with target.open("wb") as file:
            part = _Part(file, blob, self._name, on_bytes)

            def once() -> None:
                ask = {"Range": f"bytes={part.at}-"} if part.at else {}
                with self._get(f"blobs/{blob.digest}", ask) as reply:
                    if part.at and reply.status != 206:
                        part.restart()  # it cannot go on
                    while chunk := reply.read(CHUNK):
                        part.add(chunk)
                part.finish()

            self._tried(once, lambda: part.at)
        return Span(str(target), 0, blob.size)

    # ---- asking

    def _tried(self, once: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Again, later and later; what made progress starts to count anew, a bounded number of times."""
        tries, pause, most, seen = 0, self._pause, 20 * ATTEMPTS, progress()
        while True:
            try:
                return once()
            except _Again as error:
                why, after = str(error), error.after
            except _TROUBLE as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                    raise unavailable(f"the image {self._name} cannot be kept", _said(error)) from error
                why, after = _said(error), 0.0
            most -= 1
            if progress() > seen:
                tries, pause, seen = 0, self._pause, progress()
            tries += 1
            if tries >= ATTEMPTS or most <= 0:
                raise unavailable(f"the image {self._name} could not be fetched from {self._host}", why)
            time.sleep(min(LONGEST_PAUSE, max(after, pause * random.uniform(0.7, 1.3))))  # noqa: S311
            pause *= 2

    @contextmanager
    def _get(self, path: str, headers: Mapping[str, str]) -> "Iterator[http.client.HTTPResponse]":
        """The answer to a request that was let in. Its connection goes with the block."""
        scheme = "https" if self._secure else "http"
        url = f"{scheme}://{self._host}/v2/{self._reference.repository}/{path}"
        for first in (True, False):
            connection, reply = _ask(url, {**headers, **self._key()})
            try:
                if reply.status in _MOVED:
                    connection, reply = self._follow(connection, reply, url, headers)
                if reply.status == 401 and first:
                    self._login_by(reply.headers.get("WWW-Authenticate") or "")
                    continue
                self._checked(reply)
                yield reply
                return
            finally:
                connection.close()

    def _follow(
        self, connection: http.client.HTTPConnection, reply: http.client.HTTPResponse, url: str, headers: Any
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        for _ in range(MAX_REDIRECTS):
            where = reply.headers.get("Location") or ""
            connection.close()
            there = urllib.parse.urljoin(url, where)
            parts = urllib.parse.urlsplit(there)
            if parts.scheme not in ("https", "http") or not parts.hostname:
                raise unavailable(f"the image {self._name} could not be fetched", "a redirect leads nowhere")
            if parts.scheme == "http" and not _is_this_machine(parts.netloc):
                raise unavailable(
                    f"the image {self._name} could not be fetched",
                    f"a redirect leads to {parts.hostname} without TLS",
                )
            # Not the host before this one: a second redirect may stay where the first one led.
            same = (parts.scheme, parts.netloc) == ("https" if self._secure else "http", self._host)
            connection, reply = _ask(there, {**headers, **(self._key() if same else {})})
            url = there
            if reply.status not in _MOVED:
                return connection, reply
        connection.close()
        raise unavailable(f"the image {self._name} could not be fetched", "redirects do not end")

    def _checked(self, reply: http.client.HTTPResponse) -> None:
        status, registry = reply.status, self._reference.registry
        if status in (200, 206):
            return
        if status in _BUSY:
            raise _Again(f"it answers {status} ({_words(status)})", _after(reply.headers.get("Retry-After")))
        if status in (401, 403):
            raise records.broken(
                self._name,
                f"the registry refuses it ({status}): it does not exist, or needs a key; "
                f"`docker login {registry}` stores one",
            )
        if status == 404:
            raise records.broken(
                self._name,
                f"there is none of this name in the registry {registry}; check the name, or make it with "
                f"`rookery images import SOURCE {self._name}`",
            )
        raise records.broken(self._name, f"the registry {registry} answers {status} ({_words(status)})")

    # ---- keys

    def _key(self) -> dict[str, str]:
        if self._basic and self._login is not None:
            return {"Authorization": self._login.basic()}
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _login_by(self, challenge: str) -> None:
        if not self._looked:
            self._login = credentials.login_for(self._reference.registry)
            self._looked = True
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic":
            self._basic = self._login is not None
            return
        said = {key.lower(): value for key, value in _PAIR.findall(rest)}
        realm = said.get("realm", "")
        parts = urllib.parse.urlsplit(realm)
        safe = parts.scheme == "https" or (parts.scheme == "http" and _is_this_machine(parts.netloc))
        if kind.lower() != "bearer" or not parts.hostname or not safe:
            raise unavailable(
                f"the image {self._name} could not be fetched", f"{self._host} asks for a key in an unknown way"
            )
        self._token = self._token_from(realm, said)

    def _token_from(self, realm: str, said: Mapping[str, str]) -> str:
        scope = said.get("scope") or f"repository:{self._reference.repository}:pull"
        asked = {"service": said.get("service", ""), "scope": scope}
        login = self._login
        if login is not None and login.identity:
            body = {
                **asked,
                "grant_type": "refresh_token",
                "client_id": "rookery",
                "refresh_token": login.identity,
            }
            form = {"Content-Type": "application/x-www-form-urlencoded"}
            connection, reply = _ask(realm, form, urllib.parse.urlencode(body).encode())
        else:
            join = "&" if urllib.parse.urlsplit(realm).query else "?"
            headers = {"Authorization": login.basic()} if login is not None else {}
            connection, reply = _ask(f"{realm}{join}{urllib.parse.urlencode(asked)}", headers)
        host = urllib.parse.urlsplit(realm).hostname
        try:
            if reply.status in _BUSY:
                raise _Again(f"{host} answers {reply.status}", _after(reply.headers.get("Retry-After")))
            if reply.status in (400, 401, 403):
                raise records.broken(
                    self._name,
                    f"{host} refuses the stored key ({reply.status}): "
                    f"`docker login {self._reference.registry}` stores a new one"
                    if login is not None
                    else f"{host} wants a key: `docker login {self._reference.registry}` stores one",
                )
            if reply.status != 200:
                raise unavailable(
                    f"no key for the image {self._name} could be had", f"{host} answers {reply.status}"
                )
            found = msgspec.json.decode(reply.read(MAX_TOKEN))
            token = found.get("token") or found.get("access_token") if isinstance(found, dict) else None
        except msgspec.MsgspecError:
            token = None
        finally:
            connection.close()
        if not isinstance(token, str) or not token or not token.isprintable():
            raise unavailable(f"no key for the image {self._name} could be had", f"{host} gives none")
        return token


class _Part:
    """A layer, as far as it has come."""

    def __init__(self, file: "BinaryIO", blob: Blob, name: str, on_bytes: OnBytes) -> None:
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
            raise records.broken(self._name, f"its layer {self._blob.digest[:19]}… is longer than it says")
        self._file.write(chunk)
        self._digest.update(chunk)
        self.at += len(chunk)
        self._on_bytes(len(chunk))

    def finish(self) -> None:
        if self.at < self._blob.size:
            raise _Again("the connection was cut")
        if f"sha256:{self._digest.hexdigest()}" != self._blob.digest:
            self.restart()
            raise _Again(f"its layer {self._blob.digest[:19]}… has another content than was signed for")


def _ask(
    url: str, headers: Mapping[str, str], body: bytes | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """One request, on a connection of its own. No proxy is asked, and none of the environment's is used."""
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
        raise unavailable(f"{parts.hostname} cannot be trusted", error.verify_message) from error
    except BaseException:
        connection.close()
        raise


def _is_this_machine(netloc: str) -> bool:
    """Where TLS is not needed, as Docker has it."""
    host = urllib.parse.urlsplit(f"//{netloc}").hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _said(error: BaseException) -> str:
    """In words, without what may be in an address."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "the connection was cut" if isinstance(error, http.client.IncompleteRead) else type(error).__name__


def _words(status: int) -> str:
    return http.client.responses.get(status, "unknown")


def _after(text: str | None) -> float:
    return float(text) if text is not None and text.isdecimal() and len(text) < 6 else 0.0
