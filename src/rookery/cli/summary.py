"""What a run came to, read from its journal.

Promises:
- the numbers are the journal's, not this process's memory, so `run`, `resume` and `show` say the same;
- a rate stands with its interval and what it is over: valid rollouts only;
- it ends with what to do next.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rookery.cli.stats import Stats, wilson
from rookery.cli.text import bold, dim, duration, line, plural, quoted, rate, status_word, table
from rookery.core import cause_of

if TYPE_CHECKING:
    from rookery.journal import RunReader

MAX_CAUSES = 8


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What this process added: its speed is its own, not that of the whole run."""

    seconds: float
    rollouts: int
    sampled_tokens: int


class Summary(msgspec.Struct, kw_only=True):
    """A run as it stands."""

    path: Path
    status: str
    environment: str
    model: str
    created: float
    tasks: int
    quarantined: int
    planned: int
    """Rollouts that the run wants in all, as far as its journal knows."""
    stats: Stats
    groups: int = 0
    solved: int = 0
    """Groups with at least one reward of 1."""

    @property
    def left(self) -> int:
        return max(0, self.planned - self.stats.rollouts)

    def plain(self, session: Session | None = None) -> dict[str, Any]:
        """As data, for `--json`."""
        stats = self.stats
        found: dict[str, Any] = {
            "run": str(self.path.resolve()),
            "status": self.status,
            "environment": self.environment,
            "model": self.model,
            "created": self.created,
            "tasks": self.tasks,
            "quarantined": self.quarantined,
            "planned": self.planned,
            "rollouts": stats.rollouts,
            "valid": stats.valid,
            "failed": stats.failed,
            "cancelled": stats.cancelled,
            "truncated": dict(stats.truncated),
            "causes": {cause: failure.count for cause, failure in stats.causes()},
            "reward": stats.reward(),
            "turns": stats.turns,
            "prompt_tokens": stats.prompt_tokens,
            "sampled_tokens": stats.sampled_tokens,
        }
        if session is not None and session.seconds > 0:
            found |= {
                "seconds": session.seconds,
                "rollouts_per_second": session.rollouts / session.seconds,
                "tokens_per_second": session.sampled_tokens / session.seconds,
            }
        return found


def read_summary(reader: "RunReader", *, k: int | None = None) -> Summary:
    """One pass over the records, a page at a time. `k`: rollouts of each task, where the caller knows."""
    meta = reader.meta()
    stats = Stats()
    group = -1
    groups = solved = 0
    counted = False
    for record in reader.each():
        if record.group != group:
            group, counted, groups = record.group, False, groups + 1
        stats.add(record)
        if record.valid and record.reward == 1.0 and not counted:
            counted, solved = True, solved + 1
    tasks = quarantined = 0
    for row in reader.task_rows():
        tasks += 1
        quarantined += row.status == "quarantined"
    if k is None:
        k = int(reader.config().get("stream", {}).get("k", 0) or 0)
    planned = tasks * k if k else sum(row.k for row in reader.groups())
    return Summary(
        path=reader.folder,
        status=reader.status,
        environment=meta.get("env", ""),
        model=meta.get("model", ""),
        created=float(meta.get("created", 0.0)),
        tasks=tasks,
        quarantined=quarantined,
        planned=planned,
        stats=stats,
        groups=groups,
        solved=solved,
    )


