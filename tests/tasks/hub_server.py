"""A Hugging Face hub on loopback with one dataset repository, for the client of the package huggingface_hub.

As on the real hub, archives and Parquet files are in the storage of large files: a request for one is redirected
to another address, without the token.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40
LARGE = (".parquet", ".gz")


class Hub:
    def __init__(self, files, repo="team/tasks", commit=COMMIT, token=""):
        self.files, self.repo, self.commit, self.token = files, repo, commit, token
        self.requests = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                hub.answer(self, body=False)

            def do_GET(self):
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def storage_url(self):
        """Address of large files: another host name of this server."""
        return f"http://localhost:{self.server.server_port}/storage"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, request, body):
        path = request.path.partition("?")[0]
        self.requests.append((request.command, path))
        headers = {"X-Repo-Commit": self.commit}
        status, data = 404, b"{}"
        stored = path.startswith("/storage/")
        if stored and "authorization" in request.headers:
            status = 400  # storage services refuse requests with a token of the hub
        elif self.token and not stored and request.headers.get("authorization") != f"Bearer {self.token}":
            status, data = 401, b'{"error": "no"}'
            headers["X-Error-Code"] = "GatedRepo"
        elif re.fullmatch(rf"/api/datasets/{self.repo}(/revision/(main|{self.commit}))?", path):
            siblings = [{"rfilename": name, "size": len(text)} for name, text in self.files.items()]
            status, data = 200, json.dumps({"id": self.repo, "sha": self.commit, "siblings": siblings}).encode()
        elif path.startswith(f"/api/datasets/{self.repo}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                for name, text in self.files.items()
            ]
            status, data = 200, json.dumps(tree).encode()
        elif (match := re.fullmatch(rf"/datasets/{self.repo}/resolve/(main|{self.commit})/(.+)", path)) and (
            match[2] in self.files
        ):
            status, data = 200, self.files[match[2]]
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            if match[2].endswith(LARGE):
                headers |= {
                    "X-Linked-Size": str(len(data)),
                    "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                }
                headers["Location"] = f"{self.storage_url}/{match[2]}"
                status, data = 302, b""
        elif path.startswith("/storage/") and request.headers["host"] in self.storage_url:
            status, data = 200, self.files[path.removeprefix("/storage/")]
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if body:
            request.wfile.write(data)

    def downloads(self, name):
        return sum(
            method == "GET"
            and path.endswith(f"/{name}")
            and ("/storage/" in path if name.endswith(LARGE) else "/resolve/" in path)
            for method, path in self.requests
        )
