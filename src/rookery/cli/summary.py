"""The summary of a run, read from its journal.

- The numbers come from the journal and not from the memory of this process, so `run`, `resume` and `show` agree.
- A rate has its interval, clustered by task, and says what it is over: valid rollouts only.
- An unfinished run says that its finished part is a biased sample.
- The counts of outcomes add up to the number of rollouts, and each failure is named by its cause.
- It ends with what to do next.
"""

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rookery.cli.settings import flat_settings
from rookery.cli.stats import Stats
from rookery.cli.text import bold, columns, dim, duration, line, plural, program, quoted, rate, status_word, table
from rookery.core import cause_of

if TYPE_CHECKING:
    from rookery.journal import RunReader

MAX_CAUSES = 8
BIASED = "a biased sample: short rollouts finish first"
LEVELS_A_LINE = 6
MAX_SETTINGS = 2_000


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
    settings: dict[str, Any] = {}
    """The configuration that the run was started with."""

    @property
    def left(self) -> int:
        return max(0, self.planned - self.stats.rollouts)

    @property
    def whole(self) -> Session:
        """All processes that worked on it, as one: what a reader of the journal knows about its speed."""
        stats = self.stats
        return Session(seconds=stats.busy.seconds, rollouts=stats.rollouts, sampled_tokens=stats.sampled_tokens)

    def plain(self, session: Session | None = None) -> dict[str, Any]:
        """As data, for `--json`."""
        stats = self.stats
        found: dict[str, Any] = {
            "run": str(self.path.resolve()),
            "status": self.status,
            "environment": self.environment,
            "model": self.model,
            "created": self.created,
            "settings": self.settings,
            "tasks": self.tasks,
            "quarantined": self.quarantined,
            "planned": self.planned,
            "unfinished": self.left,
            "biased_sample": self.left > 0,
            "rollouts": stats.rollouts,
            "valid": stats.valid,
            "failed": stats.failed,
            "cancelled": stats.cancelled,
            "truncated": dict(stats.truncated),
            "causes": {cause: failure.count for cause, failure in stats.causes()},
            "completed": stats.completed,
            "outcomes": dict(stats.labels),
            "solved": self.solved,
            "reward": stats.reward(),
            "turns": stats.turns,
            "drifted": stats.drifted,
            "without_tokens": stats.without_tokens,
            "prompt_tokens": stats.prompt_tokens,
            "sampled_tokens": stats.sampled_tokens,
        }
        if stats.levels:
            found["levels"] = [
                {"level": level, "valid": one.valid, "mean": one.mean} for level, one in stats.levels
            ]
        spent = session or self.whole
        if spent.seconds > 0:
            found |= {
                "seconds": spent.seconds,
                "rollouts_per_second": spent.rollouts / spent.seconds,
                "tokens_per_second": spent.sampled_tokens / spent.seconds,
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
    settings = reader.config()
    if k is None:
        k = int(settings.get("stream", {}).get("k", 0) or 0)
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
        settings=settings,
    )


def summary_lines(summary: Summary, session: Session | None = None) -> list[str]:
    """The final table, without what to do next."""
    stats = summary.stats
    rows = [["tasks", f"{summary.tasks:,}", _tasks(summary)], ["rollouts", *_rollouts(summary)]]
    if stats.valid:
        if summary.left:
            rows.append(["unfinished", f"{summary.left:,}", click.style(BIASED, fg="yellow")])
        rows += _result(stats)
    if stats.prompt_tokens or stats.sampled_tokens:
        about = f"sampled in {plural(stats.turns, 'turn')}, {stats.prompt_tokens:,} of prompts"
        rows.append(["tokens", f"{stats.sampled_tokens:,}", about])
    if stats.drifted:
        about = "turns whose prompt changed the tokens it continues: they train apart; --record tokens avoids it"
        rows.append(["drifted", f"{stats.drifted:,}", about])
    if stats.without_tokens and summary.settings.get("record") != "plain":
        about = "turns whose token IDs the model server did not return: they cannot train"
        rows.append(["no token IDs", f"{stats.without_tokens:,}", about])
    rows += _speed(summary, session)
    rows += _outcomes(stats, columns() - _indent(rows))
    title = f"{bold(line(summary.environment, 60))} with {bold(line(summary.model, 60))}"
    head = f"{title}  {status_word(summary.status)}"
    body = table([[dim(row[0]), bold(row[1]), row[2]] for row in rows], right=frozenset({1}), indent="  ")
    return [head, *body]


def settings_lines(summary: Summary) -> list[str]:
    """Return the run's settings, wrapped to the width of the terminal."""
    words = [f"{name}={value}" for name, value in flat_settings(summary.settings).items()]
    if not words:
        return []
    lines = textwrap.wrap(line("  ".join(words), MAX_SETTINGS), max(40, columns() - 15), break_on_hyphens=False)
    return [f"  {dim('settings' if not at else '        ')}   {one}" for at, one in enumerate(lines)]


def _indent(rows: list[list[str]]) -> int:
    """Where the last column begins. The names of outcomes' rows are no longer than those before them."""
    return 6 + max(len(row[0]) for row in rows) + max(len(row[1]) for row in rows)


def _tasks(summary: Summary) -> str:
    stats = summary.stats
    parts = []
    if stats.valid and stats.binary and summary.groups and stats.rollouts > summary.groups:
        parts.append(f"{summary.solved:,} solved at least once")
    if summary.quarantined:
        parts.append(f"{summary.quarantined:,} quarantined")
    return ", ".join(parts)


