"""Distinguish an inference engine that hangs from one that is busy with a long reply.

A call is silent while it receives no byte of its reply. A call that has been silent for long is examined by means
of the server's health endpoint, its metrics, the progress of other calls on the same replica and, if these are
inconclusive, a request for one token. Runs in the process that makes the model calls.

Guarantees:
- a server whose metrics show progress between the first and the last request of an examination is not hung,
  however slow it is;
- a server that reports that it is paused or sleeps is judged hung only when a deadline has passed;
- the server's health, metrics and test token are requested within `MAX_EXAMINATION_SECONDS` seconds, and every
  fact that led to the verdict is in the returned `UpstreamEvidence`;
- a call that receives bytes or ends while it is examined is never judged hung;
- a server without metrics may process one request at a time, so that it cannot answer a test request during a long
  reply. Such a server is judged hung for an unanswered test request only when a deadline has passed, and only if
  the call took several times as long as the longest earlier call.

All silent calls on one replica share one examination of the replica.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from rookery.core.lifetimes import detached_context
from rookery.upstreams.protocol import LoadMetrics
from rookery.upstreams.registry import list_load_metrics
from rookery.upstreams.replica import CallProgress, ExchangeError, Replica

SILENT_SECONDS: Final = 30.0
"""A call in flight that has received no byte for this many seconds is examined."""
CHECK_SECONDS: Final = 5.0
"""Seconds between two searches for silent calls."""
RECENT_SECONDS: Final = 2.0
"""A call that received bytes within this many seconds counts as working, without further evidence."""
STALL_SECONDS: Final = 10.0
"""A reply that began and then sent no byte for this many seconds has stalled."""
HEALTH_SECONDS: Final = 5.0
METRICS_GAP_SECONDS: Final = 1.0
"""Seconds between the two readings of the server's metrics in one examination."""
SAMPLE_SECONDS: Final = 8.0
"""Timeout for the test request for one token. A working inference engine replies much faster unless it is fully
loaded, and its metrics show that."""
REUSE_SECONDS: Final = 60.0
"""Seconds for which the report on a replica that was found hung is reused before the replica is examined again."""
USUAL_TIMES: Final = 3.0
"""A call takes unusually long if it lasts at least this many times the longest earlier call of its replica."""
MAX_EXAMINATION_SECONDS: Final = HEALTH_SECONDS * 3 + METRICS_GAP_SECONDS + SAMPLE_SECONDS


Verdict: TypeAlias = Literal["hung", "working"]
Reason: TypeAlias = Literal[
    "answered",
    "bytes_received",
    "other_calls_progress",
    "tokens_generated",
    "sample_answered",
    "sample_refused",
    "health_failed",
    "engine_paused",
    "request_lost",
    "answer_stalled",
    "sample_failed",
    "answers_take_long",
    "call_failed",
]


class EngineLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """Load of an inference engine from its metrics: requests running and waiting, and the prompt tokens and
    generated tokens that it has processed since its start."""

    running: float
    waiting: float = 0.0
    tokens: float | None = None


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one examination of a replica: health, load, new tokens and a test request."""

    health: str
    """`ok`, or how the health check failed."""
    load: EngineLoad | None = None
    """The load that the inference engine's metrics show; None if it has no metrics that are known here."""
    known_calls: int = 0
    """Number of calls from this process that the inference engine must have received before its metrics were
    read."""
    new_tokens: float | None = None
    """Tokens that the inference engine processed between the first and the last reading of its metrics; None if
    that is unknown."""
    new_tokens_seconds: float = 0.0
    """Seconds between those readings."""
    paused: bool = False
    """True if the inference engine reports that it is paused or sleeps."""
    sample: str = ""
    """Result of the test request for one token: `answered`, `refused`, or how it failed; empty if none was
    sent."""

    @property
    def lost(self) -> bool:
        """True if the inference engine has fewer requests than this process has calls in flight there: it lost
        some."""
        return self.load is not None and self.load.running + self.load.waiting < self.known_calls


class UpstreamEvidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The evidence by which a silent model call was judged hung or working. Stored in the attempt's record."""

    replica: str
    verdict: Verdict
    reason: Reason
    streamed: bool
    seconds: float
    """Seconds since the call was sent."""
    silent: float
    """Seconds since the call received its last byte, or since it was sent if it received none."""
    bytes: int = 0
    others_silent: float | None = None
    """Seconds since another call on this replica received bytes; None if no other call ever did."""
    report: ReplicaReport | None = None
    """The examination of the replica; None if the verdict did not need one."""
    cause: str = "upstream.hung"
    """The cause code to record for the failed call, if the verdict is `hung`."""
    failure: str = ""
    """The error of the last try, if the call was waiting for a retry when it was examined; otherwise empty."""

    @property
    def text(self) -> str:
        """The evidence as one line of text for messages and logs."""
        if self.failure:
            return f"no answer after {self.seconds:.3g} s; the last try failed: {self.failure}"
        text = f"{self.bytes} bytes of the answer after {self.seconds:.3g} s, none for {self.silent:.3g} s"
        if self.others_silent is not None:
            text += f"; other calls there made progress {self.others_silent:.3g} s ago"
        if (report := self.report) is not None:
            text += f"; health check: {report.health}"
            if report.load is not None:
                load = report.load
                text += f"; the inference engine runs {load.running:g} and queues {load.waiting:g} requests"
            if report.new_tokens is not None:
                text += f" and processed {report.new_tokens:g} tokens in {report.new_tokens_seconds:.3g} s"
            if report.paused:
                text += "; the inference engine is paused or sleeps"
            if report.sample:
                text += f"; one sampled token: {report.sample}"
        return f"{text} ({self.reason})"


@runtime_checkable
class Examinable(Protocol):
    """An upstream that can find out whether its servers hang."""

    async def examine(self, affinity: str) -> tuple[UpstreamEvidence, ...]: ...


def judge(
    report: ReplicaReport, *, begun: bool, others_moved: bool, usual: bool = False, patient: bool = False
) -> tuple[Verdict, Reason]:
    """Decide whether the server of a silent call hangs. Return the verdict and the reason for it.

    `begun` is True if a part of the reply has arrived, `others_moved` if other calls on the replica received bytes
    recently, `usual` if the call has not lasted unusually long for this replica, and `patient` if no deadline has
    passed, so that a paused server may have the time that it needs.
    """
    if report.health != "ok":
        return "hung", "health_failed"
    if report.paused:
        return "working" if patient else "hung", "engine_paused"
    if report.lost:
        return "hung", "request_lost"
    if report.new_tokens:
        return "working", "tokens_generated"
    if begun:
        return "hung", "answer_stalled"
    if others_moved:
        return "working", "other_calls_progress"
    if report.sample == "answered":
        return "working", "sample_answered"
    if report.sample in ("", "refused"):
        return "working", "sample_refused"
    if usual and report.load is None:
        return "working", "answers_take_long"
    return "hung", "sample_failed"


