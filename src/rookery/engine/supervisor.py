"""The supervisor: admits, dispatches, judges, records. It runs no user code and sees no token bytes.

Promises:
- every admitted rollout gets exactly one terminal record;
- nothing one rollout does cancels another;
- a group always returns k records, in order, of one shape;
- cancelling reaches sandbox, grader and upstream;
- failures above a rate stop admission with a clear message instead of burning the run;
- a group is handed out only after its records are committed;
- concurrency is bounded, over all runners together.
"""

import asyncio
import random
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import (
    DEFAULT_LIMITS,
    Attempt,
    Cancelled,
    CancelledReason,
    Completed,
    Failed,
    JournalError,
    Outcome,
    Rollout,
    RookeryError,
    Truncated,
    derive_seed,
)
from rookery.core.errors import MAX_DETAIL
from rookery.engine import wire
from rookery.engine.breaker import Breaker
from rookery.engine.channel import Channel
from rookery.engine.conviction import Court, Death
from rookery.engine.fleet import TICK, Fleet, Stopped
from rookery.engine.links import Link
from rookery.engine.retry import Again, Ended, RetryPolicy
from rookery.engine.schedule import OpenGroup, Pick
from rookery.engine.wire import Done, RunSettings, Start
from rookery.environments import Environment
from rookery.journal import Journal
from rookery.sandboxes import reap


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine treats rollouts: numbers only."""

    runners: int
    concurrency: int
    seed: int = 0
    retry: RetryPolicy = RetryPolicy()
    breaker: float | None = 0.5
    block_limit: float = 30.0


class Flight(msgspec.Struct, eq=False):
    """One attempt that a runner has."""

    channel: Channel
    pick: Pick
    attempt: str
    number: int
    queued: float
    seed: int = 0


class Supervisor:
    """Owns the links, the channels and the journal's writing end."""

    def __init__(self, settings: RunSettings, environment: Environment, journal: Journal, policy: Policy) -> None:
        self.settings = settings
        self.environment = environment
        self.journal = journal
        self.policy = policy
        self.breaker = Breaker(policy.breaker, concurrency=policy.concurrency)
        self.court = Court()
        self.channels: deque[Channel] = deque()
        self.next_group = 0
        self.quarantined: dict[str, Failed] = {}
        self.on_record: Callable[[Rollout], None] | None = None
        self.on_event: Callable[[str, dict[str, Any]], None] | None = None
        self.stopped: RookeryError | None = None
        self.counts = {"attempts": 0, "retries": 0}
        self.fleet = Fleet(
            self,
            settings,
            environment,
            runners=policy.runners,
            capacity=-(-policy.concurrency // max(1, policy.runners)),
            block_limit=policy.block_limit,
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
        await self.fleet.start()
        if self.stopped is not None:
            raise self.stopped

    async def close(self) -> None:
        """Ends every attempt without a terminal record (a resume runs them again), then every runner."""
        self._stopping = True
        await self.fleet.close()
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
        self.fleet.wake()

    def event(self, kind: str, payload: dict[str, Any]) -> None:
        self._write(lambda: self.journal.event(kind, payload))
        if self.on_event is not None:
            self.on_event(kind, payload)

    # ---- streams

    def open_channel(self, channel: Channel) -> None:
        if self.stopped is not None:
            raise self.stopped
        self.channels.append(channel)
        self.pump()

    def close_channel(self, channel: Channel, reason: CancelledReason) -> None:
        """The consumer wants no more: what is under way is cancelled, each with its terminal record."""
        if channel.closed:
            return
        channel.closed = True
        channel.queue.clear()
        channel.pending.clear()
        if not self._stopping and self.stopped is None:
            schedule = channel.schedule
            schedule.exhausted = True
            groups = list(schedule.groups.values())
            schedule.want = schedule.want or max(1, schedule.handed)
            schedule.handed = max(schedule.handed, schedule.want)
            schedule.surplus()
            self._cancel_groups(channel, groups, reason)
        self._forget(channel)

    def taken(self, channel: Channel, index: int) -> None:
        """The consumer took a group."""
        channel.schedule.taken()
        channel.taken += 1
        channel.ordinals.pop(index, None)
        self._write(lambda: self.journal.set_group(index, "consumed"))
        self.pump()

    def _forget(self, channel: Channel) -> None:
        if channel.in_flight == 0 and (channel.closed or channel.schedule.done) and channel in self.channels:
            self.channels.remove(channel)

    def _cancel_groups(self, channel: Channel, groups: list[OpenGroup], reason: CancelledReason) -> None:
        flying: set[str] = set()
        for link in self.fleet.links:
            for attempt, flight in link.running.items():
                if flight.channel is channel and flight.pick.group in groups:
                    flying.add(flight.pick.group.rollout_id(flight.pick.member))
                    link.send(wire.Cancel(attempt, reason))
        for group in groups:
            for number, member in enumerate(group.members):
                if member.record is None and group.rollout_id(number) not in flying:
                    self._record(channel, Pick(group, number), self._bare(group, number, Cancelled(reason)))

    # ---- admission

    def pump(self) -> None:
        """Something changed: admits what it can, once per tick of the loop."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        self._pumping = False
        if self.fleet.paused or self._stopping or self.stopped is not None:
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
            flying += self._launch(link, channel, pick, now)
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
            k = channel.schedule.k
            self._write(
                lambda: self.journal.add_group(
                    index, stream=channel.name, position=sourced.ordinal, task=sourced.number, k=k
                )
            )
        group = channel.schedule.open(index, sourced.task, now, sourced.finished)
        group.number, group.ordinal = sourced.number, sourced.ordinal
        channel.ordinals[index] = sourced.ordinal
        if sourced.task.invalid:
            self.quarantined.setdefault(
                sourced.task.id, Failed("task", "task.invalid", sourced.task.invalid, "queue")
            )
        if group.left == 0:
            self._complete(channel, group)
        return True

    def _launch(self, link: Link, channel: Channel, pick: Pick, now: float) -> int:
        group, member = pick.group, pick.group.members[pick.member]
        broken = self.quarantined.get(group.task.id)
        if broken is not None:
            self._record(channel, pick, self._bare(group, pick.member, broken))
            return 0
        number = len(member.history) + 1
        attempt = f"{group.index}.{pick.member}.{number}"
        seed = self.seed_of(channel, group, pick.member)
        link.running[attempt] = Flight(channel, pick, attempt, number, now - member.since, seed)
        channel.in_flight += 1
        self.counts["attempts"] += 1
        link.send(Start(attempt, number, seed, group.task))
        return 1

    def seed_of(self, channel: Channel, group: OpenGroup, member: int) -> int:
        """The same for every attempt of a rollout, in this run and in one resumed from it."""
        return derive_seed(self.policy.seed, channel.name, group.ordinal, member)

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

    def on_tick(self, late: float) -> None:
        """Once a second: who has waited too long for a runner."""
        limit = self.settings.limits.queue or DEFAULT_LIMITS.queue
        assert limit is not None
        now = self._loop.time()
        for channel in self.channels:
            if self.fleet.paused:
                channel.schedule.not_counting(TICK + late)
            for pick in channel.schedule.overdue(now, limit):
                self._overdue(channel, pick, limit)
        self.pump()

    def _overdue(self, channel: Channel, pick: Pick, limit: float) -> None:
        member = pick.group.members[pick.member]
        detail = f"no runner was free for {limit:g} seconds"
        number = len(member.history) + 1
        flight = Flight(
            channel, pick, f"{pick.group.index}.{pick.member}.{number}", number, self._loop.time() - member.since
        )
        outcome = Failed("infra", "engine.queue", detail, "queue")
        now = time.time()
        self._ended(flight, Ended(outcome), Done(flight.attempt, outcome, now, now), "")

    # ---- what runners say

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
        self.breaker.observe(done.outcome, self.fleet.under_way)
        self._ended(flight, Ended(done.outcome, policy_loss=done.policy_loss), done, link.name)
        if self.breaker.opened:
            self.stop(Stopped(self.breaker.opened))
        self.pump()

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
        )
        member.history.append(ended)
        member.attempts.append(attempt)
        decision = self.policy.retry.decide(member.history, self._random.random())
        if isinstance(decision, Again):
            self.counts["retries"] += ended.charged
            self._write(lambda: self.journal.add_attempt(pick.group.rollout_id(pick.member), attempt))
            if pick.group.state != "surplus":
                channel.schedule.again(pick, self._loop.time(), decision.delay, alone=alone)
                if decision.delay:
                    self._loop.call_later(decision.delay, self.pump)
                return
            decision_outcome: Outcome = Cancelled("filtered")
            minimum = False
        else:
            decision_outcome, minimum = decision.outcome, decision.minimum
        scored = isinstance(decision_outcome, Completed | Truncated)
        if isinstance(decision_outcome, Failed) and decision_outcome.fault == "task":
            self._quarantine(pick.group, decision_outcome)
        record = Rollout(
            id=pick.group.rollout_id(pick.member),
            group=pick.group.index,
            member=pick.member,
            task=pick.group.task.id,
            outcome=decision_outcome,
            seed=flight.seed,
            reward=done.minimum if minimum else (done.reward if scored else None),
            rewards=done.rewards,
            metrics=done.metrics,
            info=done.info,
            attempts=tuple(member.attempts),
            usage=done.usage,
            timing=msgspec.structs.replace(done.timing, queue=flight.queued),
            tokens=done.tokens,
        )
        self._record(channel, pick, record)

    def _bare(self, group: OpenGroup, member: int, outcome: Outcome) -> Rollout:
        """The record of a rollout that ends without having run, or between two attempts."""
        return Rollout(
            id=group.rollout_id(member),
            group=group.index,
            member=member,
            task=group.task.id,
            outcome=outcome,
            attempts=tuple(group.members[member].attempts),
        )

    def _quarantine(self, group: OpenGroup, outcome: Failed) -> None:
        if group.task.id not in self.quarantined:
            self.quarantined[group.task.id] = outcome
            self._write(lambda: self.journal.quarantine(group.number, f"{outcome.cause}: {outcome.detail}"))
            self.event(
                "task.quarantined", {"task": group.task.id, "cause": outcome.cause, "detail": outcome.detail}
            )

    # ---- records and groups

    def _write(self, put: Callable[[], None]) -> None:
        try:
            put()
        except JournalError as error:
            self.stop(error)

    def _record(self, channel: Channel, pick: Pick, record: Rollout) -> None:
        """The one place where a rollout becomes terminal."""
        self.court.forget(record.id)
        self._write(lambda: self.journal.add_rollout(record))
        if self.on_record is not None:
            self.on_record(record)
        if channel.schedule.end(pick, record):
            self._complete(channel, pick.group)

    def _complete(self, channel: Channel, group: OpenGroup) -> None:
        if group.state == "surplus":
            self._write(lambda: self.journal.set_group(group.index, "surplus"))
            self._forget(channel)
            return
        kept = True
        if channel.keep is not None:
            try:
                kept = channel.keep(channel.group(group))
            except Exception as error:  # noqa: BLE001  (the consumer's own function: the consumer gets its error)
                channel.fail(error)
        if not kept:  # a group that has all its records needs no other word for being finished
            self._write(lambda: self.journal.set_group(group.index, "filtered"))
            channel.ordinals.pop(group.index, None)
        for out in channel.schedule.settle(group, kept=kept):
            channel.pending.append((self.journal.put_count, channel.group(out)))
        surplus = channel.schedule.surplus()
        if surplus:
            self._cancel_groups(channel, surplus, "filtered")
        if channel.done:
            channel.changed()

    def _on_commit(self, error: JournalError | None) -> None:
        if error is not None:
            self.stop(error)
            return
        done = self.journal.done_count
        for channel in self.channels:
            moved = False
            while channel.pending and channel.pending[0][0] <= done:
                channel.queue.append(channel.pending.popleft()[1])
                moved = True
            if moved:
                channel.changed()
        self.pump()
