"""`rookery ls`: list the runs and training runs, newest first.

A run that cannot be read is listed as `unreadable`. Only settings in which the listed runs differ are shown.
"""

import sys
from typing import TYPE_CHECKING

import click

from rookery.cli.config import find_runs_folder, runs_option
from rookery.cli.options import Number, option

if TYPE_CHECKING:
    from rookery.journal import RunSummary


@click.command(short_help="List the runs.")
@runs_option
@option("-n", "count", type=Number(int, 1), default=20, help="Number of runs.")
@option("--all", "everything", is_flag=True, help="List all runs.")
@option("--json", is_flag=True, help="Print one JSON object per line.")
def ls(root: str | None, count: int, everything: bool, json: bool) -> int:
    """List the runs and training runs, newest first."""
    import msgspec

    from rookery.cli.terminal import (
        bold,
        dim,
        format_age,
        format_table,
        one_line,
        relative_path,
        style_status,
        terminal_width,
    )
    from rookery.journal import (
        list_runs,
        list_training_runs,
        run_names,
        sort_newest_first,
        training_names,
    )
    from rookery.view.stats import is_failure
    from rookery.view.summary import find_differing_settings, flatten_settings

    folder = find_runs_folder(root)
    total = len(run_names(folder)) + len(training_names(folder))
    limit = None if everything else count
    both = (*list_runs(folder, limit=limit), *list_training_runs(folder, limit=limit))
    runs = sort_newest_first(both)[:limit]
    if json:
        for run in runs:
            click.echo(msgspec.json.encode({**msgspec.structs.asdict(run), "path": str(run.path.resolve())}))
        return 0
    if not runs:
        click.echo(f"no runs in {relative_path(folder)} yet: start one with `rookery run`", err=True)
        return 0
    rows = [[dim(word) for word in ("run", "status", "rollouts", "failed", "reward", "started", "settings")]]
    settings = [flatten_settings(run.settings) for run in runs]
    shown = find_differing_settings(
        [one for one, run in zip(settings, runs, strict=True) if run.status != "unreadable"]
    )
    for run, own in zip(runs, settings, strict=True):
        failed = sum(count for label, count in run.labels.items() if is_failure(label))
        rows.append(
            [
                bold(run.name),
                style_status(run.status) + (" training" if run.kind == "training" else ""),
                f"{run.rollouts:,}" if run.status != "unreadable" else "",
                click.style(f"{failed:,}", fg="red") if failed else "",
                _reward(run),
                format_age(run.created) if run.status != "unreadable" else "",
                one_line(run.detail or "  ".join(_describe_environments(run) + _settings(own, shown)), 400),
            ]
        )
    wide = max(len(click.unstyle(text)) for text in format_table(rows))
    if sys.stdout.isatty() and wide > terminal_width():  # truncated settings could hide the difference
        lines = format_table([row[:6] for row in rows], right=frozenset({2, 3, 4}))
        below = [
            text for row, text in zip(rows, lines, strict=True) for text in (text, f"  {row[6]}") if text.strip()
        ]
        click.echo("\n".join(below))
    else:
        click.echo("\n".join(format_table(rows, right=frozenset({2, 3, 4}))))
    if total > len(runs):
        click.echo(dim(f"and {total - len(runs):,} older runs: --all lists them"), err=True)
    return 0


def _settings(own: dict[str, str], shown: list[str]) -> list[str]:
    return [f"{name}={own[name]}" for name in shown if name in own]


def _describe_environments(run: "RunSummary") -> list[str]:
    """Return the mean reward of each environment of a mixture."""
    return [
        f"{name} {f'{one.mean_reward:.4g}' if one.mean_reward is not None else '-'}"
        for name, one in run.environments.items()
    ]


def _reward(run: "RunSummary") -> str:
    if run.mean_reward is None:
        return ""
    return f"{run.mean_reward:.4g}" if run.status == "finished" else f"{run.mean_reward:.4g} so far"
