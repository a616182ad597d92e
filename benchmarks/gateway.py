"""The `gateway` bench: what a recorded model call costs, beside the call itself and beside others' forwarders.

Requests of 4 KB, and of 32k tokens, are answered at once with 500 tokens, their ids and logprobs, in vLLM's
shape. By turns in one run: the upstream itself, the least that forwarding can cost (ours, `floor`), a bare proxy
(uvicorn, Starlette, aiohttp), LiteLLM's proxy, and our gateway with one shard and recording on. On few cores
those who ask and answer share them with who is measured, so CPU µs of the measured one stand beside every rate.

Promises:
- everybody forwards the same requests to the same upstream and is asked by the same program, one after the other
  in small windows, round by round: a figure is the median of its rounds, a difference that of the same rounds;
- the first round is a warm-up and not counted;
- an answer that is wrong or missing fails the bench; of a peer, it makes the peer missing from that figure;
- registering and deleting sessions is not in a figure.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result
from benchmarks.gateway_load import PER_SESSION, WARM_UP, Window, window
from benchmarks.gateway_payloads import LONG_PROMPT, SHORT_PROMPT, Ask, WrongAnswer
from benchmarks.gateway_servers import Contender, bare, direct, floor, gateway_words, litellm, ours
from benchmarks.gateway_tokens import tokenise_us
from benchmarks.gateway_turns import Turns, measure_turns
from benchmarks.instant_model import Instant, instant_model

NAME = "gateway"
UPSTREAM = "benchmarks.gateway_upstream"
QUICK_SECONDS = 48.0  # of the minute that a quick bench has; what is begun is finished
SHORT, LONG, STREAM = "4 KB", "32k tokens", "stream"
MANY, SOME = 64, 16
DIRECT, FLOOR, BARE, LITELLM, OURS = "direct", "floor", "bare proxy", "LiteLLM", "ours"


class Size(NamedTuple):
    """How much is measured."""

    rounds: int
    seconds_1: float
    seconds_many: float
    litellm_rounds: int
    litellm_cases: frozenset[str]
    conversations: int
    turn_rounds: int
    tokenise: int


FULL = Size(
    rounds=7,
    seconds_1=0.6,
    seconds_many=1.5,
    litellm_rounds=2,
    litellm_cases=frozenset({SHORT, LONG, STREAM}),
    conversations=24,
    turn_rounds=5,
    tokenise=200,
)
QUICK = Size(
    rounds=3,
    seconds_1=0.2,
    seconds_many=0.4,
    litellm_rounds=1,
    litellm_cases=frozenset({SHORT}),
    conversations=8,
    turn_rounds=2,
    tokenise=40,
)


class Case(NamedTuple):
    """One thing that is asked of everybody in a round."""

    what: str
    width: int
    without: frozenset[str] = frozenset()


CASES = (
    Case(SHORT, 1),
    Case(SHORT, MANY),
    Case(LONG, 1),
    # A streamed answer is almost a second of LiteLLM's CPU, a long one a quarter: it is asked one at a time.
    Case(LONG, SOME, frozenset({LITELLM})),
    Case(STREAM, 1, frozenset({FLOOR})),
    Case(STREAM, SOME, frozenset({FLOOR, LITELLM})),
)


class Field(NamedTuple):
    """Who takes part; and why others do not."""

    contenders: dict[str, Contender]
    missing: dict[str, str]

    def named(self, who: str) -> str:
        return self.contenders[who].name if who in self.contenders else who


class Found:
    """The windows of all rounds."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self.windows: dict[tuple[str, int, str], dict[int, Window]] = {}
        self.notes = dict(field.missing)

    def put(self, case: Case, who: str, at: int, measured: Window) -> None:
        self.windows.setdefault((case.what, case.width, who), {})[at] = measured

    def failed(self, case: Case, who: str, why: str) -> None:
        self.windows.pop((case.what, case.width, who), None)
        self.notes[f"{who} {case.what} {case.width}"] = why

    def each(self, what: str, width: int, who: str, figure: Callable[[Window], float | None]) -> dict[int, float]:
        rounds = self.windows.get((what, width, who), {})
        return {at: value for at, one in rounds.items() if (value := figure(one)) is not None}

    def figure(
        self, what: str, width: int, who: str, figure: Callable[[Window], float | None], *, added: bool = False
    ) -> float | None:
        """The median of the rounds; `added`: of what it is more than direct in the same round."""
        values = self.each(what, width, who, figure)
        if added:
            base = self.each(what, width, DIRECT, figure)
            values = {at: value - base[at] for at, value in values.items() if at in base}
        return median(values.values()) if values else None

    def why(self, what: str, width: int, who: str) -> str:
        """Why there is no figure, where something went wrong."""
        return self.notes.get(f"{who} {what} {width}", "") or self.notes.get(who, "")