def _rollouts(summary: Summary) -> tuple[str, str]:
    stats = summary.stats
    parts = [f"{stats.valid:,} valid"]
    if stats.failed:
        parts.append(click.style(f"{stats.failed:,} failed", fg="red"))
    if stats.cancelled:
        parts.append(f"{stats.cancelled:,} cancelled")
    if summary.left:
        parts.append(f"{summary.left:,} not done yet")
    return f"{stats.rollouts:,}", ", ".join(parts)


def _result(stats: Stats) -> list[list[str]]:
    tasks = len(stats.estimate.tasks)
    clustered = tasks < stats.valid
    over = f"over {plural(stats.valid, 'valid rollout')}"
    error, interval = stats.standard_error, stats.estimate.interval95
    if error is None:
        spread = "one task: no standard error" if clustered else ""
    else:
        spread = f"± {error:.2g} (standard error{' by task' if clustered else ''})"
    if stats.binary:
        within = f"95% within {interval[0]:.1%} to {interval[1]:.1%}, " if interval is not None else ""
        rows = [["pass rate", f"{stats.mean:.1%}", f"{within}{over}"], _mean(stats, spread)]
    else:
        rows = [_mean(stats, f"{spread}, {over}" if spread else over)]
    rows += _per_task(stats)
    shown = [
        f"{level:g}: {f'{one.mean:.0%}' if stats.binary else f'{one.mean:.3g}'}" for level, one in stats.levels
    ]
    if len(shown) > 1:
        for at in range(0, len(shown), LEVELS_A_LINE):
            rows.append(["" if at else "by level", "", "  ".join(shown[at : at + LEVELS_A_LINE])])
    return rows


def _per_task(stats: Stats) -> list[list[str]]:
    rows = []
    for name, one in stats.per_task().items():
        if one.mean is None:
            continue
        rate = name.startswith("pass@")
        parts = []
        if one.standard_error is not None:
            parts.append(f"± {one.standard_error:.1%}" if rate else f"± {one.standard_error:.2g}")
        parts.append(f"over {plural(one.tasks, 'task')}")
        if left_out := len(stats.tasks) - one.tasks:
            parts.append(f"{left_out:,} left out (too few valid)")
        value = f"{one.mean:.1%}" if rate else f"{one.mean:.3f}" if abs(one.mean) < 10 else f"{one.mean:.4g}"
        rows.append([name, value, ", ".join(parts)])
    return rows


def _mean(stats: Stats, about: str) -> list[str]:
    return ["mean reward", f"{stats.mean:.3f}" if abs(stats.mean) < 10 else f"{stats.mean:.4g}", about]


def _speed(summary: Summary, session: Session | None) -> list[list[str]]:
    """This process's own, or that of the whole run where nobody is running it."""
    spent = session or summary.whole
    if not spent.rollouts or not spent.seconds > 0:
        return []
    some = "of them " if spent.rollouts < summary.stats.rollouts else ""
    rows = [["tokens/s", rate(spent.sampled_tokens, spent.seconds), "sampled"]] if spent.sampled_tokens else []
    about = f"{spent.rollouts:,} {some}in {duration(spent.seconds)}"
    return [*rows, ["rollouts/s", rate(spent.rollouts, spent.seconds), about]]


def _outcomes(stats: Stats, width: int) -> list[list[str]]:
    """How the rollouts ended: the counts add up. The words are those that `show --label` takes."""
    failures = dict(stats.causes()[:MAX_CAUSES])
    others = sorted(
        ((name, count) for name, count in stats.labels.items() if name not in stats.failures),
        key=lambda pair: (pair[0] != "completed", pair[0].startswith("cancelled."), -pair[1], pair[0]),
    )
    rows = [[f"{count:,}", name] for name, count in others]
    for cause, failure in failures.items():
        name = line(cause, 40)
        about = line(f"{failure.fault}, first {failure.first}: {failure.detail}", max(30, width - len(name) - 2))
        rows.append([f"{failure.count:,}", f"{click.style(name, fg='red', bold=True)}  {about}"])
    rest = [failure.count for cause, failure in stats.failures.items() if cause not in failures]
    if rest:
        rows.append([f"{sum(rest):,}", f"of {plural(len(rest), 'more cause')}"])
    return [["" if at else "outcomes", *row] for at, row in enumerate(rows)]


def next_lines(summary: Summary) -> list[str]:
    """What to try next: the most useful first."""
    run, rookery = quoted(summary.path), program()
    rows: list[tuple[str, str]] = []
    if summary.left and summary.status not in ("running", "finished"):
        rows.append((f"{rookery} resume {run}", f"run the rest: {plural(summary.left, 'rollout')}"))
    causes = summary.stats.causes()
    again = sum(failure.count for cause, failure in causes if cause != "task.invalid")
    if again and not summary.left and summary.status != "running":
        rows.append((f"{rookery} resume {run} --failed", f"run {plural(again, 'failed rollout')} again"))
    if causes:
        cause, failure = causes[0]
        rows.append((f"{rookery} show {run} {failure.first}", f"{cause}: {cause_of(cause).advice}"))
    elif summary.stats.rollouts:
        rows.append((f"{rookery} show {run}", "the rollouts, and each one's transcript"))
    if summary.stats.valid:
        rows.append((f"{rookery} export {run} -o rollouts.jsonl", "everything, for other programs"))
    return ["", *commands(rows)] if rows else []


def commands(rows: list[tuple[str, str]]) -> list[str]:
    """Commands to paste, each below what it does: a run's path is long, so that one line would not hold both."""
    return [text for command, about in rows for text in (f"  {dim('#')} {dim(about)}", f"  {command}")]


def print_summary(summary: Summary, session: Session | None = None) -> None:
    """On stdout."""
    click.echo("\n".join([*summary_lines(summary, session), *next_lines(summary)]))


def when(created: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
