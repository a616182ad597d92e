"""What a person or a program sees of a run under way.

Promises:
- on a terminal a live picture on stderr; elsewhere plain lines, at most one every few seconds, failures named as
  they come;
- with `--json` stdout holds one JSON object a line and nothing else, whatever the environment's code prints;
- one cause that fails a thousand times is named a few times, then only counted;
- a reader of the events that goes away does not stop the run.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import click
import msgspec

from rookery.cli.stats import Stats, facts
from rookery.cli.text import duration, line, plural, quoted, rate, tell
from rookery.core import Failed, Group, Rollout

NAMED: Final = 5
"""How often one cause, or one kind of event, is named before it is only counted."""
FETCHED: Final = 2
"""How many images that are being fetched are named."""
_WARNINGS: Final = frozenset(
    (
        "runner.died",
        "runner.tainted",
        "loop.blocked",
        "task.quarantined",
        "teardown.failed",
        "sandbox.close_failed",
        "sandbox.not_isolated",
        "upstream.back",
        "upstream.no_tokens",
        "upstream.waiting",
        "template.no_tools",
        "log.warning",
        "resume.changed",
    )
)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a run sets out to do."""

    run: Path
    environment: str
    model: str
    tasks: int
    invalid: int
    k: int
    concurrency: int
    runners: int
    done: int = 0
    """Rollouts that an earlier process finished."""
    resumed: bool = False

    @property
    def total(self) -> int:
        return self.tasks * self.k


