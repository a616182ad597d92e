"""`rookery import`: write trajectories of other programs as a run."""

from pathlib import Path

import click

from rookery.cli.config import find_runs_folder, runs_option

_HELP = """Write the ATIF trajectories in FILES as a new run, and print its directory.

ATIF is the Agent Trajectory Interchange Format, which Harbor and other programs write. A file contains one
trajectory as JSON, or one per line. `rookery show`, `view`, `compare` and `export` work on the run. Trajectories
without a reward are shown, but count in no mean.
"""


@click.command("import", help=_HELP, short_help="Write trajectories of other programs as a run.")
@click.argument("files", metavar="FILES...", nargs=-1, required=True, type=click.Path(path_type=Path))
@runs_option
def import_(files: tuple[Path, ...], root: str | None) -> int:
    from rookery.journal.atif_import import import_atif

    click.echo(import_atif(files, find_runs_folder(root)))
    return 0