class HangDetector:
    """Examine calls that receive no bytes for `SILENT_SECONDS`, and end those whose server hangs with an error.

    One instance serves all replicas of one upstream, in one event loop.
    """

    def __init__(
        self,
        health_path: str,
        model: Callable[[], str],
        pause_paths: tuple[str, ...] = (),
        load_metrics: LoadMetrics | Literal["all_kinds"] | None = None,
    ) -> None:
        """`load_metrics` are the metrics of the kind of server; None if it has none, `all_kinds` for those of
        every installed kind."""
        self._load_metrics = load_metrics
        self._health_path = health_path
        self._pause_paths = pause_paths
        self._model = model
        self._reports: dict[str, asyncio.Task[ReplicaReport]] = {}
        self._hung_reports: dict[str, tuple[float, ReplicaReport]] = {}
        """The replicas that were found hung, by name, each with the time and the report."""
        self.watcher: asyncio.Task[None] | None = None
        """The task that examines silent calls; None if no call is in flight."""

    def close(self) -> None:
        for task in (self.watcher, *self._reports.values()):
            if task is not None:
                task.cancel()

    # ---- silent calls

    def watch(self, replicas: Iterable[Replica]) -> None:
        """Start a background task that examines silent calls on `replicas` until no call is in flight there."""
        work = self._watch(tuple(replicas))
        self.watcher = asyncio.get_running_loop().create_task(work, context=detached_context())

    async def _watch(self, replicas: tuple[Replica, ...]) -> None:
        loop = asyncio.get_running_loop()
        try:
            while any(replica.calls for replica in replicas):
                await asyncio.sleep(CHECK_SECONDS)
                silent = [
                    call
                    for replica in replicas
                    if not replica.is_frozen
                    for call in replica.calls
                    if loop.time() - call.last >= SILENT_SECONDS
                ]
                found = await asyncio.gather(*(self.examine(call, patient=True) for call in silent))
                for call, evidence in zip(silent, found, strict=True):
                    if evidence.verdict == "hung" and call in call.replica.calls:
                        call.replica.give_up(call, evidence)
                    else:
                        call.last = max(call.last, loop.time() - SILENT_SECONDS / 2)  # not again at the next check
        finally:
            self.watcher = None

    async def examine(self, call: CallProgress, *, patient: bool = False) -> UpstreamEvidence:
        """Examine the replica of a call, and return a verdict on the call with the evidence.

        With `patient`, the call has not reached a deadline yet. A server without metrics, which may process one
        request at a time, is then not judged hung because it leaves the test request unanswered.
        """
        loop = asyncio.get_running_loop()
        replica = call.replica
        began, received, others = loop.time(), call.bytes, replica.last_progress_of_others(call)
        if received and began - call.last <= RECENT_SECONDS:
            return self._evidence(call, "working", "bytes_received", began)
        report = self._report(replica, began)
        stalled_at = call.last + STALL_SECONDS
        while call in replica.calls and call.bytes == received:
            if report.done() and (not received or loop.time() >= stalled_at):
                break
            left = stalled_at - loop.time() if report.done() else None
            waits: set[asyncio.Future[Any]] = {replica.next_progress()}
            if not report.done():
                waits.add(report)
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if call not in replica.calls:
            return self._evidence(call, "working", "answered", began)
        if call.bytes != received:
            return self._evidence(call, "working", "bytes_received", began)
        found = await asyncio.shield(report)
        moved = replica.last_progress_of_others(call)
        recent = moved is not None and (moved != others or loop.time() - moved <= RECENT_SECONDS)
        usual = patient or loop.time() - call.sent < USUAL_TIMES * replica.longest_call
        verdict, reason = judge(found, begun=received > 0, others_moved=recent, usual=usual, patient=patient)
        if verdict == "hung" and reason != "request_lost":
            replica.mark_hung(loop.time(), reason)
            self._hung_reports.setdefault(replica.name, (loop.time(), found))
        return self._evidence(call, verdict, reason, loop.time(), found)

    def _evidence(
        self, call: CallProgress, verdict: Verdict, reason: Reason, now: float, report: ReplicaReport | None = None
    ) -> UpstreamEvidence:
        others = call.replica.last_progress_of_others(call)
        return UpstreamEvidence(
            replica=call.replica.name,
            verdict=verdict,
            reason=reason,
            streamed=call.streamed,
            seconds=round(now - call.sent, 3),
            silent=round(max(0.0, now - call.last_byte), 3),
            bytes=call.bytes,
            others_silent=None if others is None else round(max(0.0, now - others), 3),
            report=report,
        )

    # ---- replicas

    def _report(self, replica: Replica, now: float) -> "asyncio.Task[ReplicaReport]":
        """Return the task that examines the replica: a running one, a recent one that found it hung, or a new
        one."""
        task = self._reports.get(replica.name)
        found_at, _ = self._hung_reports.get(replica.name, (now, None))
        if not replica.hung or now - found_at > REUSE_SECONDS:
            self._hung_reports.pop(replica.name, None)
        elif task is not None and replica.name in self._hung_reports:
            return task
        if task is None or task.done():
            task = asyncio.get_running_loop().create_task(self.report(replica), context=detached_context())
            self._reports[replica.name] = task
        return task

    async def report(self, replica: Replica) -> ReplicaReport:
        """Examine a replica: query its health and its metrics and, if these are inconclusive, request one
        token."""
        older = replica.calls_older_than(RECENT_SECONDS)
        loop = asyncio.get_running_loop()
        health, paused, first = await asyncio.gather(
            self._health(replica), self._is_paused(replica), self._load(replica)
        )
        if health != "ok" or paused:
            return ReplicaReport(health=health, load=first, paused=paused)
        if first is None:
            return ReplicaReport(health=health, sample=await self._sample(replica))
        began = loop.time()
        await asyncio.sleep(METRICS_GAP_SECONDS)
        last = await self._load(replica)
        known = sum(call in replica.calls for call in older)  # those that ended meanwhile are not missing
        load = first if last is None or last.running + last.waiting < first.running + first.waiting else last
        report = ReplicaReport(
            health=health,
            load=load,
            known_calls=known,
            new_tokens=_count_new_tokens(first, last),
            new_tokens_seconds=loop.time() - began,
        )
        if report.lost or report.new_tokens:
            return report
        sample = await self._sample(replica)
        if sample not in ("answered", "refused") and (last := await self._load(replica)) is not None:
            # A slow inference engine may need many seconds for a token, or for a long prompt.
            report = msgspec.structs.replace(
                report, new_tokens=_count_new_tokens(first, last), new_tokens_seconds=loop.time() - began
            )
        return msgspec.structs.replace(report, sample=sample)

    async def _health(self, replica: Replica) -> str:
        try:
            response = await replica.exchange(self._health_path, None, seconds=HEALTH_SECONDS)
        except ExchangeError as failure:
            return f"failed ({failure.error.code})"
        return "ok" if response.status < 500 else f"failed (status {response.status})"

    async def _is_paused(self, replica: Replica) -> bool:
        """Return True if the inference engine says that it is paused or sleeps. Servers that cannot say so are
        not paused."""
        for path in self._pause_paths:
            try:
                response = await replica.exchange(path, None, seconds=HEALTH_SECONDS / 2)
                if response.status == 200 and any(
                    msgspec.json.decode(response.body, type=dict[str, bool]).values()
                ):
                    return True
            except (ExchangeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
        return False

    async def _load(self, replica: Replica) -> EngineLoad | None:
        """Return the load that the server's metrics show; None if it has no known metrics."""
        metrics = self._load_metrics
        if metrics is None:
            return None
        try:
            response = await replica.exchange("/metrics", None, seconds=HEALTH_SECONDS)
        except ExchangeError:
            return None
        if response.status != 200:
            return None
        known = (metrics,) if metrics != "all_kinds" else await asyncio.to_thread(list_load_metrics)
        return parse_engine_load(response.body, known)

    async def _sample(self, replica: Replica) -> str:
        """Request one token, and return the value for `ReplicaReport.sample`.

        An inference engine that batches requests replies soon, also while it generates long replies.
        """
        options: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
        if model := self._model():
            options["model"] = model
        deadline = asyncio.get_running_loop().time() + SAMPLE_SECONDS
        for path, prompt in (
            ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("completions", {"prompt": "Hi"}),
        ):
            left = deadline - asyncio.get_running_loop().time()
            try:
                body = msgspec.json.encode({**options, **prompt})
                response = await replica.exchange(path, body, seconds=max(0.1, left))
            except ExchangeError as failure:
                return f"failed ({failure.error.code})"
            if response.status < 300:
                return "answered"
            if response.status >= 500 and response.status not in (501, 503, 529):
                return f"failed (status {response.status})"
        return "refused"

    async def has_recovered(self, replica: Replica) -> bool:
        """Examine a replica that was found hung, and return True if it processes requests again."""
        report = await self.report(replica)
        return report.health == "ok" and (bool(report.new_tokens) or report.sample in ("answered", "refused"))


def parse_engine_load(text: bytes, kinds: Iterable[LoadMetrics]) -> EngineLoad | None:
    """Parse the Prometheus metrics of an inference engine of one of these kinds.

    Return the load, summed over data-parallel ranks, or None if the text has no metric of these kinds.
    """
    names = {name for kind in kinds for name in (kind.running, kind.waiting, *kind.tokens)}
    found: dict[str, float] = {}
    for line in text.decode("utf-8", "replace").splitlines():
        if line.startswith("#"):
            continue
        labelled, _, value = line.strip().rpartition(" ")
        name = labelled.partition("{")[0].strip()
        if name in names:
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                continue
    for kind in kinds:
        if kind.running in found:
            counts = [found[name] for name in kind.tokens if name in found]
            return EngineLoad(found[kind.running], found.get(kind.waiting, 0.0), sum(counts) if counts else None)
    return None


def _count_new_tokens(first: EngineLoad, last: EngineLoad | None) -> float | None:
    if last is None or first.tokens is None or last.tokens is None:
        return None
    return max(0.0, last.tokens - first.tokens)
