"""Show the progress of a run: as JSON events, as plain lines, or as a live display.

Guarantees:
- on a terminal there is a live display on stderr; elsewhere, lines are printed every few seconds, and failures as
  they happen;
- with `--json` stdout holds one JSON object per line and nothing else, even if the environment prints something;
- failures with the same cause are printed a few times, then only counted;
- the run continues if the reader of the JSON events closes its pipe.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import click
import msgspec

from rookery.cli.terminal import format_duration, format_rate, one_line, plural, shell_quote, write_line
from rookery.core import Failed, Group, Rollout, RookeryError
from rookery.view.stats import Stats, summarize_rollout

MAX_REPEATS: Final = 5
"""Maximum number of times that failures with the same cause, or events of the same kind, are printed."""
MAX_IMAGES_SHOWN: Final = 2
"""Maximum number of image downloads that the progress line shows."""
_WARNINGS: Final = frozenset(
    (
        "environment.stopped",
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


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run that are shown at its start."""

    run: Path
    environment: str
    model: str
    tasks: int
    invalid: int
    k: int
    concurrency: int
    runners: int
    done: int = 0
    """Number of rollouts that an earlier process of the run finished."""
    resumed: bool = False

    @property
    def total(self) -> int:
        return self.tasks * self.k


class ProgressDisplay(Protocol):
    """Receives what happens in a run and shows it. Implemented by the JSON events and the text displays."""

    def started(self, start: RunStart) -> None: ...

    def rollout(self, record: Rollout) -> None: ...

    def group(self, group: Group) -> None: ...

    def event(self, kind: str, payload: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None:
        """Print a message."""
        ...

    def tick(self, status: dict[str, Any]) -> None:
        """Update the display with the engine's status. Called periodically."""
        ...

    def close(self) -> None:
        """End the display and restore the terminal. Can be called more than once."""
        ...


class JsonLines:
    """Writes events to stdout as JSON lines. Other output of this process to stdout is redirected to stderr."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = os.dup(1)
        os.dup2(2, 1)
        self._reader_closed = False

    def write(self, event: str, **fields: Any) -> None:
        if self._reader_closed:
            return
        data = memoryview(
            msgspec.json.encode({"event": event, "ts": time.time(), **fields}, enc_hook=_encode_unknown) + b"\n"
        )
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BrokenPipeError:
            self._reader_closed = True
            write_line("the reader of the events closed its pipe; the run continues")

    def started(self, start: RunStart) -> None:
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
        self.write("rollout", **summarize_rollout(record))

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
        """Do nothing, because there are no periodic JSON events."""

    def close(self) -> None:
        """Do nothing, because stdout stays redirected until the process ends."""


@contextmanager
def json_events(wanted: bool) -> Iterator[JsonLines | None]:
    """Yield the writer of JSON events if `wanted`, else None. A `RookeryError` in the block becomes an event."""
    events = JsonLines() if wanted else None
    try:
        yield events
    except RookeryError as error:
        if events is not None:
            events.write("error", detail=str(error), exit_code=2)
        raise


def _encode_unknown(value: Any) -> str:
    return repr(value)[:1000]


class TextProgress:
    """Base class of the plain and the live display. Prints failures and warnings, each kind a few times."""

    def __init__(self, muted: frozenset[str] = frozenset()) -> None:
        """Print events except those of the kinds in `muted`, about which the user has been informed."""
        self.muted = muted
        self.stats = Stats()
        self.start_time = time.monotonic()
        self.start: RunStart | None = None
        self._named: Counter[str] = Counter()

    def say(self, text: str) -> None:
        write_line(text)

    def describe_start(self, start: RunStart) -> str:
        where = f"{plural(start.runners, 'runner')}" if start.runners else "in this process"
        what = f"{plural(start.tasks, 'task')} x {start.k}" if start.k > 1 else plural(start.tasks, "task")
        again = f", {start.done:,} of {start.total:,} done before" if start.resumed else ""
        return (
            f"{one_line(start.environment, 40)} with {one_line(start.model, 60)}: {what}{again}, "
            f"{start.concurrency} at once, {where}"
        )

    def started(self, start: RunStart) -> None:
        self.start = start
        self.start_time = time.monotonic()
        self.say(self.describe_start(start))
        self.say(f"run {shell_quote(start.run)}")
        if start.invalid:
            rows = "row is not a valid task" if start.invalid == 1 else "rows are not valid tasks"
            self.say(click.style(f"{start.invalid:,} {rows}: quarantined, the others run", fg="yellow"))

    def rollout(self, record: Rollout) -> None:
        self.stats.add(record)
        outcome = record.outcome
        if isinstance(outcome, Failed) and self._count_repeat(outcome.cause):
            self.say(
                f"{click.style('failed', fg='red')} {record.id}  {click.style(outcome.cause, bold=True)}  "
                f"{one_line(outcome.detail, 200)}"
            )
            self._announce_limit(outcome.cause, f"further {outcome.cause} failures are counted but not printed")

    def group(self, group: Group) -> None:
        """Do nothing, because rollouts are shown one by one."""

    def event(self, kind: str, payload: dict[str, Any]) -> None:
        if (
            kind in _WARNINGS
            and kind != "task.quarantined"
            and kind not in self.muted
            and self._count_repeat(kind)
        ):
            text = payload.get("message") or payload.get("detail") or payload.get("stack") or ""
            subject = one_line(str(payload.get("attempt") or payload.get("runner") or ""), 40)
            text = str(text).strip().splitlines()
            shown = text[-1] if kind == "loop.blocked" and text else " ".join(text)
            self.say(f"{click.style('warning', fg='yellow')} {kind}  {subject}  {one_line(shown, 200)}")
            self._announce_limit(kind, f"further {kind} warnings are recorded but not printed")

    def note(self, text: str) -> None:
        self.say(text)

    def _count_repeat(self, kind: str) -> bool:
        self._named[kind] += 1
        return self._named[kind] <= MAX_REPEATS

    def _announce_limit(self, kind: str, text: str) -> None:
        if self._named[kind] == MAX_REPEATS:
            self.say(click.style(text, dim=True))

    @property
    def done(self) -> int:
        return self.stats.rollouts + (self.start.done if self.start is not None else 0)

    def state(self, status: dict[str, Any]) -> list[str]:
        """Return the parts of a progress line, such as rates and counts. `status` is that of `Engine.status`."""
        stats, seconds = self.stats, time.monotonic() - self.start_time
        parts = [f"{stats.short} so far"] if stats.valid else []
        if stats.failed:
            parts.append(click.style(f"{stats.failed:,} failed", fg="red"))
        if stats.truncated:
            parts.append(f"{stats.truncated.total():,} truncated")
        if status.get("retries"):
            parts.append(f"{status['retries']:,} retried")
        parts.append(f"{status.get('in_flight', 0)} running")
        if (waited := status.get("waiting_for_upstream")) is not None:
            parts.append(
                click.style(f"waiting for the inference engine for {format_duration(waited)}", fg="yellow")
            )
        parts += describe_image_pulls(status.get("images", ()))
        if stats.rollouts:
            parts.append(f"{format_rate(stats.rollouts, seconds)} rollouts/s")
        if stats.sampled_tokens:
            parts.append(f"{format_rate(stats.sampled_tokens, seconds)} tokens/s")
        return parts


def describe_image_pulls(images: Iterable[dict[str, Any]]) -> list[str]:
    """Return texts about the images that are being downloaded, each image once, with its progress."""
    found: dict[str, dict[str, Any]] = {}
    for one in images:
        if one["image"] not in found or one["done"] > found[one["image"]]["done"]:
            found[one["image"]] = one
    parts = []
    for name, one in list(found.items())[:MAX_IMAGES_SHOWN]:
        share = f" {min(1.0, one['done'] / one['total']):.0%}" if one["total"] else ""
        parts.append(f"{one['step']} {one_line(name, 40)}{share}")
    if len(found) > MAX_IMAGES_SHOWN:
        parts.append(f"{len(found) - MAX_IMAGES_SHOWN} more images")
    return parts


class PlainProgress(TextProgress):
    """Prints progress as plain lines, for log files and pipes."""

    def __init__(self, muted: frozenset[str] = frozenset()) -> None:
        super().__init__(muted)
        self._next = 0.0
        self._last_done = -1

    def started(self, start: RunStart) -> None:
        super().started(start)
        self._next = self.start_time + 1.0  # print the first line early

    def tick(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.start is None or now < self._next or self.done == self._last_done == self.start.total:
            return
        elapsed = now - self.start_time
        self._next = now + (5.0 if elapsed < 60 else 15.0 if elapsed < 600 else 60.0)
        self._last_done = self.done
        share = self.done / self.start.total if self.start.total else 1.0
        parts = "  ".join(self.state(status))
        self.say(f"{self.done:,}/{self.start.total:,} ({share:.0%}) after {format_duration(elapsed)}  {parts}")

    def close(self) -> None:
        """Do nothing, because plain lines do not change the state of the terminal."""


def open_progress(events: JsonLines | None, muted: frozenset[str] = frozenset()) -> ProgressDisplay:
    """Return `events` if it is set, else a live display on a terminal, else a display of plain lines.

    The text displays do not print events of the kinds in `muted`.
    """
    if events is not None:
        return events
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        from rookery.cli.live_progress import LiveProgress

        return LiveProgress(muted)
    return PlainProgress(muted)
