"""HTTP service of `rookery serve-code`: `POST /run_code` runs programs, for trainers in any language.

Guarantees:
- Results come in the order of the programs: as lines of NDJSON, each as soon as it and all before it are
  available, or in one JSON object if the client accepts `application/json`.
- Malformed JSON is answered with 400. An invalid field is answered with 422 and the name of the field. No program
  of such a request runs.
- A body that is too large is answered with 413, too many programs or too high limits with 422, and a request that
  does not fit into the queue with 429 and `Retry-After`.
- When a client disconnects, the programs of its request are cancelled, and no others.
- If the service has an API key, every path but `/healthz` requires it, before the body is read. Without a key,
  requests with a foreign `Host` or `Origin` header are refused, because a web page may have sent them.

`/healthz` returns 503 if a request is long overdue or the server is shutting down.
"""

import asyncio
import hmac
import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

import msgspec

from rookery.core import UsageError
from rookery.gateway.http_messages import HttpError, Request, ResponseWriter
from rookery.scoring.fresh_sandboxes import LOST_AFTER_SECONDS, MAX_TRIES
from rookery.scoring.program_runner import ProgramRunner
from rookery.scoring.programs import (
    DEFAULT_PROGRAM_LIMITS,
    Program,
    ProgramLimits,
    ProgramResult,
    parse_limits,
    parse_program,
)
from rookery.telemetry import REGISTRY, catalogue, render
from rookery.telemetry.exposition import CONTENT_TYPE
from rookery.upstreams.listeners import find_foreign_header

NDJSON: Final = b"application/x-ndjson"
MAX_BODY: Final = 64 << 20
MAX_PROGRAMS: Final = 10_000
CEILING: Final = ProgramLimits(wall=300.0, cpu=300.0, memory=4 << 30, output=16 << 20, pids=1024, disk=4 << 30)


