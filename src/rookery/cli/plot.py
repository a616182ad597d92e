"""`rookery plot`: draw the learning curves of training runs."""

from pathlib import Path

import click

from rookery.cli.config import find_runs_folder, runs_option


@click.command(short_help="Draw the learning curve of a training run.")
@click.argument("names", metavar="RUN...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="PATH", help="Path of the files without suffix.  [default: RUN/learning]")
@runs_option
def plot(names: tuple[str, ...], output: str | None, root: str | None) -> int:
    """Draw the metrics of one or more training runs as PNG and SVG. Needs matplotlib (extra `plot`)."""
    from rookery.trainer import find_training_run
    from rookery.trainer.plot import plot_learning

    folders = [find_training_run(name, find_runs_folder(root)) for name in names]
    for path in plot_learning(folders, Path(output) if output else folders[0] / "learning"):
        click.echo(path)
    return 0
