"""Format the summary of a run for the terminal.

- A rate is shown with its confidence interval, clustered by task, and counts valid rollouts only.
- For an unfinished run, a warning says that its finished rollouts are a biased sample.
- The counts of outcomes add up to the number of rollouts. Failures are counted by cause.
- The summary ends with suggested commands.
"""

import textwrap
import time

import click

from rookery.cli.terminal import (
    bold,
    dim,
    format_duration,
    format_rate,
    format_table,
    one_line,
    plural,
    program_name,
    shell_quote,
    style_status,
    terminal_width,
)
from rookery.core import get_cause
from rookery.view.stats import LEVEL, Stats
from rookery.view.summary import Summary, Throughput, flatten_settings

MAX_CAUSES = 8
BIASED = "a biased sample: short rollouts finish first"
LEVELS_PER_LINE = 6
MAX_METRICS_SHOWN = 12
MAX_SETTINGS = 2_000


def format_summary(summary: Summary, session: Throughput | None = None) -> list[str]:
    """Return the lines of the summary. Rates are those of `session`, else those of the whole run."""
    stats = summary.stats
    rows = [["tasks", f"{summary.tasks:,}", _describe_tasks(summary)], ["rollouts", *_describe_rollouts(summary)]]
    if stats.valid:
        if summary.left:
            rows.append(["unfinished", f"{summary.left:,}", click.style(BIASED, fg="yellow")])
        rows += _reward_rows(stats)
    rows += _environment_rows(stats)
    if stats.prompt_tokens or stats.sampled_tokens:
        about = f"sampled in {plural(stats.turns, 'turn')}, {stats.prompt_tokens:,} of prompts"
        rows.append(["tokens", f"{stats.sampled_tokens:,}", about])
    if summary.settings.get("record") == "off":
        rows.append(["tokens", "-", "model calls were not recorded (--record off)"])
    if stats.cost is not None:
        rows.append(["cost", f"{stats.cost:,.4g}", "of the last attempts, at the prices of the run"])
    if stats.drifted:
        about = "turns whose prompt changed the tokens it continues: separate segments; --record tokens avoids it"
        rows.append(["drifted", f"{stats.drifted:,}", about])
    if stats.without_tokens and summary.settings.get("record") != "plain":
        about = "turns whose token IDs the inference engine did not return: they cannot train"
        rows.append(["no token IDs", f"{stats.without_tokens:,}", about])
    rows += _speed_rows(summary, session)
    rows += _outcome_rows(stats, terminal_width() - _measure_indent(rows))
    title = f"{bold(one_line(summary.environment, 60))} with {bold(one_line(summary.model, 60))}"
    head = f"{title}  {style_status(summary.status)}"
    body = format_table([[dim(row[0]), bold(row[1]), row[2]] for row in rows], right=frozenset({1}), indent="  ")
    return [head, *body]


def format_settings(summary: Summary) -> list[str]:
    """Return lines with the run's settings, wrapped to the width of the terminal."""
    words = [f"{name}={value}" for name, value in flatten_settings(summary.settings).items()]
    if not words:
        return []
    lines = textwrap.wrap(
        one_line("  ".join(words), MAX_SETTINGS), max(40, terminal_width() - 15), break_on_hyphens=False
    )
    return [f"  {dim('settings' if not at else '        ')}   {one}" for at, one in enumerate(lines)]


def _measure_indent(rows: list[list[str]]) -> int:
    """Return the column of the terminal at which the third cell of the rows begins."""
    return 6 + max(len(row[0]) for row in rows) + max(len(row[1]) for row in rows)


def _describe_tasks(summary: Summary) -> str:
    stats = summary.stats
    parts = []
    if stats.valid and stats.binary and summary.groups and stats.rollouts > summary.groups:
        parts.append(f"{summary.solved:,} solved at least once")
    if summary.quarantined:
        parts.append(f"{summary.quarantined:,} quarantined")
    return ", ".join(parts)


def _describe_rollouts(summary: Summary) -> tuple[str, str]:
    stats = summary.stats
    parts = [f"{stats.valid:,} valid"]
    if stats.failed:
        parts.append(click.style(f"{stats.failed:,} failed", fg="red"))
    if stats.ungraded:
        parts.append(f"{stats.ungraded:,} ungraded")
    if stats.cancelled:
        parts.append(f"{stats.cancelled:,} cancelled")
    if summary.left:
        parts.append(f"{summary.left:,} not done yet")
    return f"{stats.rollouts:,}", ", ".join(parts)


def _reward_rows(stats: Stats) -> list[list[str]]:
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
        rows = [["pass rate", f"{stats.mean:.1%}", f"{within}{over}"], _mean_row(stats, spread)]
    else:
        rows = [_mean_row(stats, f"{spread}, {over}" if spread else over)]
    rows += _per_task_rows(stats)
    shown = [
        f"{level:g}: {f'{one.mean:.0%}' if stats.binary else f'{one.mean:.3g}'}" for level, one in stats.levels
    ]
    if len(shown) > 1:
        for at in range(0, len(shown), LEVELS_PER_LINE):
            rows.append(["" if at else "by level", "", "  ".join(shown[at : at + LEVELS_PER_LINE])])
    return [*rows, *_metric_rows(stats)]


