"""`rookery compare`: compare two runs, paired by task."""

from typing import TYPE_CHECKING

import click

from rookery.cli.config import find_runs_folder, runs_option
from rookery.cli.options import Number, option

if TYPE_CHECKING:
    from rookery.view.comparison import Comparison, TaskPair

_HELP = """Compare run B with run A over the tasks that both have.

The difference is the mean over tasks of the difference in mean reward, with a 95% interval. Each task counts once,
so the interval is clustered by task. Failed and cancelled rollouts are in no mean.

A and B are directories, names of runs, the start or end of a name, or `latest`.
"""


@click.command(help=_HELP, short_help="Compare two runs, paired by task.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@option("-n", "count", type=Number(int, 0), default=10, help="Changed tasks to list, in each direction.")
@option("--json", is_flag=True, help="Print JSON, with every task.")
@option(
    "-o",
    "--output",
    metavar="PATH",
    help="Also draw the comparison as PATH.png and PATH.svg; needs matplotlib (extra `plot`).",
)
@runs_option
def compare(a: str, b: str, count: int, json: bool, output: str | None, root: str | None) -> int:
    from pathlib import Path

    import msgspec

    from rookery.journal import RunReader, find_journal
    from rookery.view.comparison import compare_runs

    folder = find_runs_folder(root)
    with RunReader(find_journal(a, folder)) as first, RunReader(find_journal(b, folder)) as second:
        found = compare_runs(first, second)
        unfinished = [reader.folder.name for reader in (first, second) if reader.status != "finished"]
    if output:
        from rookery.view.plot import plot_comparison

        for path in plot_comparison(found, Path(output)):
            click.echo(path, err=True)
    if json:
        click.echo(msgspec.json.encode({**found.plain(), "unfinished": unfinished}))
    else:
        click.echo("\n".join(_format(found, unfinished, count)))
    return 0


def _format(found: "Comparison", unfinished: list[str], count: int) -> list[str]:
    from rookery.cli.summary import BIASED
    from rookery.cli.terminal import bold, dim, format_table, one_line, plural

    lines = [f"{dim('A')} {bold(found.a)}", f"{dim('B')} {bold(found.b)}"]
    lines += [click.style(f"{name} is unfinished, {BIASED}", fg="yellow") for name in unfinished]
    what = "pass rate" if found.binary else "mean reward"
    rows = [["tasks", f"{len(found.pairs):,}", _describe_missing(found)]]
    if found.a_mean is not None and found.b_mean is not None and found.difference is not None:
        interval = found.interval95
        spread = (
            f"95% within {_signed(interval[0], found)} to {_signed(interval[1], found)}, by task"
            if interval is not None
            else "one task: no interval"
        )
        rows += [
            [f"{what} A", _value(found.a_mean, found), "mean over tasks"],
            [f"{what} B", _value(found.b_mean, found), "mean over tasks"],
            ["difference", _signed(found.difference, found), spread],
        ]
        better = found.changed("gained", "improved")
        worse = found.changed("lost", "worsened")
        same = len(found.changed("same"))
        rows.append(["tasks", f"{len(better):,}", "better" + _flips(found, "gained", "from fail to pass")])
        rows.append(["", f"{len(worse):,}", "worse" + _flips(found, "lost", "from pass to fail")])
        rows.append(["", f"{same:,}", "the same"])
    lines += format_table([[dim(row[0]), bold(row[1]), row[2]] for row in rows], right=frozenset({1}), indent="  ")
    if found.changed_tasks:
        warning = f"the content of {plural(len(found.changed_tasks), 'task')} differs between the runs"
        lines.append(click.style(f"  {warning}: {one_line(', '.join(found.changed_tasks), 120)}", fg="yellow"))
    for title, pairs in (
        ("better", found.changed("gained", "improved")),
        ("worse", found.changed("lost", "worsened")),
    ):
        if pairs and count:
            lines += ["", bold(title), *_format_pairs(pairs[:count], found)]
            if len(pairs) > count:
                lines.append(dim(f"  and {len(pairs) - count:,} more: -n {len(pairs)} lists them"))
    if found.settings:
        lines += ["", bold("settings that differ")]
        head = [dim("  "), dim("A"), dim("B")]
        lines += format_table(
            [
                head,
                *(
                    [name, *(one_line(value or "-", 60) for value in both)]
                    for name, both in found.settings.items()
                ),
            ],
            indent="  ",
        )
    return lines


def _format_pairs(pairs: "list[TaskPair]", found: "Comparison") -> list[str]:
    from rookery.cli.terminal import format_table, one_line

    rows = [
        [
            one_line(pair.task, 60),
            f"{_value(pair.a, found)} → {_value(pair.b, found)}",
            f"over {pair.a_valid} and {pair.b_valid} rollouts",
        ]
        for pair in pairs
    ]
    return format_table(rows, indent="  ")


def _describe_missing(found: "Comparison") -> str:
    parts = [f"{count:,} only in {name}" for name, count in (("A", found.only_a), ("B", found.only_b)) if count]
    return ", ".join(["in both runs", *parts])


def _flips(found: "Comparison", change: "str", about: str) -> str:
    count = sum(pair.change == change for pair in found.pairs)
    return f", {count:,} {about}" if found.binary and count else ""


def _value(value: float, found: "Comparison") -> str:
    return f"{value:.1%}" if found.binary else f"{value:.4g}"


def _signed(value: float, found: "Comparison") -> str:
    return f"{100 * value:+.1f} points" if found.binary else f"{value:+.4g}"
