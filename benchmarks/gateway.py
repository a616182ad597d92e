"""Benchmark `gateway`: the cost of a recorded model call, beside the bare call and other proxies.

Requests of 4 KB and of 32k tokens get an immediate answer of 500 tokens with IDs and log probabilities, in the
format of vLLM. One run alternates between the upstream itself, the minimal recording proxy (`floor`), a bare proxy
(uvicorn, Starlette, aiohttp), LiteLLM's proxy, and our gateway with one shard and recording enabled. On few cores
the load generator and the upstream compete with the measured server, so every rate comes with the server's CPU
time.

Method:
- every server forwards the same requests to the same upstream and is loaded by the same generator, in short
  windows that alternate: a figure is the median of its rounds, and a difference is taken within a round;
- the first round is a warm-up and does not count;
- a wrong or missing answer fails the benchmark; a peer with such an answer is reported as missing;
- registering and deleting sessions is not measured.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result
from benchmarks.gateway_conversations import ConversationCosts, measure_conversations, measure_prompt_growth
from benchmarks.gateway_load_generator import REQUESTS_PER_SESSION, WARM_UP, Window, measure_window
from benchmarks.gateway_payloads import LONG_PROMPT, SHORT_PROMPT, RequestFactory, WrongAnswerError
from benchmarks.gateway_servers import (
    ServerUnderTest,
    direct,
    gateway_command,
    run_bare_proxy,
    run_floor,
    run_gateway,
    run_litellm,
)
from benchmarks.gateway_tokenization import tokenize_us
from benchmarks.instant_model import InstantModel, instant_model

NAME = "gateway"
UPSTREAM = "benchmarks.gateway_upstream"
QUICK_SECONDS = 48.0  # a quick run has one minute; a round that has started is finished
SHORT, LONG, STREAM = "4 KB", "32k tokens", "stream"
MANY, SEVERAL = 64, 16
DIRECT, FLOOR, BARE, LITELLM, OURS = "direct", "floor", "bare proxy", "LiteLLM", "ours"


class Size(NamedTuple):
    """Amount of work to measure."""

    rounds: int
    seconds_1: float
    seconds_many: float
    litellm_rounds: int
    litellm_cases: frozenset[str]
    conversations: int
    turn_rounds: int
    tokenizations: int


FULL = Size(
    rounds=7,
    seconds_1=0.6,
    seconds_many=1.5,
    litellm_rounds=2,
    litellm_cases=frozenset({SHORT, LONG, STREAM}),
    conversations=24,
    turn_rounds=5,
    tokenizations=200,
)
QUICK = Size(
    rounds=3,
    seconds_1=0.2,
    seconds_many=0.4,
    litellm_rounds=1,
    litellm_cases=frozenset({SHORT}),
    conversations=8,
    turn_rounds=2,
    tokenizations=40,
)


class Case(NamedTuple):
    """A kind of request and the number of connections, measured for every server in a round."""

    kind: str
    width: int
    excluded: frozenset[str] = frozenset()


CASES = (
    Case(SHORT, 1),
    Case(SHORT, MANY),
    Case(LONG, 1),
    # A streamed answer costs LiteLLM almost a CPU second and a long one a quarter, so it gets one at a time.
    Case(LONG, SEVERAL, frozenset({LITELLM})),
    Case(STREAM, 1, frozenset({FLOOR})),
    Case(STREAM, SEVERAL, frozenset({FLOOR, LITELLM})),
)


class Servers(NamedTuple):
    """The running servers, and why others are missing."""

    running: dict[str, ServerUnderTest]
    missing: dict[str, str]

    def display_name(self, server_name: str) -> str:
        return self.running[server_name].name if server_name in self.running else server_name


class Measurements:
    """The windows of all rounds, and why windows are missing."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.windows: dict[tuple[str, int, str], dict[int, Window]] = {}
        self.notes = dict(servers.missing)

    def add(self, case: Case, server_name: str, at: int, measured: Window) -> None:
        self.windows.setdefault((case.kind, case.width, server_name), {})[at] = measured

    def drop(self, case: Case, server_name: str, reason: str) -> None:
        self.windows.pop((case.kind, case.width, server_name), None)
        self.notes[f"{server_name} {case.kind} {case.width}"] = reason

    def per_round(
        self, kind: str, width: int, server_name: str, figure: Callable[[Window], float | None]
    ) -> dict[int, float]:
        rounds = self.windows.get((kind, width, server_name), {})
        return {at: value for at, window in rounds.items() if (value := figure(window)) is not None}

    def figure(
        self,
        kind: str,
        width: int,
        server_name: str,
        figure: Callable[[Window], float | None],
        *,
        added: bool = False,
    ) -> float | None:
        """Return the median of the rounds. With `added`, of the difference to direct calls in the same round."""
        values = self.per_round(kind, width, server_name, figure)
        if added:
            base = self.per_round(kind, width, DIRECT, figure)
            values = {at: value - base[at] for at, value in values.items() if at in base}
        return median(values.values()) if values else None

    def reason(self, kind: str, width: int, server_name: str) -> str:
        """Return why there is no figure, or an empty string."""
        return self.notes.get(f"{server_name} {kind} {width}", "") or self.notes.get(server_name, "")


