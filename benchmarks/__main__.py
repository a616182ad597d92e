"""Command line of the benchmarks: `python -m benchmarks [NAME] [--quick] [--json]`."""

import sys

import click

from benchmarks import bench_names, render, run_bench
from rookery.core import RookeryError


@click.command()
@click.argument("name", metavar="NAME", required=False)
@click.option("--json", is_flag=True, help="Print one JSON object as the last line of stdout.")
@click.option("--quick", is_flag=True, help="Finish within a minute, with less exact figures.")
def main(name: str | None, json: bool, quick: bool) -> None:
    """Run the benchmark NAME. Without a name, list the benchmarks."""
    if name is None:
        click.echo("\n".join(bench_names()))
        return
    try:
        report = run_bench(name, quick=quick, progress=lambda text: click.echo(text, err=True))
    except RookeryError as error:
        click.echo(f"benchmarks: {error}", err=True)
        sys.exit(2)
    if json:
        click.echo(report.to_json())
    else:
        render(report)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
