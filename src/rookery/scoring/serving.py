"""`POST /run_code`: programs over HTTP, for trainers in whatever language.

Promises:
- results come in the order of the programs, a line each as soon as it and all before it are there, or all in one
  object where the client asks for `application/json`;
- bad input is 400 (no JSON) or 422 (the field is named), and nothing of that request runs;
- what is under way is bounded: bodies, programs of a request, programs that wait, limits that may be asked for;
  more is 413, 422 or 429 with `Retry-After`;
- a client that goes away takes its programs with it, and nobody else's;
- with a key, nothing but `/healthz` is answered without it, before a body is read; without a key, requests whose
  `Host` or `Origin` is not this machine are refused: a web page may have sent them;
- health says what is so: a program that should long have ended is 503.
"""

import asyncio
import hmac
import json
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

import msgspec

from rookery.core import UsageError
from rookery.gateway.http import Answer, Refusal, Request
from rookery.scoring.boxes import LATE, TRIES
from rookery.scoring.programs import (
    DEFAULT_PROGRAM_LIMITS,
    Program,
    ProgramLimits,
    ProgramResult,
    limits_of,
    program_of,
)
from rookery.scoring.running import Programs
from rookery.upstreams.listening import foreign_page

NDJSON: Final = b"application/x-ndjson"
TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
MAX_BODY: Final = 64 << 20
MAX_PROGRAMS: Final = 10_000
CEILING: Final = ProgramLimits(wall=300.0, cpu=300.0, memory=4 << 30, output=16 << 20, pids=1024, disk=4 << 30)