async def run(quick: bool, progress: Progress) -> list[Result]:
    return await measure(QUICK if quick else FULL, quick=quick, progress=progress)


async def measure(
    size: Size,
    *,
    quick: bool,
    progress: Progress,
    words: Callable[[Instant], Sequence[str]] = gateway_words,
) -> list[Result]:
    """The whole bench, with the gateway that `words` start."""
    began = time.perf_counter()
    async with _field(words, progress) as field:
        turns = await measure_turns(
            field.contenders[OURS],
            field.contenders[FLOOR],
            conversations=size.conversations,
            rounds=size.turn_rounds,
            progress=progress,
        )
        found = await _rounds(field, size, progress, until=began + QUICK_SECONDS if quick else None)
    progress("tokenise: a message after an answer")
    return [*_rows(found, turns), tokenise_us(size.tokenise)]


@asynccontextmanager
async def _field(words: Callable[[Instant], Sequence[str]], progress: Progress) -> AsyncIterator[Field]:
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(instant_model(UPSTREAM))
        contenders, missing = {DIRECT: direct(upstream)}, dict[str, str]()
        contenders[OURS] = await stack.enter_async_context(ours(words(upstream)))
        contenders[FLOOR] = await stack.enter_async_context(floor(upstream))
        for who, serving in ((BARE, bare(upstream)), (LITELLM, litellm(upstream))):
            progress(f"starting {who}")
            made = await stack.enter_async_context(serving)
            if isinstance(made, str):
                progress(made)
                missing[who] = made
            else:
                contenders[who] = made
        yield Field(contenders, missing)


async def _rounds(field: Field, size: Size, progress: Progress, *, until: float | None) -> Found:
    """Round by round, everybody with everything; the machine gets slower and faster by a third within minutes."""
    asks = {
        SHORT: Ask(size=4_096, prompt_tokens=SHORT_PROMPT),
        LONG: Ask(size=4 * LONG_PROMPT, prompt_tokens=LONG_PROMPT),
        STREAM: Ask(size=4_096, prompt_tokens=SHORT_PROMPT, stream=True),
    }
    found = Found(field)
    for at in range(size.rounds + 1):
        if at > 1 and until is not None and time.perf_counter() > until:
            progress("no time for another round")
            break
        progress(f"round {at} of {size.rounds}" if at else "warm-up")
        for case in CASES:
            for who, contender in field.contenders.items():
                if who in case.without or (who == LITELLM and not _litellm_asked(case, at, size)):
                    continue
                if at and found.why(case.what, case.width, who):
                    continue
                seconds = (size.seconds_1 if case.width == 1 else size.seconds_many) if at else 0.1
                warm_up = 1 if who == LITELLM or until is not None else WARM_UP
                try:
                    async with contender.target(sessions_for(case, seconds)) as target:
                        measured = await window(target, asks[case.what], case.width, seconds, warm_up=warm_up)
                except (WrongAnswer, OSError, TimeoutError) as error:
                    if who not in (BARE, LITELLM):
                        raise
                    why = f"{contender.name} failed: {error!r}"[:500]
                    progress(f"{case.what}, {case.width} at once: {why}")
                    found.failed(case, who, why)
                    continue
                if at:
                    found.put(case, who, at, measured)
    return found