async def run(quick: bool, progress: Progress) -> list[Result]:
    return await measure(QUICK if quick else FULL, quick=quick, progress=progress)


async def measure(
    size: Size,
    *,
    quick: bool,
    progress: Progress,
    command: Callable[[InstantModel], Sequence[str]] = gateway_command,
) -> list[Result]:
    """Run the benchmark with the gateway that `command` starts."""
    began = time.perf_counter()
    async with _start_servers(command, progress) as servers:
        turns = await measure_conversations(
            servers.running[OURS],
            servers.running[FLOOR],
            conversations=size.conversations,
            rounds=size.turn_rounds,
            progress=progress,
        )
        long_prompts = await measure_prompt_growth(
            servers.running[OURS],
            servers.running[FLOOR],
            conversations=max(1, size.conversations // 2),
            rounds=size.turn_rounds,
            progress=progress,
        )
        measurements = await _measure_rounds(
            servers, size, progress, until=began + QUICK_SECONDS if quick else None
        )
    progress("tokenization: a message after an answer")
    return [*_rows(measurements, turns), long_prompts, tokenize_us(size.tokenizations)]


@asynccontextmanager
async def _start_servers(
    command: Callable[[InstantModel], Sequence[str]], progress: Progress
) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(instant_model(UPSTREAM))
        running, missing = {DIRECT: direct(upstream)}, dict[str, str]()
        running[OURS] = await stack.enter_async_context(run_gateway(command(upstream)))
        running[FLOOR] = await stack.enter_async_context(run_floor(upstream))
        for server_name, starting in ((BARE, run_bare_proxy(upstream)), (LITELLM, run_litellm(upstream))):
            progress(f"starting {server_name}")
            started = await stack.enter_async_context(starting)
            if isinstance(started, str):
                progress(started)
                missing[server_name] = started
            else:
                running[server_name] = started
        yield Servers(running, missing)


async def _measure_rounds(
    servers: Servers, size: Size, progress: Progress, *, until: float | None
) -> Measurements:
    """Measure all servers with all cases in every round, because the speed of a machine varies within minutes."""
    requests = {
        SHORT: RequestFactory(size=4_096, prompt_tokens=SHORT_PROMPT),
        LONG: RequestFactory(size=4 * LONG_PROMPT, prompt_tokens=LONG_PROMPT),
        STREAM: RequestFactory(size=4_096, prompt_tokens=SHORT_PROMPT, stream=True),
    }
    measurements = Measurements(servers)
    for at in range(size.rounds + 1):
        if at > 1 and until is not None and time.perf_counter() > until:
            progress("no time for another round")
            break
        progress(f"round {at} of {size.rounds}" if at else "warm-up")
        for case in CASES:
            for server_name, server in servers.running.items():
                if server_name in case.excluded or (
                    server_name == LITELLM and not _includes_litellm(case, at, size)
                ):
                    continue
                if at and measurements.reason(case.kind, case.width, server_name):
                    continue
                seconds = (size.seconds_1 if case.width == 1 else size.seconds_many) if at else 0.1
                warm_up = 1 if server_name == LITELLM or until is not None else WARM_UP
                try:
                    async with server.target(sessions_for(case, seconds)) as target:
                        measured = await measure_window(
                            target, requests[case.kind], case.width, seconds, warm_up=warm_up
                        )
                except (WrongAnswerError, OSError, TimeoutError) as error:
                    if server_name not in (BARE, LITELLM):
                        raise
                    reason = f"{server.name} failed: {error!r}"[:500]
                    progress(f"{case.kind}, {case.width} at once: {reason}")
                    measurements.drop(case, server_name, reason)
                    continue
                if at:
                    measurements.add(case, server_name, at, measured)
    return measurements


def _includes_litellm(case: Case, at: int, size: Size) -> bool:
    """Return whether LiteLLM takes part. Its answers take longer than a window, so it skips most rounds."""
    if not at:
        return case == CASES[0]
    return case.kind in size.litellm_cases and (at - 1) % max(1, size.rounds // size.litellm_rounds) == 0


def sessions_for(case: Case, seconds: float) -> int:
    """Return the number of sessions at which none gets more than `REQUESTS_PER_SESSION`, at rates seen so far."""
    per_second = {SHORT: 4_000, LONG: 800, STREAM: 800}[case.kind]
    sessions = int(seconds * per_second / REQUESTS_PER_SESSION) // (1 if case.width > 1 else 4)
    return max(case.width, min(sessions, 2_048))


# -------------------------------------------------------------------------------------------------------- rows


def _rows(measurements: Measurements, turns: ConversationCosts) -> list[Result]:
    def latency(window: Window) -> float:
        return window.latency

    def first_byte(window: Window) -> float:
        return window.first_byte

    def rps(window: Window) -> float:
        return window.rps

    def cpu(window: Window) -> float | None:
        return window.cpu_us

    def compare(
        name: str,
        unit: str,
        kind: str,
        width: int,
        figure: Callable[[Window], float | None],
        peers: dict[str | None, str | None],
        *,
        note: str = "",
    ) -> list[Result]:
        added, more = unit == "ms", unit == "1/s"
        mine = measurements.figure(kind, width, OURS, figure, added=added)
        spread = _spread(list(measurements.per_round(kind, width, OURS, figure).values()))
        rows = []
        for at, (peer, target) in enumerate(peers.items()):
            theirs = None if peer is None else measurements.figure(kind, width, peer, figure, added=added)
            reason = ""
            if peer is not None and theirs is None:
                reason = (
                    measurements.reason(kind, width, peer)
                    or f"{measurements.servers.display_name(peer)} is not measured in a quick run"
                )
            first_note = "; ".join(filter(None, (note, f"rounds {spread}"))) if at == 0 else ""
            rows.append(
                Result(
                    name=name,
                    unit=unit,
                    ours=mine,
                    peer=None if peer is None else measurements.servers.display_name(peer),
                    theirs=theirs,
                    target=target,
                    lower_is_better=not more,
                    note="; ".join(filter(None, (reason, first_note))),
                )
            )
        return rows

    def base(figure: Callable[[Window], float], kind: str) -> str:
        value = measurements.figure(kind, 1, DIRECT, figure)
        return "" if value is None else f"beyond direct, which takes {value:.3f}"

    return [
        *compare(
            "added_ms_c1",
            "ms",
            SHORT,
            1,
            latency,
            {None: "<= 0.7", FLOOR: None, BARE: None, LITELLM: None},
            note=base(latency, SHORT),
        ),
        *compare("rps_c64", "1/s", SHORT, MANY, rps, {BARE: ">= 0.7x", DIRECT: None, FLOOR: ">= 0.5x"}),
        *compare("vs_litellm", "1/s", SHORT, MANY, rps, {LITELLM: ">= 8x"}),
        *compare("cpu_us_c1", "CPU-us", SHORT, 1, cpu, {BARE: None, FLOOR: None, LITELLM: None}),
        *compare("cpu_us_c64", "CPU-us", SHORT, MANY, cpu, {BARE: None, FLOOR: None, LITELLM: None}),
        *compare(
            "first_byte_ms",
            "ms",
            STREAM,
            1,
            first_byte,
            {None: "<= 1", BARE: None, LITELLM: None},
            note=base(first_byte, STREAM),
        ),
        *compare("stream_rps_c16", "1/s", STREAM, SEVERAL, rps, {BARE: ">= 1x"}),
        *compare("stream_cpu_us_c16", "CPU-us", STREAM, SEVERAL, cpu, {BARE: None}),
        *compare(
            "added_ms_c1_32k",
            "ms",
            LONG,
            1,
            latency,
            {BARE: None, FLOOR: None, LITELLM: None},
            note=base(latency, LONG),
        ),
        *compare("rps_c16_32k", "1/s", LONG, SEVERAL, rps, {BARE: ">= 1.2x", FLOOR: None}),
        *compare("cpu_us_c16_32k", "CPU-us", LONG, SEVERAL, cpu, {BARE: None, FLOOR: None}),
        *turns.rows(),
    ]


def _spread(values: Sequence[float]) -> str:
    def shown(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    return f"{shown(min(values))} to {shown(max(values))}" if values else "none"