def summary_lines(summary: Summary, session: Session | None = None) -> list[str]:
    """The final table, without what to do next."""
    stats = summary.stats
    rows = [["tasks", f"{summary.tasks:,}", _quarantined(summary)], ["rollouts", *_rollouts(summary)]]
    if stats.valid:
        rows.append(_result(stats))
    if stats.valid and stats.binary and summary.groups and stats.rollouts > summary.groups:
        rows.append(["solved", f"{summary.solved:,}", "tasks at least once"])
    if stats.prompt_tokens or stats.sampled_tokens:
        about = f"sampled in {plural(stats.turns, 'turn')}, {stats.prompt_tokens:,} of prompts"
        rows.append(["tokens", f"{stats.sampled_tokens:,}", about])
    if session is not None and session.rollouts and session.seconds > 0:
        about = (
            f"rollouts/s, {rate(session.sampled_tokens, session.seconds)} tokens/s, in {duration(session.seconds)}"
        )
        rows.append(["speed", rate(session.rollouts, session.seconds), about])
    title = f"{bold(line(summary.environment, 60))} with {bold(line(summary.model, 60))}"
    head = f"{title}  {status_word(summary.status)}"
    lines = [
        head,
        *table([[dim(row[0]), bold(row[1]), row[2]] for row in rows], right=frozenset({1}), indent="  "),
    ]
    if stats.failures:
        lines += ["", click.style("failed", fg="red", bold=True) + dim("  not in any rate above"), *_causes(stats)]
    return lines


def _quarantined(summary: Summary) -> str:
    return f"{summary.quarantined:,} of them quarantined" if summary.quarantined else ""


def _rollouts(summary: Summary) -> tuple[str, str]:
    stats = summary.stats
    parts = [f"{stats.valid:,} valid"]
    if stats.truncated:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in stats.truncated.most_common())
        parts.append(f"{stats.truncated.total():,} of them truncated ({reasons})")
    if stats.failed:
        parts.append(click.style(f"{stats.failed:,} failed", fg="red"))
    if stats.cancelled:
        parts.append(f"{stats.cancelled:,} cancelled")
    if summary.left:
        parts.append(f"{summary.left:,} not done yet")
    return f"{stats.rollouts:,}", ", ".join(parts)


def _result(stats: Stats) -> list[str]:
    over = f"over {plural(stats.valid, 'valid rollout')}"
    if stats.binary:
        low, high = wilson(stats.passed, stats.valid)
        return ["pass rate", f"{stats.passed / stats.valid:.1%}", f"95% within {low:.1%} to {high:.1%}, {over}"]
    error = stats.standard_error
    return [
        "reward",
        f"{stats.mean:.4g}",
        f"{f'± {error:.2g} (standard error), ' if error is not None else ''}{over}",
    ]


def _causes(stats: Stats) -> list[str]:
    rows = []
    for cause, failure in stats.causes()[:MAX_CAUSES]:
        rows.append(
            [
                f"{failure.count:,}",
                click.style(line(cause, 40), bold=True),
                failure.fault,
                f"{failure.first}: {line(failure.detail, 100)}",
            ]
        )
    lines = table(rows, right=frozenset({0}), indent="  ")
    more = len(stats.failures) - MAX_CAUSES
    return [*lines, dim(f"  and {plural(more, 'more cause')}")] if more > 0 else lines


def next_lines(summary: Summary) -> list[str]:
    """What to try next: the most useful first."""
    run = quoted(summary.path)
    rows: list[list[str]] = []
    if summary.left and summary.status not in ("running", "finished"):
        rows.append([f"rookery resume {run}", f"run the rest: {plural(summary.left, 'rollout')}"])
    causes = summary.stats.causes()
    if causes:
        cause, failure = causes[0]
        rows.append([f"rookery show {run} {failure.first}", f"{cause}: {cause_of(cause).advice}"])
    elif summary.stats.rollouts:
        rows.append([f"rookery show {run}", "the rollouts, and each one's transcript"])
    if summary.stats.valid:
        rows.append([f"rookery export {run} -o rollouts.jsonl", "everything, for other programs"])
    if not rows:
        return []
    # A run's path is long: what to do with it goes on a line of its own.
    return ["", *(text for command, about in rows for text in (f"  {dim('#')} {dim(about)}", f"  {command}"))]


def print_summary(summary: Summary, session: Session | None = None) -> None:
    """On stdout."""
    click.echo("\n".join([*summary_lines(summary, session), *next_lines(summary)]))


def when(created: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
