"""`rookery bench`: one command for the measurements of all rooms."""

import click

from rookery.core import UsageError


@click.command(short_help="Measure what Rookery costs, beside others.")
@click.argument("name", metavar="NAME", required=False)
@click.option("--json", is_flag=True, help="The last line of stdout is one JSON object.")
@click.option("--quick", is_flag=True, help="Less exact, within a minute.")
def bench(name: str | None, json: bool, quick: bool) -> int:
    """Runs the bench NAME. Without a name: the benches there are."""
    from rookery.cli.bench import bench_names, render, run_bench

    if name is None:
        click.echo("\n".join(bench_names()))
        return 0
    if name not in bench_names():
        raise UsageError(f"there is no bench {name!r}; choose one of: {', '.join(bench_names())}")
    report = run_bench(name, quick=quick, progress=lambda text: click.echo(text, err=True))
    if json:
        click.echo(report.to_json())
    else:
        render(report)
    return 0