class CodeService:
    """Answers requests in the sandboxes of one `Programs`. `queue`: programs that are admitted and not done."""

    def __init__(
        self, programs: Programs, *, key: str = "", queue: int = 10_000, ceiling: ProgramLimits = CEILING
    ) -> None:
        self._programs = programs
        self._key = key
        self._queue = queue
        self._ceiling = ceiling.over(CEILING)
        self._admitted = 0
        self._deadlines: dict[int, float] = {}
        self._answered: Counter[int] = Counter()
        self._ended: Counter[str] = Counter()
        self.stopping = False

    # ---- what the server asks

    def admit(self, request: Request) -> int:
        """The most bytes of body that will be read."""
        path, method = request.path, request.method
        if path not in ("/", "/healthz", "/metrics", "/run_code"):
            raise self._refused(404, f"nothing is served at {path[:200]}; programs are POSTed to /run_code")
        wanted = ("POST",) if path == "/run_code" else ("GET", "HEAD")
        self._check_page(request)
        if path != "/healthz":
            self._check_key(request)
        if method not in wanted:
            raise self._refused(405, f"{path} takes {wanted[0]}", ((b"allow", ", ".join(wanted).encode()),))
        if path == "/run_code" and self.stopping:
            raise self._refused(503, "the server is about to end", ((b"retry-after", b"5"),))
        return MAX_BODY if path == "/run_code" else 0

    async def handle(self, request: Request, out: Answer) -> None:
        answers: dict[str, Callable[[Request, Answer], Any]] = {
            "/": self._about,
            "/healthz": self._health,
            "/metrics": self._metrics,
            "/run_code": self._run_code,
        }
        await answers[request.path](request, out)

    def worded(self, status: int, text: str) -> bytes:
        return _error(text or str(status))

    @property
    def failure(self) -> bytes:
        return _error("the request could not be answered: a fault of the server's own")

    def _check_page(self, request: Request) -> None:
        """Refuse what a web page of somebody else may have sent; a key keeps those out as well."""
        headers = request.headers
        if not self._key and (why := foreign_page(headers.get("host"), headers.get("origin"))):
            raise self._refused(
                403, f"without a key this server answers programs of its own machine alone, and {why}: set a key"
            )

    def _check_key(self, request: Request) -> None:
        if not self._key:
            return
        given = request.headers.get("authorization", "")
        scheme, _, word = given.partition(" ")
        word = word.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(word.encode("utf-8", "replace"), self._key.encode()):
            raise self._refused(401, "the key is missing or wrong", ((b"www-authenticate", b"Bearer"),))

    def _refused(self, status: int, text: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Refusal:
        self._answered[status] += 1
        return Refusal(status, _error(text), headers)

    # ---- programs

    async def _run_code(self, request: Request, out: Answer) -> None:
        programs, limits = self._understood(request.body)
        request.body = b""
        if self._admitted + len(programs) > self._queue:
            wait = str(self._retry_after()).encode()
            said = f"{self._admitted} programs are under way or wait, of at most {self._queue}: come again later"
            raise self._refused(429, said, ((b"retry-after", wait),))
        whole = "application/json" in request.headers.get("accept", "")
        self._admitted += len(programs)
        left = len(programs)
        ticket = id(request)
        self._deadlines[ticket] = self._deadline(programs, limits)
        try:
            if not whole:
                self._answered[200] += 1
                out.begin(200, NDJSON)
            lines: list[bytes] = []
            async with aclosing(self._programs.stream(programs, limits)) as results:
                async for result in results:
                    self._admitted -= 1
                    left -= 1
                    self._ended[result.status] += 1
                    line = _encoded(result)
                    if whole:
                        lines.append(line)
                    else:
                        await out.write(line + b"\n")
            if whole:
                self._answered[200] += 1
                out.send(200, b'{"results":[' + b",".join(lines) + b"]}")
            else:
                out.end()
        finally:
            self._admitted -= left
            self._ended["cancelled"] += left
            del self._deadlines[ticket]

    def _understood(self, body: bytes) -> tuple[list[Program], ProgramLimits]:
        try:
            plain = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._refused(400, f"the body is no JSON: {error}") from error
        try:
            return self._checked(plain)
        except UsageError as error:
            raise self._refused(422, str(error)) from error

    def _checked(self, plain: object) -> tuple[list[Program], ProgramLimits]:
        if not isinstance(plain, dict):
            raise UsageError('the body must be an object: {"programs": […], "limits": {…}}')
        if extra := set(plain) - {"programs", "limits"}:
            raise UsageError(f"{min(extra)} is not known; the fields are programs, limits")
        given = plain.get("programs")
        if not isinstance(given, list):
            raise UsageError("programs must be a list")
        if len(given) > min(MAX_PROGRAMS, self._queue):
            raise UsageError(f"programs must be at most {min(MAX_PROGRAMS, self._queue)}, got {len(given)}")
        limits = limits_of(plain.get("limits"))
        self._below(limits, "limits")
        programs = [program_of(one, f"programs[{at}]") for at, one in enumerate(given)]
        for at, program in enumerate(programs):
            self._below(program.limits, f"programs[{at}].limits")
            for number, case in enumerate(program.cases):
                self._below(case.limits, f"programs[{at}].cases[{number}].limits")
        return programs, limits

    def _below(self, limits: ProgramLimits, where: str) -> None:
        for name in limits.__struct_fields__:
            value, most = getattr(limits, name), getattr(self._ceiling, name)
            if value is not None and most is not None and value > most:
                raise UsageError(f"{where}.{name} is {value:g}, and this server allows {most:g}")

    def _deadline(self, programs: list[Program], limits: ProgramLimits) -> float:
        """By when even the slowest sandboxes would have told: later than that, something hangs."""
        wall = limits.over(DEFAULT_PROGRAM_LIMITS).wall or 0.0
        total = sum(max(1, len(one.cases)) * max(wall, one.limits.wall or 0.0) for one in programs)
        return asyncio.get_running_loop().time() + TRIES * (total + LATE) + 120.0 + self._admitted

    def _retry_after(self) -> int:
        return max(1, min(60, self._admitted // max(1, 20 * self._programs.concurrency)))

    # ---- the rest

    async def _about(self, _: Request, out: Answer) -> None:
        self._answered[200] += 1
        out.send(200, b'{"service":"rookery serve-code","programs":"POST /run_code"}')

    async def _health(self, _: Request, out: Answer) -> None:
        now = asyncio.get_running_loop().time()
        late = sum(deadline < now for deadline in self._deadlines.values())
        status = "stopping" if self.stopping else "late" if late else "ok"
        code = 200 if status == "ok" else 503
        self._answered[code] += 1
        provider = self._programs.spec.provider
        said = {"status": status, "programs": self._admitted, "late": late, "provider": provider}
        out.send(code, msgspec.json.encode(said))

    async def _metrics(self, _: Request, out: Answer) -> None:
        lines = [
            "# TYPE rookery_code_programs_total counter",
            *(f'rookery_code_programs_total{{status="{s}"}} {n}' for s, n in sorted(self._ended.items())),
            "# TYPE rookery_code_programs_waiting gauge",
            f"rookery_code_programs_waiting {self._admitted}",
            "# TYPE rookery_code_requests_total counter",
            *(f'rookery_code_requests_total{{status="{s}"}} {n}' for s, n in sorted(self._answered.items())),
        ]
        self._answered[200] += 1
        out.send(200, "\n".join((*lines, "")).encode(), TEXT)


def _encoded(result: ProgramResult) -> bytes:
    plain = msgspec.to_builtins(result)
    plain["passed"] = result.passed
    return json.dumps(plain, separators=(",", ":")).encode()  # as ASCII: what programs print may be no valid text


def _error(text: str) -> bytes:
    return json.dumps({"error": {"message": text}}).encode()
