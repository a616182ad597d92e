"""Command line of the benchmarks: `python -m benchmarks [NAME] [OPTION]…`."""

import sys

import click

from benchmarks import bench_names, find_misses, render, run_bench
from rookery.core import RookeryError


@click.command()
@click.argument("name", metavar="NAME", required=False)
@click.option("--json", is_flag=True, help="Print one JSON object as the last line of stdout.")
@click.option("--quick", is_flag=True, help="Finish within a minute, with less exact figures.")
@click.option(
    "--cluster",
    metavar="NAME[:ADDRESS]",
    help="For `faults`: local:N, local:NxC, ray (three own nodes) or ray:ADDRESS.",
)
@click.option("--rollouts", type=click.IntRange(100), help="For `faults`: the number of rollouts.")
def main(name: str | None, json: bool, quick: bool, cluster: str | None, rollouts: int | None) -> None:
    """Run the benchmark NAME. Without a name, list the benchmarks.

    NAME `all` measures every figure that must not get worse, compared with its target.

    The exit status is 2 if the benchmark cannot run, and 1 if `faults` found a violation or a target of `all` is
    missed by more than 15%.
    """
    if name is None:
        click.echo("\n".join(bench_names()))
        return
    try:
        chosen = {"cluster": cluster, "rollouts": rollouts}
        options = {key: value for key, value in chosen.items() if value}
        report = run_bench(name, quick=quick, progress=lambda text: click.echo(text, err=True), **options)
    except RookeryError as error:
        click.echo(f"benchmarks: {error}", err=True)
        sys.exit(2)
    if json:
        click.echo(report.to_json())
    else:
        render(report)
    misses = find_misses(report)
    for result in misses:
        click.echo(f"benchmarks: {result.name} misses its target {result.target}", err=True)
    if misses:
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
