"""The supervisor: admits, dispatches, judges, records. It runs no user code and sees no token bytes.

Promises:
- nothing one rollout does cancels another;
- cancelling reaches sandbox, grader and upstream;
- failures above a rate stop admission with a clear message instead of burning the run;
- concurrency is bounded, over all runners together;
- a bug of our own stops the run and says so: it never leaves consumers waiting.
"""

import asyncio
import logging
import random
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

from rookery.core import (
    DEFAULT_LIMITS,
    SCORED,
    Attempt,
    Cancelled,
    CancelledReason,
    Failed,
    JournalError,
    Rollout,
    RookeryError,
    Timing,
    UsageError,
    derive_seed,
)
from rookery.core.errors import MAX_DETAIL
from rookery.engine import wire
from rookery.engine.breaker import Breaker
from rookery.engine.channel import Channel
from rookery.engine.conviction import Court, Death
from rookery.engine.doors import RunGateway
from rookery.engine.fleet import TICK, Fleet, Stopped
from rookery.engine.flights import Flight, Policy, loudly
from rookery.engine.keeping import Kept
from rookery.engine.ledger import Ledger
from rookery.engine.links import Link
from rookery.engine.outage import OutageWatch
from rookery.engine.retry import Again, Ended, Final, hung_replicas
from rookery.engine.schedule import OpenGroup, Pick
from rookery.engine.telling import Telling
from rookery.engine.wire import Done, RunSettings, Start
from rookery.environments import Environment
from rookery.journal import Journal
from rookery.sandboxes import reap

log = logging.getLogger("rookery.engine")


