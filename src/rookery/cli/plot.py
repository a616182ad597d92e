"""`rookery plot`: draw the curves of runs, or the learning curves of training runs."""

from pathlib import Path

import click

from rookery.cli.config import find_runs_folder, runs_option
from rookery.core import UsageError

_HELP = """Draw one or more runs as PNG and SVG, or print their curves with --text.

A run gives its rewards, outcomes, failures by cause and durations over time. A training run gives its learning
curves. RUN is a directory, its name, the start or end of its name, or `latest`. PNG and SVG need matplotlib (extra
`plot`).
"""


@click.command(help=_HELP, short_help="Draw the curves of runs as PNG and SVG, or in the terminal.")
@click.argument("names", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    help="Path of the files without suffix.  [default: RUN/curves, or RUN/learning for a training run]",
)
@click.option("--text", is_flag=True, help="Print the curves instead, one line each.")
@runs_option
def plot(names: tuple[str, ...], output: str | None, text: bool, root: str | None) -> int:
    from rookery.view.runs import find_viewed_run

    runs = [find_viewed_run(name, find_runs_folder(root)) for name in names]
    if len({run.is_training for run in runs}) > 1:
        raise UsageError("runs and training runs have different curves: draw them with two commands")
    if text and output:
        raise UsageError("--text prints the curves: leave out --output")
    folders = [run.folder for run in runs]
    if text:
        for folder in folders:
            _print_curves(folder, training=runs[0].is_training)
        return 0
    target = Path(output) if output else folders[0] / ("learning" if runs[0].is_training else "curves")
    if runs[0].is_training:
        from rookery.trainer.plot import plot_learning

        paths = plot_learning(folders, target)
    else:
        from rookery.view.plot import plot_runs

        paths = plot_runs(folders, target)
    for path in paths:
        click.echo(path)
    return 0


def _print_curves(folder: Path, *, training: bool) -> None:
    from rookery.cli.terminal import bold, dim, format_table, one_line
    from rookery.view.text_curves import draw_learning, draw_run

    curves = draw_learning(folder) if training else draw_run(folder)
    rows = [[dim(word) for word in ("curve", "low", "high", "last", "by step" if training else "by time")]]
    rows += [
        [one_line(one.name, 60), f"{one.low:.4g}", f"{one.high:.4g}", f"{one.last:.4g}", one.line]
        for one in curves
    ]
    click.echo("\n".join([bold(folder.name), *format_table(rows, right=frozenset({1, 2, 3}))]))