def _litellm_asked(case: Case, at: int, size: Size) -> bool:
    """Its answers take longer than a window of the others: it warms up with the shortest and sits rounds out."""
    if not at:
        return case == CASES[0]
    return case.what in size.litellm_cases and (at - 1) % max(1, size.rounds // size.litellm_rounds) == 0


def sessions_for(case: Case, seconds: float) -> int:
    """Enough that a session gets `PER_SESSION` requests, at the rates that we have seen; then they begin anew."""
    per_second = {SHORT: 4_000, LONG: 800, STREAM: 800}[case.what]
    wanted = int(seconds * per_second / PER_SESSION) // (1 if case.width > 1 else 4)
    return max(case.width, min(wanted, 2_048))


# -------------------------------------------------------------------------------------------------------- rows


def _rows(found: Found, turns: Turns) -> list[Result]:
    def latency(one: Window) -> float:
        return one.latency

    def first(one: Window) -> float:
        return one.first

    def rps(one: Window) -> float:
        return one.rps

    def cpu(one: Window) -> float | None:
        return one.cpu_us

    def beside(
        name: str,
        unit: str,
        what: str,
        width: int,
        figure: Callable[[Window], float | None],
        peers: dict[str | None, str | None],
        *,
        note: str = "",
    ) -> list[Result]:
        added, more = unit == "ms", unit == "1/s"
        mine = found.figure(what, width, OURS, figure, added=added)
        spread = _spread(list(found.each(what, width, OURS, figure).values()))
        rows = []
        for at, (peer, target) in enumerate(peers.items()):
            theirs = None if peer is None else found.figure(what, width, peer, figure, added=added)
            why = ""
            if peer is not None and theirs is None:
                why = found.why(what, width, peer) or f"{found.field.named(peer)} is not asked this in a quick run"
            first_note = "; ".join(filter(None, (note, f"rounds {spread}"))) if at == 0 else ""
            rows.append(
                Result(
                    name=name,
                    unit=unit,
                    ours=mine,
                    peer=None if peer is None else found.field.named(peer),
                    theirs=theirs,
                    target=target,
                    lower_is_better=not more,
                    note="; ".join(filter(None, (why, first_note))),
                )
            )
        return rows

    def base(figure: Callable[[Window], float], what: str) -> str:
        value = found.figure(what, 1, DIRECT, figure)
        return "" if value is None else f"beyond direct, which takes {value:.3f}"

    return [
        *beside(
            "added_ms_c1",
            "ms",
            SHORT,
            1,
            latency,
            {None: "<= 0.7", FLOOR: None, BARE: None, LITELLM: None},
            note=base(latency, SHORT),
        ),
        *beside("rps_c64", "1/s", SHORT, MANY, rps, {BARE: ">= 0.7x", DIRECT: None, FLOOR: None}),
        *beside("vs_litellm", "1/s", SHORT, MANY, rps, {LITELLM: ">= 8x"}),
        *beside("cpu_us_c1", "CPU-us", SHORT, 1, cpu, {BARE: None, FLOOR: None, LITELLM: None}),
        *beside("cpu_us_c64", "CPU-us", SHORT, MANY, cpu, {BARE: None, FLOOR: None, LITELLM: None}),
        *beside(
            "first_byte_ms",
            "ms",
            STREAM,
            1,
            first,
            {None: "<= 1", BARE: None, LITELLM: None},
            note=base(first, STREAM),
        ),
        *beside("stream_rps_c16", "1/s", STREAM, SOME, rps, {BARE: None}),
        *beside("stream_cpu_us_c16", "CPU-us", STREAM, SOME, cpu, {BARE: None}),
        *beside(
            "added_ms_c1_32k",
            "ms",
            LONG,
            1,
            latency,
            {BARE: None, FLOOR: None, LITELLM: None},
            note=base(latency, LONG),
        ),
        *beside("rps_c16_32k", "1/s", LONG, SOME, rps, {BARE: None, FLOOR: None}),
        *beside("cpu_us_c16_32k", "CPU-us", LONG, SOME, cpu, {BARE: None, FLOOR: None}),
        *turns.rows(),
    ]


def _spread(values: Sequence[float]) -> str:
    def shown(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    return f"{shown(min(values))} to {shown(max(values))}" if values else "none"