class Supervisor:
    """Owns the links, the channels and the journal's writing end."""

    def __init__(self, settings: RunSettings, environment: Environment, journal: Journal, policy: Policy) -> None:
        self.settings = settings
        self.journal = journal
        self.policy = policy
        self.breaker = Breaker(policy.breaker, concurrency=policy.concurrency)
        self.court = Court()
        self.channels: deque[Channel] = deque()
        self.next_group = 0
        self.ledger = Ledger(journal, self.stop)
        self.stopped: RookeryError | None = None
        self.no_tokens = ""
        """Why turns have no token IDs, once a runner has reported it."""
        self.counts = {"attempts": 0, "retries": 0}
        self.gateway = RunGateway(settings) if environment.needs_gateway else None
        self.fleet = Fleet(
            self,
            settings,
            environment,
            runners=policy.runners,
            capacity=-(-policy.concurrency // max(1, policy.runners)),
            block_limit=policy.block_limit,
            gateway=self.gateway,
        )
        self.kept = Kept(settings)
        self.telling = Telling(self.fleet, settings.warm)
        self.outage = OutageWatch(
            settings.upstreams,
            policy.wait_for_upstream,
            waiting=self._on_outage,
            back=self._on_upstream_back,
            expired=self._on_outage_expired,
        )
        self._loop = asyncio.get_running_loop()
        self._pumping = False
        self._stopping = False
        self._random = random.Random(policy.seed)  # noqa: S311

    # ---- life

    async def start(self) -> None:
        """Returns when a runner is ready; an environment that cannot be loaded is a `UsageError`."""
        self.journal.on_commit(self._on_commit)
        await asyncio.to_thread(self._reap)
        keeping = self._loop.create_task(self.kept.open())
        try:
            if self.gateway is not None:
                await self.gateway.open()
            await self.fleet.start()
        finally:
            if said := await keeping:
                self.event("keeper.failed", {"detail": said})
        if self.stopped is not None:
            raise self.stopped

    async def close(self) -> None:
        """Ends every attempt without a terminal record (a resume runs them again), then every runner."""
        self._stopping = True
        self.outage.close()
        await self.fleet.close()
        if self.gateway is not None:
            await self.gateway.close()
        await self.kept.close()
        await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        """What runners of this run left behind when they were killed. Called while none of them lives."""
        folder = Path(self.settings.folder) / "sandboxes"
        if folder.exists():
            reap(folder, now=time.time())
            if not list(folder.glob("leases/*.json")):
                shutil.rmtree(folder, ignore_errors=True)  # a kill can leave half a lease

    @property
    def closing(self) -> bool:
        return self._stopping

    def stop(self, error: RookeryError) -> None:
        """Admits nothing more and tells every consumer why. What is under way is cancelled, not recorded."""
        if self.stopped is not None or self._stopping:
            return
        self.stopped = error
        self.event("stopped", {"detail": str(error)})
        for link in self.fleet.links:
            for attempt in link.running:
                link.send(wire.Cancel(attempt, "shutdown"))
        for channel in self.channels:
            channel.fail(error)
        self.telling.tell(())
        self.fleet.wake()

    def event(self, kind: str, payload: dict[str, Any]) -> None:
        self.ledger.event(kind, payload)
        if kind == wire.NO_TOKENS:
            self.no_tokens = payload["detail"]
            log.warning("%s", self.no_tokens)
            for channel in self.channels:
                channel.changed()

    def refuse_without_tokens(self, channel: Channel) -> None:
        """Raise if the consumer of a stream needs token IDs and the policy's server returns none."""
        if channel.needs_tokens and self.no_tokens:
            raise UsageError(f"training needs token IDs: {self.no_tokens}")

    # ---- streams

    def open_channel(self, channel: Channel) -> None:
        if self.stopped is not None:
            raise self.stopped
        self.refuse_without_tokens(channel)
        self.channels.append(channel)
        self.ledger.committed([channel])
        self.pump()

    def close_channel(self, channel: Channel, reason: CancelledReason) -> None:
        """The consumer wants no more: what is under way is cancelled, each with its terminal record."""
        if channel.closed:
            return
        channel.close()
        if not self._stopping and self.stopped is None:
            self._cancel_groups(channel, channel.schedule.cancel(), reason)
        self._forget(channel)

    def taken(self, channel: Channel, index: int) -> None:
        """The consumer took a group."""
        self.ledger.taken(channel, index)
        self.pump()

    def _forget(self, channel: Channel) -> None:
        if channel.in_flight == 0 and channel.done and channel in self.channels:
            self.channels.remove(channel)

    def _cancel_groups(self, channel: Channel, groups: list[OpenGroup], reason: CancelledReason) -> None:
        for group in groups:
            group.cancelled = reason
        flying: set[str] = set()
        for link in self.fleet.links:
            for attempt, flight in link.running.items():
                if flight.channel is channel and flight.pick.group in groups:
                    flying.add(flight.pick.group.rollout_id(flight.pick.member))
                    link.send(wire.Cancel(attempt, reason))
        for group in groups:
            for number, member in enumerate(group.members):
                if member.record is None and group.rollout_id(number) not in flying:
                    self._record(channel, Pick(group, number), Ledger.bare(group, number, Cancelled(reason)))

    # ---- admission

    def pump(self) -> None:
        """Something changed: admits what it can, once per tick of the loop."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._admit)

    @loudly
    def _admit(self) -> None:
        self._pumping = False
        if self.fleet.paused or self._stopping or self.stopped is not None or self.outage.waited is not None:
            return
        now = self._loop.time()
        self._admit_suspects()
        flying = self.fleet.under_way
        while flying < self.policy.concurrency and self.journal.backlog < 5_000:
            link = self.fleet.free()
            found = self._next(now) if link is not None else None
            if link is None or found is None:
                break
            channel, pick = found
            flying += self._launch(self.telling.expecting(pick.group.task.id) or link, channel, pick, now)
        self.telling.tell(self.channels, self.ledger.quarantined)
        for channel in list(self.channels):
            if channel.done:
                channel.changed()
                self._forget(channel)

    def _next(self, now: float) -> tuple[Channel, Pick] | None:
        """Streams take turns; within one, members of open groups go first."""
        for _ in range(len(self.channels)):
            channel = self.channels[0]
            self.channels.rotate(-1)
            pick = channel.schedule.pick(now)
            while pick is None and channel.error is None and channel.schedule.may_open():
                if not self._open_group(channel, now):
                    break
                pick = channel.schedule.pick(now)
            if pick is not None:
                return channel, pick
        return None

    def _open_group(self, channel: Channel, now: float) -> bool:
        sourced = channel.next_task()
        if sourced is None:
            return False
        index = sourced.index
        if index is None:
            index, self.next_group = self.next_group, self.next_group + 1
            self.ledger.opened(channel, index, sourced)
        group = channel.schedule.open(index, sourced.task, now, sourced.finished)
        group.number, group.ordinal = sourced.number, sourced.ordinal
        group.stream = sourced.stream or channel.name
        channel.untaken[index] = sourced
        for number, used in sourced.attempts.items():
            group.members[number].earlier = used
        if sourced.task.invalid:
            broken = Failed("task", "task.invalid", sourced.task.invalid, "queue")
            self.ledger.quarantined.setdefault(sourced.task.id, broken)
        if group.left == 0:
            self._complete(channel, group)
        return True

    def _launch(self, link: Link, channel: Channel, pick: Pick, now: float) -> int:
        group, member = pick.group, pick.group.members[pick.member]
        broken = self.ledger.quarantined.get(group.task.id)
        if broken is not None:
            self._record(channel, pick, Ledger.bare(group, pick.member, broken))
            return 0
        number = member.next_attempt
        attempt = f"{group.index}.{pick.member}.{number}"
        seed = self.seed_of(group, pick.member)
        link.running[attempt] = Flight(channel, pick, attempt, number, seed)
        channel.in_flight += 1
        self.counts["attempts"] += 1
        avoid = hung_replicas(member.attempts)
        link.send(Start(attempt, number, seed, group.task, now - member.since, avoid))
        return 1

    def seed_of(self, group: OpenGroup, member: int) -> int:
        """The same for every attempt of a rollout, in this run and in one resumed from it."""
        return derive_seed(self.policy.seed, group.stream, group.ordinal, member)

    def _admit_suspects(self) -> None:
        """One suspect per runner: on runners that are empty, and on spare ones made for it."""
        waiting = sum(channel.schedule.suspects for channel in self.channels)
        for link in self.fleet.empty() if waiting else ():
            for channel in self.channels:
                pick = channel.schedule.pick_suspect()
                if pick is not None:
                    link.alone = True
                    self._launch(link, channel, pick, self._loop.time())
                    waiting -= 1
                    break
        self.fleet.need_spares(waiting)

    @loudly
    def on_tick(self, late: float) -> None:
        """Once a second: who has waited too long for a runner."""
        limit = self.settings.limits.queue or DEFAULT_LIMITS.queue
        assert limit is not None
        now = self._loop.time()
        for channel in self.channels:
            # Waiting one's turn behind others of the run is no failure; finding no runner for a free place is.
            paused = self.fleet.paused or self.outage.waited is not None
            full = self.fleet.under_way >= self.policy.concurrency
            lone = any(link.alone for link in self.fleet.links)
            channel.schedule.not_counting(TICK + late, shared=paused or full, alone=paused or lone)
            for pick in channel.schedule.overdue(now, limit):
                self._overdue(channel, pick, limit)
        self.pump()

    def _overdue(self, channel: Channel, pick: Pick, limit: float) -> None:
        member = pick.group.members[pick.member]
        detail = f"no runner was free for {limit:g} seconds"
        name = f"{pick.group.rollout_id(pick.member)}.{member.next_attempt}"
        flight = Flight(channel, pick, name, member.next_attempt, self.seed_of(pick.group, pick.member))
        outcome = Failed("infra", "engine.queue", detail, "queue")
        now = time.time()
        done = Done(flight.attempt, outcome, now, now, timing=Timing(queue=limit))
        self._ended(flight, Ended(outcome), done, "")

    # ---- what runners say

    @loudly
    def on_done(self, link: Link, done: Done) -> None:
        flight: Flight | None = link.running.pop(done.attempt, None)
        if flight is None:
            return  # of a past attempt: never committed
        link.alone = False
        flight.channel.in_flight -= 1
        if done.tainted:
            self.fleet.replace(link)
        flight.channel.changed()
        if isinstance(done.outcome, Cancelled) and done.outcome.reason == "shutdown":
            return  # unfinished: a resume runs it again
        if self.journal.error is not None:
            return
        if self.outage.concerns(done.outcome):
            runner = link.name
            self.outage.decide_later(
                done.outcome, lambda gone: self._settle(flight, done, runner, charged=not gone)
            )
        else:
            self._settle(flight, done, link.name, charged=True)

    @loudly
    def _settle(self, flight: Flight, done: Done, runner: str, *, charged: bool) -> None:
        """Record an attempt that ended. One that is not charged failed because a model server is gone."""
        member = flight.pick.group.members[flight.pick.member]
        if self._stopping or self.stopped is not None or member.record is not None:  # cancelled meanwhile
            return
        if charged:
            self.breaker.observe(done.outcome, self.fleet.under_way)
        ended = Ended(done.outcome, charged=charged, policy_loss=done.policy_loss)
        self._ended(flight, ended, done, runner)
        if self.breaker.opened:
            self.stop(Stopped(self.breaker.opened))
        self.pump()

    # ---- model servers that went away

    @loudly
    def _on_outage(self, trouble: str) -> None:
        limit = self.policy.wait_for_upstream
        said = f"waiting up to {limit:g} s for the model server: {trouble}"
        self.event("upstream.waiting", {"detail": said, "seconds": limit})

    @loudly
    def _on_upstream_back(self, waited: float) -> None:
        said = f"the model server is back after {waited:.3g} s; the run goes on"
        self.event("upstream.back", {"detail": said, "seconds": waited})
        self.pump()

    @loudly
    def _on_outage_expired(self, trouble: str) -> None:
        limit = self.policy.wait_for_upstream
        self.stop(
            Stopped(
                f"stopped: the model server did not come back within {limit:g} seconds: {trouble} "
                "Then `rookery resume` this run."
            )
        )

    # ---- runners that died

    @loudly
    def on_runner_death(self, link: Link, death: Death, detail: str) -> None:
        """Neighbours run again uncharged, suspects alone, the convicted not at all."""
        flights = {flight.pick.group.rollout_id(flight.pick.member): flight for flight in link.running.values()}
        link.running.clear()
        blamed = link.blamed.rpartition(".")[0] if link.blamed else None
        verdicts = self.court.judge(list(flights), death, alone=link.alone, named=blamed)
        now = time.time()
        for rollout, flight in flights.items():
            flight.channel.in_flight -= 1
            if self._stopping or self.stopped is not None:
                continue
            verdict = verdicts[rollout]
            if verdict == "convicted":
                cause = "bug.blocked" if death == "blocked" else "bug.crashed"
                outcome = Failed("bug", cause, f"run alone, it did this: {detail}"[:MAX_DETAIL], "run", detail)
                self.breaker.observe(outcome, self.fleet.under_way)
            else:
                outcome = Failed("infra", "runner.lost", detail.partition("\n")[0], "run")
            ended = Ended(outcome, charged=verdict == "convicted")
            done = Done(flight.attempt, outcome, now, now)
            self._ended(flight, ended, done, link.name, alone=verdict == "suspect")
        if self.breaker.opened:
            self.stop(Stopped(self.breaker.opened))
        self.pump()

    def _ended(self, flight: Flight, ended: Ended, done: Done, runner: str, *, alone: bool = False) -> None:
        channel, pick = flight.channel, flight.pick
        member = pick.group.members[pick.member]
        attempt = Attempt(
            id=flight.attempt,
            number=flight.number,
            outcome=ended.outcome,
            runner=runner,
            started=done.started,
            ended=done.ended,
            evidence=done.evidence,
        )
        member.history.append(ended)
        member.attempts.append(attempt)
        decision = self.policy.retry.decide(member.history, self._random.random())
        if isinstance(decision, Again):
            self.counts["retries"] += ended.charged
            rollout = pick.group.rollout_id(pick.member)
            self.ledger.write(lambda: self.journal.add_attempt(rollout, attempt))
            if pick.group.cancelled is None:
                channel.schedule.again(pick, self._loop.time(), decision.delay, alone=alone)
                if decision.delay:
                    self._loop.call_later(decision.delay, self.pump)
                return
            decision = Final(Cancelled(pick.group.cancelled))
        outcome = decision.outcome
        scored = isinstance(outcome, SCORED)
        if isinstance(outcome, Failed) and outcome.fault == "task":
            self.ledger.quarantine(pick.group, outcome)
        record = Rollout(
            id=pick.group.rollout_id(pick.member),
            group=pick.group.index,
            member=pick.member,
            task=pick.group.task.id,
            outcome=outcome,
            seed=flight.seed,
            reward=done.minimum if decision.minimum else (done.reward if scored else None),
            rewards=done.rewards,
            metrics=done.metrics,
            info=done.info,
            attempts=tuple(member.attempts),
            usage=done.usage,
            timing=done.timing,
            tokens=done.tokens,
        )
        self._record(channel, pick, record)

    # ---- records and groups

    def _record(self, channel: Channel, pick: Pick, record: Rollout) -> None:
        self.court.forget(record.id)
        if self.ledger.record(channel, pick, record):
            self._complete(channel, pick.group)

    def _complete(self, channel: Channel, group: OpenGroup) -> None:
        surplus = self.ledger.complete(channel, group)
        if surplus:
            self._cancel_groups(channel, surplus, "filtered")
        self._forget(channel)

    @loudly
    def _on_commit(self, error: JournalError | None) -> None:
        if error is not None:
            self.stop(error)
            return
        self.ledger.committed(self.channels)
        self.pump()
