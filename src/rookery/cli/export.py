"""`rookery export` and `rookery import`: exchange rollouts with other programs.

`export` writes the rollouts of a run as JSONL, CSV or Parquet, or their conversations. `import` writes
trajectories of other programs as a run.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rookery.cli.config import find_runs_folder, read_prices, runs_option
from rookery.cli.options import PRICES, option
from rookery.core import UsageError

if TYPE_CHECKING:
    from rookery.journal.export import Kind

_EXPORT_HELP = """Write the rollouts of RUN as JSONL, CSV or Parquet, one row per rollout.

The formats atif, openai and sharegpt are JSONL with the conversations alone: one ATIF trajectory per rollout, or
one row of messages per conversation of a rollout with a reward.

Without -o, the rows are written to stdout, except Parquet. A file appears under its name only when it is complete.
"""

_IMPORT_HELP = """Write the ATIF trajectories in FILES as a new run, and print its directory.

ATIF is the Agent Trajectory Interchange Format, which Harbor and other programs write. A file contains one
trajectory as JSON, or one per line. `rookery show`, `view`, `compare` and `export` work on the run. Trajectories
without a reward are shown, but count in no mean.
"""


@click.command(help=_EXPORT_HELP, short_help="Write a run as JSONL, CSV or Parquet.")
@click.argument("name", metavar="RUN")
@option("-o", "--out", metavar="FILE", help="Output file.  [default: stdout]")
@option(
    "--format",
    "kind",
    type=click.Choice(["jsonl", "csv", "parquet", "atif", "openai", "sharegpt"]),
    help="Format.  [default: by the file name, else jsonl]",
)
@option(
    "--tokens", is_flag=True, help="Include segments: token IDs, loss mask, log probabilities, policy versions."
)
@PRICES
@runs_option
def export(
    name: str, out: str | None, kind: "Kind | None", tokens: bool, prices: str | None, root: str | None
) -> int:
    from rookery.cli.summary import BIASED
    from rookery.cli.terminal import plural
    from rookery.journal import RunReader, find_journal
    from rookery.journal.export import export as write
    from rookery.journal.export import export_conversations, export_csv, export_jsonl, format_from_path
    from rookery.view.summary import read_summary

    if out in (None, "-"):
        if kind == "parquet":
            raise UsageError("Parquet cannot be written to stdout: name a file with -o FILE.parquet")
        out = None
    else:
        kind = kind or format_from_path(Path(out))  # report a wrong file name before reading
    table = read_prices(prices) if prices else None
    with RunReader(find_journal(name, find_runs_folder(root))) as reader:
        if out is None and kind in ("atif", "openai", "sharegpt"):
            done = export_conversations(reader, sys.stdout, kind, tokens=tokens)
            sys.stdout.flush()
        elif out is None:
            done = (export_csv if kind == "csv" else export_jsonl)(reader, sys.stdout, tokens=tokens, prices=table)
            sys.stdout.flush()
        else:
            done = write(reader, Path(out), kind=kind, tokens=tokens, prices=table)
        left = read_summary(reader).left
    click.echo(f"{plural(done.rollouts, 'rollout')} written to {out or 'stdout'}", err=True)
    if left:
        text = f"the run is not finished ({plural(left, 'rollout')} to do), so this is {BIASED}"
        click.echo(click.style("warning: ", fg="yellow") + text, err=True)
    if done.damaged:
        where = "they are left out" if kind in ("atif", "openai", "sharegpt") else "see `damage` in their rows"
        text = f"{done.damaged:,} rollouts have missing or damaged tokens: {where}"
        click.echo(click.style("warning: ", fg="yellow") + text, err=True)
    return 0


@click.command("import", help=_IMPORT_HELP, short_help="Write trajectories of other programs as a run.")
@click.argument("files", metavar="FILES...", nargs=-1, required=True, type=click.Path(path_type=Path))
@runs_option
def import_(files: tuple[Path, ...], root: str | None) -> int:
    from rookery.journal.atif_import import import_atif

    click.echo(import_atif(files, find_runs_folder(root)))
    return 0