def _metric_rows(stats: Stats) -> list[list[str]]:
    """Return rows with the means of the metrics over the valid rollouts, apart from the level."""
    means = [(name, one) for name, one in sorted(stats.metrics.items()) if name != LEVEL]
    rows: list[list[str]] = []
    for name, one in means[:MAX_METRICS_SHOWN]:
        spread = f"± {one.standard_error:.2g}" if one.standard_error is not None else ""
        some = f"over {plural(one.valid, 'rollout')}" if one.valid < stats.valid else ""
        value = f"{one.mean:.3f}" if abs(one.mean) < 10 else f"{one.mean:.4g}"
        rows.append(
            ["" if rows else "metrics", value, "  ".join(filter(None, [one_line(name, 40), spread, some]))]
        )
    if len(means) > len(rows):
        rows.append(["", "", f"{len(means) - len(rows)} more with --json"])
    return rows


def _environment_rows(stats: Stats) -> list[list[str]]:
    """Return a row for each environment of a mixture; no rows for other runs."""
    rows = []
    for name, one in sorted(stats.environments.items()):
        error = f" ± {one.standard_error:.2g}" if one.standard_error is not None else ""
        more = f", {one.ungraded:,} ungraded" if one.ungraded else ""
        more += f", {one.failed:,} failed" if one.failed else ""
        more += f", cost {one.cost:,.4g}" if one.cost is not None else ""
        about = f"{plural(len(one.tasks), 'task')}, {one.valid:,} of {plural(one.rollouts, 'rollout')} valid{more}"
        rows.append([one_line(name, 24), f"{one.mean:.3f}" if one.valid else "-", f"reward{error}, {about}"])
    return rows


def _per_task_rows(stats: Stats) -> list[list[str]]:
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


def _mean_row(stats: Stats, about: str) -> list[str]:
    return ["mean reward", f"{stats.mean:.3f}" if abs(stats.mean) < 10 else f"{stats.mean:.4g}", about]


def _speed_rows(summary: Summary, session: Throughput | None) -> list[list[str]]:
    """Return the rates of this process, or of the whole run if `session` is None."""
    spent = session or summary.total_throughput
    if not spent.rollouts or not spent.seconds > 0:
        return []
    some = "of them " if spent.rollouts < summary.stats.rollouts else ""
    rows = (
        [["tokens/s", format_rate(spent.sampled_tokens, spent.seconds), "sampled"]] if spent.sampled_tokens else []
    )
    about = f"{spent.rollouts:,} {some}in {format_duration(spent.seconds)}"
    return [*rows, ["rollouts/s", format_rate(spent.rollouts, spent.seconds), about]]


def _outcome_rows(stats: Stats, width: int) -> list[list[str]]:
    """Return rows with the counts of rollouts by outcome. The names are those that `show --label` accepts."""
    failures = dict(stats.causes()[:MAX_CAUSES])
    others = sorted(
        ((name, count) for name, count in stats.labels.items() if name not in stats.failures),
        key=lambda pair: (pair[0] != "completed", pair[0].startswith("cancelled."), -pair[1], pair[0]),
    )
    rows = [[f"{count:,}", name] for name, count in others]
    for cause, failure in failures.items():
        name = one_line(cause, 40)
        about = one_line(
            f"{failure.fault}, first {failure.first}: {failure.detail}", max(30, width - len(name) - 2)
        )
        rows.append([f"{failure.count:,}", f"{click.style(name, fg='red', bold=True)}  {about}"])
    rest = [failure.count for cause, failure in stats.failures.items() if cause not in failures]
    if rest:
        rows.append([f"{sum(rest):,}", f"of {plural(len(rest), 'more cause')}"])
    return [["" if at else "outcomes", *row] for at, row in enumerate(rows)]


def format_next_steps(summary: Summary) -> list[str]:
    """Return lines with suggested commands for the run, the most useful first."""
    run, rookery = shell_quote(summary.path), program_name()
    rows: list[tuple[str, str]] = []
    if summary.left and summary.status not in ("running", "finished"):
        rows.append((f"{rookery} resume {run}", f"run the rest: {plural(summary.left, 'rollout')}"))
    causes = summary.stats.causes()
    again = sum(failure.count for cause, failure in causes if cause != "task.invalid")
    if again and not summary.left and summary.status != "running":
        rows.append((f"{rookery} resume {run} --failed", f"run {plural(again, 'failed rollout')} again"))
    if summary.stats.ungraded and summary.status != "running":
        rows.append((f"{rookery} rescore {run} --scorer NAME", "grade the ungraded rollouts"))
    if causes:
        cause, failure = causes[0]
        rows.append((f"{rookery} show {run} {failure.first}", f"{cause}: {get_cause(cause).advice}"))
    elif summary.stats.rollouts:
        rows.append((f"{rookery} show {run}", "list the rollouts"))
    if summary.stats.valid:
        rows.append((f"{rookery} export {run} -o rollouts.jsonl", "export the rollouts"))
    return ["", *format_commands(rows)] if rows else []


def format_commands(rows: list[tuple[str, str]]) -> list[str]:
    """Return lines with commands that can be pasted, each below a comment that says what it does."""
    return [text for command, about in rows for text in (f"  {dim('#')} {dim(about)}", f"  {command}")]


def print_summary(summary: Summary, session: Throughput | None = None) -> None:
    """Print the summary and suggested commands to stdout."""
    click.echo("\n".join([*format_summary(summary, session), *format_next_steps(summary)]))


def format_time(created: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
