"""A registry on the loopback interface, over real HTTP, with faults that a test can inject."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from rookery.sandboxes.images import sources
from tests.sandboxes.images_store.image_builder import BuiltImage, sha256_digest

TOKEN = "t0ken-that-nobody-may-read"
USER, PASSWORD = "robot", "pa55word-that-nobody-may-read"


class FakeRegistry:
    """Serves images by `repository:tag` and records every request: method, path, headers."""

    def __init__(self, *, auth: str = "", cdn: "FakeRegistry | None" = None) -> None:
        self.auth = auth
        """Authentication that clients need: none (empty), `anonymous`, `password`, `identity` or `basic`."""
        self.cdn = cdn
        """Another registry that serves the blobs, behind a redirect."""
        self.extra_redirect = False
        """True if blobs are behind one more redirect to the same host."""
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.busy_responses = 0
        """Number of 429 responses before the next good one."""
        self.truncate_after: dict[str, list[int]] = {}
        """By blob: lengths at which the next responses are cut off."""
        self.corrupt_responses: dict[str, int] = {}
        """By blob: number of responses with wrong last bytes."""
        self.supports_ranges = True
        registry = self

        class Handler(_Handler):
            owner = registry

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def push(self, name: str, image: BuiltImage, platforms: tuple[str, ...] = ()) -> str:
        """Add an image and return its reference. With `platforms`, add an index whose last entry is the image."""
        repository, _, tag = name.partition(":")
        self.blobs |= image.blobs()
        self.manifests[repository, sha256_digest(image.manifest)] = (sources.MANIFESTS[0], image.manifest)
        self.manifests[repository, tag] = (sources.MANIFESTS[0], image.manifest)
        if platforms:
            entries = [
                {
                    "mediaType": sources.MANIFESTS[0],
                    "digest": sha256_digest(image.manifest)
                    if one == platforms[-1]
                    else sha256_digest(one.encode()),
                    "size": 1,
                    "platform": dict(zip(("os", "architecture", "variant"), one.split("/"), strict=False)),
                }
                for one in platforms
            ]
            index = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
            self.manifests[repository, tag] = (sources.INDEXES[0], index)
        return f"{self.host}/{name}"

    def list_blob_requests(self) -> list[str]:
        return [path for _, path, _ in self.requests if "/blobs/" in path]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)


class _Handler(BaseHTTPRequestHandler):
    owner: FakeRegistry
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.owner.requests.append(("POST", self.path, dict(self.headers)))
        good = body.get("refresh_token") == [PASSWORD] and body.get("grant_type") == ["refresh_token"]
        self._send(200 if good else 401, json.dumps({"access_token": TOKEN}).encode())

    def do_HEAD(self) -> None:
        """Engines send HEAD requests before they fetch."""
        self.do_GET()

    def do_GET(self) -> None:
        owner = self.owner
        owner.requests.append((self.command, self.path, dict(self.headers)))
        path = urlsplit(self.path).path
        if path == "/token":
            wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            good = owner.auth == "anonymous" or self.headers.get("Authorization") == wanted
            self._send(200 if good else 401, json.dumps({"token": TOKEN}).encode())
            return
        if owner.busy_responses:
            owner.busy_responses -= 1
            self._send(429, b"slow down", {"Retry-After": "0"})
            return
        if not self._authorize():
            return
        if path == "/v2/":
            self._send(200, b"{}")
            return
        parts = path.split("/")
        kind, what = parts[-2:]
        repository = "/".join(parts[2:-2])
        if kind == "manifests":
            found = owner.manifests.get((repository, what))
            if found is None:
                self._send(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}')
            else:
                self._send(200, found[1], {"Content-Type": found[0]})
        elif what not in owner.blobs:
            self._send(404, b"{}")
        elif owner.extra_redirect and "again" not in self.path:
            self._send(302, b"", {"Location": f"{self.path}&again=1"})
        elif owner.cdn is not None:
            self._send(
                307, b"", {"Location": f"http://{owner.cdn.host}/v2/{repository}/blobs/{what}?signature=s3cret"}
            )
        else:
            self._blob(what)

    def _authorize(self) -> bool:
        owner, credentials = self.owner, self.headers.get("Authorization") or ""
        if owner.auth == "basic":
            good = credentials == "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            challenge = 'Basic realm="here"'
        else:
            good = not owner.auth or credentials == f"Bearer {TOKEN}"
            challenge = f'Bearer realm="http://{owner.host}/token",service="here",scope="repository:x:pull"'
        if not good:
            self._send(401, b"{}", {"WWW-Authenticate": challenge})
        return good

    def _blob(self, digest: str) -> None:
        owner, status, start = self.owner, 200, 0
        data = owner.blobs[digest]
        if (requested := self.headers.get("Range")) and owner.supports_ranges:
            status, start = 206, int(requested.removeprefix("bytes=").rstrip("-"))
        if owner.corrupt_responses.get(digest):
            owner.corrupt_responses[digest] -= 1
            data = data[:-2] + b"xx"
        data = data[start:]
        cuts = owner.truncate_after.get(digest)
        end = cuts.pop(0) if cuts else None
        self._send(status, data, truncate=end)

    def _send(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, truncate: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        if "/manifests/" in self.path and status == 200:
            self.send_header("Docker-Content-Digest", sha256_digest(data))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data if truncate is None else data[:truncate])
        if truncate is not None:
            self.close_connection = True