class Progress(Protocol):
    """Something that shows a run."""

    def started(self, start: Start) -> None: ...

    def rollout(self, record: Rollout) -> None: ...

    def group(self, group: Group) -> None: ...

    def event(self, kind: str, payload: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None:
        """A sentence of ours."""
        ...

    def tick(self, status: dict[str, Any]) -> None:
        """Now and then, with the engine's status."""
        ...

    def close(self) -> None:
        """Leaves the terminal as it was; may be called twice."""
        ...


class JsonLines:
    """The event stream. While it is open, what others write to stdout goes to stderr."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = os.dup(1)
        os.dup2(2, 1)
        self._gone = False

    def write(self, event: str, **fields: Any) -> None:
        if self._gone:
            return
        data = memoryview(
            msgspec.json.encode({"event": event, "ts": time.time(), **fields}, enc_hook=_plain) + b"\n"
        )
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BrokenPipeError:
            self._gone = True
            tell("the reader of the events went away; the run goes on")

    def started(self, start: Start) -> None:
        self.write(
            "started",
            run=str(start.run.resolve()),
            environment=start.environment,
            model=start.model,
            tasks=start.tasks,
            invalid=start.invalid,
            k=start.k,
            rollouts=start.total,
            done=start.done,
            resumed=start.resumed,
            concurrency=start.concurrency,
            runners=start.runners,
        )

    def rollout(self, record: Rollout) -> None:
        self.write("rollout", **facts(record))

    def group(self, group: Group) -> None:
        self.write("group", index=group.index, task=group.task.id, valid=len(group.valid), rewards=group.rewards)

    def event(self, kind: str, payload: dict[str, Any]) -> None:
        if kind.startswith("log."):
            self.write("log", level=kind.removeprefix("log."), data=payload)
        else:
            self.write("warning" if kind in _WARNINGS else "info", kind=kind, data=payload)

    def note(self, text: str) -> None:
        self.write("note", text=text)

    def tick(self, status: dict[str, Any]) -> None:
        """The stream is made of what happened, not of the time."""

    def close(self) -> None:
        """Stdout stays the events' own: the interpreter's end must not print into it either."""


def _plain(value: Any) -> str:
    return repr(value)[:1000]


class Lines:
    """What plain and live progress share: sentences about failures and events, with a bound on repetition."""

    def __init__(self, told: frozenset[str] = frozenset()) -> None:
        """`told`: kinds of event that the user has heard of already."""
        self.told = told
        self.stats = Stats()
        self.begun = time.monotonic()
        self.start: Start | None = None
        self._named: Counter[str] = Counter()

    def say(self, text: str) -> None:
        tell(text)

    def head(self, start: Start) -> str:
        where = f"{plural(start.runners, 'runner')}" if start.runners else "in this process"
        what = f"{plural(start.tasks, 'task')} x {start.k}" if start.k > 1 else plural(start.tasks, "task")
        again = f", {start.done:,} of {start.total:,} done before" if start.resumed else ""
        return (
            f"{line(start.environment, 40)} with {line(start.model, 60)}: {what}{again}, "
            f"{start.concurrency} at once, {where}"
        )

    def started(self, start: Start) -> None:
        self.start = start
        self.begun = time.monotonic()
        self.say(self.head(start))
        self.say(f"run {quoted(start.run)}")
        if start.invalid:
            rows = "row is no valid task" if start.invalid == 1 else "rows are no valid tasks"
            self.say(click.style(f"{start.invalid:,} {rows}: quarantined, the others run", fg="yellow"))

    def rollout(self, record: Rollout) -> None:
        self.stats.add(record)
        outcome = record.outcome
        if isinstance(outcome, Failed) and self._may(outcome.cause):
            self.say(
                f"{click.style('failed', fg='red')} {record.id}  {click.style(outcome.cause, bold=True)}  "
                f"{line(outcome.detail, 200)}"
            )
            self._last(outcome.cause, f"further {outcome.cause} failures are counted, not named")

    def group(self, group: Group) -> None:
        """Rollouts say it all."""

    def event(self, kind: str, payload: dict[str, Any]) -> None:
        if kind in _WARNINGS and kind != "task.quarantined" and kind not in self.told and self._may(kind):
            text = payload.get("message") or payload.get("detail") or payload.get("stack") or ""
            who = payload.get("attempt") or payload.get("runner") or ""
            text = str(text).strip().splitlines()
            said = text[-1] if kind == "loop.blocked" and text else " ".join(text)
            self.say(f"{click.style('warning', fg='yellow')} {kind}  {line(str(who), 40)}  {line(said, 200)}")
            self._last(kind, f"further {kind} warnings are in the run, not shown")

    def note(self, text: str) -> None:
        self.say(text)

    def _may(self, kind: str) -> bool:
        self._named[kind] += 1
        return self._named[kind] <= NAMED

    def _last(self, kind: str, text: str) -> None:
        if self._named[kind] == NAMED:
            self.say(click.style(text, dim=True))

    @property
    def done(self) -> int:
        return self.stats.rollouts + (self.start.done if self.start is not None else 0)

    def state(self, status: dict[str, Any]) -> list[str]:
        """The parts of a line of progress."""
        stats, seconds = self.stats, time.monotonic() - self.begun
        parts = [f"{stats.short} so far"] if stats.valid else []
        if stats.failed:
            parts.append(click.style(f"{stats.failed:,} failed", fg="red"))
        if stats.truncated:
            parts.append(f"{stats.truncated.total():,} truncated")
        if status.get("retries"):
            parts.append(f"{status['retries']:,} retried")
        parts.append(f"{status.get('in_flight', 0)} under way")
        if (waited := status.get("waiting_for_upstream")) is not None:
            parts.append(click.style(f"waiting for the model server for {duration(waited)}", fg="yellow"))
        parts += fetching(status.get("images", ()))
        if stats.rollouts:
            parts.append(f"{rate(stats.rollouts, seconds)} rollouts/s")
        if stats.sampled_tokens:
            parts.append(f"{rate(stats.sampled_tokens, seconds)} tokens/s")
        return parts


def fetching(images: Iterable[dict[str, Any]]) -> list[str]:
    """What images are being fetched, the same one once, and how far that is."""
    found: dict[str, dict[str, Any]] = {}
    for one in images:
        if one["image"] not in found or one["done"] > found[one["image"]]["done"]:
            found[one["image"]] = one
    said = []
    for name, one in list(found.items())[:FETCHED]:
        share = f" {min(1.0, one['done'] / one['total']):.0%}" if one["total"] else ""
        said.append(f"{one['step']} {line(name, 40)}{share}")
    if len(found) > FETCHED:
        said.append(f"{len(found) - FETCHED} more images")
    return said


class PlainProgress(Lines):
    """Lines for logs and pipes."""

    def __init__(self, told: frozenset[str] = frozenset()) -> None:
        super().__init__(told)
        self._next = 0.0
        self._said = -1

    def started(self, start: Start) -> None:
        super().started(start)
        self._next = self.begun + 1.0  # the first line comes early: a new user looks at an empty screen

    def tick(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.start is None or now < self._next or self.done == self._said == self.start.total:
            return
        elapsed = now - self.begun
        self._next = now + (5.0 if elapsed < 60 else 15.0 if elapsed < 600 else 60.0)
        self._said = self.done
        share = self.done / self.start.total if self.start.total else 1.0
        parts = "  ".join(self.state(status))
        self.say(f"{self.done:,}/{self.start.total:,} ({share:.0%}) after {duration(elapsed)}  {parts}")

    def close(self) -> None:
        """Nothing to put back."""


def open_progress(events: JsonLines | None, told: frozenset[str] = frozenset()) -> Progress:
    """What fits: the event stream, a live picture on a terminal, or lines."""
    if events is not None:
        return events
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        from rookery.cli.live import LiveProgress

        return LiveProgress(told)
    return PlainProgress(told)
