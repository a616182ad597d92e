"""The metrics of a run: counts records and events, reads the state of the supervisor, and serves the sum.

Runs in the supervisor's process. Runner processes report their metrics with their heartbeats. The gateway is asked
when the metrics are read. The registry belongs to the process: engines that follow each other add to it, and
engines with the same address share one page.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rookery.core import Rollout, RookeryError
from rookery.core.outcomes import Cancelled, Failed, Outcome, Truncated
from rookery.engine.supervisor import Supervisor
from rookery.telemetry import REGISTRY, MetricsServer, Snapshot, catalogue, parse_address, render
from rookery.upstreams.listeners import bind_listener


def split_outcome(outcome: Outcome) -> tuple[str, str]:
    """Return the kind of an outcome, and its reason or cause."""
    match outcome:
        case Failed(_, cause):
            return "failed", cause
        case Truncated(reason) | Cancelled(reason):
            return type(outcome).__name__.lower(), reason
    return "completed", ""


def _journal_files(path: Path) -> Iterator[Path]:
    """Return the journal's database file and its write-ahead log, as far as they exist."""
    return (file for file in (path, path.with_name(f"{path.name}-wal")) if file.exists())


def count_record(record: Rollout) -> None:
    """Count a finished rollout."""
    catalogue.ROLLOUTS.add(*split_outcome(record.outcome))
    for attempt in record.attempts:
        catalogue.ATTEMPTS.add(*split_outcome(attempt.outcome))
    if record.attempts:
        catalogue.ROLLOUT_SECONDS.observe(record.attempts[-1].ended - record.attempts[0].started)
    if record.reward is not None:
        catalogue.ROLLOUT_REWARD.observe(record.reward)
    timing = record.timing
    observe = catalogue.STAGE_SECONDS.observe
    observe(timing.queue, "queue")
    observe(timing.run, "run")
    if record.valid:
        observe(timing.score, "score")
    if timing.setup:  # most environments lack this stage
        observe(timing.setup, "setup")
    if timing.teardown:
        observe(timing.teardown, "teardown")
    for resource in ("model", "sandbox", "paused"):
        if seconds := getattr(timing, resource):
            catalogue.WAIT_SECONDS.add("pause" if resource == "paused" else resource, by=seconds)


class _MetricsPage:
    """Serves the metrics of the runs of this process at one address. Runs with the same address share it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.runs: list[RunMetrics] = []
        self._server = MetricsServer(bind_listener(*parse_address(address)), self.page)
        self._started = False
        self.url = self._server.url

    async def start(self) -> None:
        if not self._started:
            self._started = True
            await self._server.__aenter__()

    async def close_if_unused(self) -> None:
        if not self.runs:
            _pages.pop(self.address, None)
            await self._server.__aexit__()

    async def page(self) -> bytes:
        """Return the metrics of all processes of the runs in Prometheus text format."""
        return render(REGISTRY, REGISTRY.read(*[await run.read_gateway() for run in self.runs]))


_pages: dict[str, _MetricsPage] = {}
"""The pages of this process by address, without those at a free port, which no other run can name."""


def _find_page(address: str) -> _MetricsPage:
    page = _pages.get(address)
    if page is None:
        page = _MetricsPage(address)
        if parse_address(address)[1]:
            _pages[address] = page
    return page


class RunMetrics:
    """Counts what happens in a run, and serves the metrics at `address`. Open it with `start`."""

    def __init__(self, supervisor: Supervisor, environment: str, address: str) -> None:
        self._supervisor = supervisor
        run = supervisor.settings
        self._labels = run.run, environment, run.upstreams["policy"].model
        self._written = supervisor.journal.done_count
        self._page = _find_page(address)
        self._page.runs.append(self)
        self.url = self._page.url

    async def start(self) -> None:
        REGISTRY.collectors.append(self._collect)
        await self._page.start()

    async def close(self) -> None:
        if self._collect in REGISTRY.collectors:
            REGISTRY.collectors.remove(self._collect)
        if self in self._page.runs:
            self._page.runs.remove(self)
            await self._page.close_if_unused()

    async def read_gateway(self) -> Snapshot:
        """Return the metrics of the run's gateway; nothing if it has none or if the gateway does not answer."""
        gateway = self._supervisor.gateway
        try:
            return await gateway.read_metrics() if gateway is not None else {}
        except RookeryError:
            catalogue.EVENTS.add("metrics.gateway_failed")  # the rest of the page is still of use
            return {}

    def on_event(self, kind: str, payload: dict[str, Any]) -> None:
        catalogue.EVENTS.add(kind)
        if kind == "runner.died":
            catalogue.RUNNER_DEATHS.add(str(payload["death"]))

    def _collect(self) -> None:
        supervisor = self._supervisor
        pool, journal = supervisor.pool, supervisor.journal
        catalogue.RUN_INFO.set(1, *self._labels)
        catalogue.IN_FLIGHT.set(pool.running)
        catalogue.PAUSED.set(pool.paused)
        catalogue.LOOP_DELAY.set(pool.late, "supervisor")
        catalogue.OUTAGE.set(supervisor.outage.waited or 0.0)
        catalogue.POLICY_VERSION.set(pool.pauses.policy_version or 0)
        for runner in pool.runners:
            state = "retiring" if runner.retiring else "ready" if runner.ready else "starting"
            catalogue.RUNNERS.set(1, state)
        for channel in supervisor.channels:
            catalogue.GROUPS_READY.set(len(channel.ready), channel.name.partition("#")[0])
        catalogue.JOURNAL_BACKLOG.set(journal.backlog)
        catalogue.JOURNAL_BYTES.set(sum(file.stat().st_size for file in _journal_files(journal.path)))
        done = journal.done_count
        catalogue.JOURNAL_WRITES.add(by=done - self._written)
        self._written = done