class CodeService:
    """HTTP application that runs programs in the sandboxes of one `ProgramRunner`.

    `key` is the API key that clients must send; without one, only local clients are accepted. `queue` is the
    maximum number of unfinished programs of all requests. `ceiling` holds the highest limits that a request may
    ask for.
    """

    def __init__(
        self, programs: ProgramRunner, *, key: str = "", queue: int = 10_000, ceiling: ProgramLimits = CEILING
    ) -> None:
        self._programs = programs
        self._key = key
        self._queue = queue
        self._ceiling = ceiling.over(CEILING)
        self._admitted = 0
        self._deadlines: dict[int, float] = {}
        self.stopping = False

    # ---- interface for the HTTP server

    def admit(self, request: Request) -> int:
        """Check a request before its body is read; return the maximum size of the body in bytes.

        Raise `HttpError` if the request is refused.
        """
        path, method = request.path, request.method
        if path not in ("/", "/healthz", "/metrics", "/run_code"):
            raise self._refuse(404, f"no such path: {path[:200]}; send programs with POST to /run_code")
        wanted = ("POST",) if path == "/run_code" else ("GET", "HEAD")
        self._check_page(request)
        if path != "/healthz":
            self._check_key(request)
        if method not in wanted:
            raise self._refuse(405, f"{path} accepts only {wanted[0]}", ((b"allow", ", ".join(wanted).encode()),))
        if path == "/run_code" and self.stopping:
            raise self._refuse(503, "the server is shutting down: try again later", ((b"retry-after", b"5"),))
        return MAX_BODY if path == "/run_code" else 0

    async def handle(self, request: Request, out: ResponseWriter) -> None:
        """Answer an admitted request."""
        answers: dict[str, Callable[[Request, ResponseWriter], Any]] = {
            "/": self._about,
            "/healthz": self._health,
            "/metrics": self._metrics,
            "/run_code": self._run_code,
        }
        await answers[request.path](request, out)

    def encode_error(self, status: int, text: str) -> bytes:
        """Return the JSON body for an error that the HTTP server itself reports, such as a malformed request."""
        return _encode_error(text or str(status))

    @property
    def failure(self) -> bytes:
        """Return the JSON body of an unexpected internal error."""
        return _encode_error("internal server error")

    def _check_page(self, request: Request) -> None:
        """Refuse requests that a web page of another site may have sent, unless clients need an API key."""
        headers = request.headers
        if not self._key and (why := find_foreign_header(headers.get("host"), headers.get("origin"))):
            raise self._refuse(
                403, f"without a key this server accepts only local clients, and {why}: start it with a key"
            )

    def _check_key(self, request: Request) -> None:
        if not self._key:
            return
        scheme, _, word = request.headers.get("authorization", "").partition(" ")
        word = word.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(word.encode("utf-8", "replace"), self._key.encode()):
            raise self._refuse(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                ((b"www-authenticate", b"Bearer"),),
            )

    def _refuse(self, status: int, text: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> HttpError:
        catalogue.CODE_REQUESTS.add(str(status))
        return HttpError(status, _encode_error(text), headers)

    # ---- programs

    async def _run_code(self, request: Request, out: ResponseWriter) -> None:
        programs, limits = self._parse_body(request.body)
        request.body = b""
        if self._admitted + len(programs) > self._queue:
            wait = str(self._retry_after()).encode()
            message = f"{self._admitted} of at most {self._queue} programs are running or queued: try again later"
            raise self._refuse(429, message, ((b"retry-after", wait),))
        as_json = "application/json" in request.headers.get("accept", "")
        self._admitted += len(programs)
        left = len(programs)
        request_id = id(request)
        self._deadlines[request_id] = self._deadline(programs, limits)
        try:
            if not as_json:
                catalogue.CODE_REQUESTS.add("200")
                out.begin(200, NDJSON)
            lines: list[bytes] = []
            async with aclosing(self._programs.stream(programs, limits)) as results:
                async for result in results:
                    self._admitted -= 1
                    left -= 1
                    catalogue.CODE_PROGRAMS.add(result.status)
                    line = _encode_result(result)
                    if as_json:
                        lines.append(line)
                    else:
                        await out.write(line + b"\n")
            if as_json:
                catalogue.CODE_REQUESTS.add("200")
                out.send(200, b'{"results":[' + b",".join(lines) + b"]}")
            else:
                out.end()
        finally:
            self._admitted -= left
            catalogue.CODE_PROGRAMS.add("cancelled", by=left)
            del self._deadlines[request_id]

    def _parse_body(self, body: bytes) -> tuple[list[Program], ProgramLimits]:
        try:
            data = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._refuse(400, f"the body is not valid JSON: {error}") from error
        try:
            return self._parse_request(data)
        except UsageError as error:
            raise self._refuse(422, str(error)) from error

    def _parse_request(self, data: object) -> tuple[list[Program], ProgramLimits]:
        if not isinstance(data, dict):
            raise UsageError('the body must be an object: {"programs": […], "limits": {…}}')
        if extra := set(data) - {"programs", "limits"}:
            raise UsageError(f"unknown field {min(extra)}; the fields are programs and limits")
        rows = data.get("programs")
        if not isinstance(rows, list):
            raise UsageError(f"programs must be a list, got {type(rows).__name__}")
        if len(rows) > min(MAX_PROGRAMS, self._queue):
            raise UsageError(
                f"programs must have at most {min(MAX_PROGRAMS, self._queue)} entries, got {len(rows)}"
            )
        limits = parse_limits(data.get("limits"))
        self._check_ceiling(limits, "limits")
        programs = [parse_program(one, f"programs[{at}]") for at, one in enumerate(rows)]
        for at, program in enumerate(programs):
            self._check_ceiling(program.limits, f"programs[{at}].limits")
            for number, case in enumerate(program.cases):
                self._check_ceiling(case.limits, f"programs[{at}].cases[{number}].limits")
        return programs, limits

    def _check_ceiling(self, limits: ProgramLimits, where: str) -> None:
        for name in limits.__struct_fields__:
            value, most = getattr(limits, name), getattr(self._ceiling, name)
            if value is not None and most is not None and value > most:
                raise UsageError(f"{where}.{name} is {value:g}; this server allows at most {most:g}")

    def _deadline(self, programs: list[Program], limits: ProgramLimits) -> float:
        """Return the event loop time after which an unfinished request counts as overdue in `/healthz`."""
        wall = limits.over(DEFAULT_PROGRAM_LIMITS).wall or 0.0
        total = sum(max(1, len(one.cases)) * max(wall, one.limits.wall or 0.0) for one in programs)
        return (
            asyncio.get_running_loop().time() + MAX_TRIES * (total + LOST_AFTER_SECONDS) + 120.0 + self._admitted
        )

    def _retry_after(self) -> int:
        return max(1, min(60, self._admitted // max(1, 20 * self._programs.concurrency)))

    # ---- other paths

    async def _about(self, _: Request, out: ResponseWriter) -> None:
        catalogue.CODE_REQUESTS.add("200")
        out.send(200, b'{"service":"rookery serve-code","programs":"POST /run_code"}')

    async def _health(self, _: Request, out: ResponseWriter) -> None:
        now = asyncio.get_running_loop().time()
        late = sum(deadline < now for deadline in self._deadlines.values())
        status = "stopping" if self.stopping else "late" if late else "ok"
        code = 200 if status == "ok" else 503
        catalogue.CODE_REQUESTS.add(str(code))
        provider = self._programs.spec.provider
        message = {"status": status, "programs": self._admitted, "late": late, "provider": provider}
        out.send(code, msgspec.json.encode(message))

    async def _metrics(self, _: Request, out: ResponseWriter) -> None:
        page = await self.metrics_page()
        catalogue.CODE_REQUESTS.add("200")
        out.send(200, page, CONTENT_TYPE.encode())

    async def metrics_page(self) -> bytes:
        """Return the metrics of this process in Prometheus text format."""
        return render(REGISTRY, REGISTRY.read())

    def collect_metrics(self) -> None:
        """Set the gauges of the service. The program that serves it adds this method to the registry."""
        catalogue.CODE_WAITING.set(self._admitted)


def _encode_result(result: ProgramResult) -> bytes:
    data = msgspec.to_builtins(result)
    data["passed"] = result.passed
    return json.dumps(
        data, separators=(",", ":")
    ).encode()  # ASCII, because the output of programs may contain lone surrogates


def _encode_error(text: str) -> bytes:
    return json.dumps({"error": {"message": text}}).encode()
