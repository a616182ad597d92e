"""`rookery reap`: remove sandboxes of dead processes.

Promises:
- a sandbox of a live process is not touched before its deadline; running runs and runs of other machines are
  skipped;
- containers of dead owners are ended whatever became of their run's folder, where an engine answers;
- removed sandboxes are printed by run; the exit code is 0, also if there were none;
- an unreadable run does not prevent the cleanup of others.
"""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import click

from rookery.cli.config import find_runs_folder
from rookery.cli.terminal import one_line
from rookery.core import RookeryError, UsageError

SANDBOX_FOLDER = "sandboxes"
_HELP = """Remove sandboxes whose owner process is dead, with their processes, cgroups and directories.

DIR is a directory of runs, or one run.  [default: ROOKERY_OUT, `out` in rookery.toml, or runs]

Sandboxes of running runs stay. Leftovers of a killed `rookery exec` are removed too.
"""


@click.command(help=_HELP, short_help="Remove sandboxes of dead processes.")
@click.argument("folder", metavar="[DIR]", required=False)
@click.option("--json", is_flag=True, help="Print one JSON object.")
def reap(folder: str | None, json: bool) -> int:
    from rookery.cli.terminal import plural, relative_path
    from rookery.sandboxes.reaper import reap_machine, reap_scratch

    root = find_runs_folder(folder or os.environ.get("ROOKERY_OUT") or None)
    if folder is not None and not root.is_dir():
        raise UsageError(f"no directory {folder}: name a directory of runs or a run")
    done = [_reap_run(place) for place in _find_sandbox_folders(root)]
    commands = reap_scratch(now=time.time())
    containers = reap_machine()
    if json:
        import msgspec

        plain = {
            "runs": [one for one in done if any(one.values())],
            "commands": commands,
            "containers": containers,
        }
        ended = sum(len(one["ended"]) for one in done) + len(commands) + len(containers)
        click.echo(msgspec.json.encode({**plain, "ended": ended}))
        return 0
    said = False
    for one in done:
        parts = [f"ended {_count_sandboxes(len(one['ended']))}"] if one["ended"] else []
        parts += [f"ended {plural(len(one['keepers']), 'keeper')}"] if one["keepers"] else []
        parts += [f"left {_count_sandboxes(one['live'])} of live processes"] if one["live"] else []
        parts += [one["error"]] if one["error"] else []
        if parts:
            said = True
            click.echo(f"{relative_path(Path(one['run']))}: {', '.join(parts)}")
    if commands:
        click.echo(f"single commands: ended {_count_sandboxes(len(commands))}")
    if containers:
        click.echo(f"containers of dead owners: ended {_count_sandboxes(len(containers))}")
    if not said and not commands and not containers:
        click.echo(f"nothing to remove in {relative_path(root)}")
    return 0


def _count_sandboxes(number: int) -> str:
    return f"{number:,} {'sandbox' if number == 1 else 'sandboxes'}"


def _find_sandbox_folders(root: Path) -> list[Path]:
    """Find the sandbox directories of a run, or of all runs in a directory."""
    if (root / SANDBOX_FOLDER).is_dir():
        return [root / SANDBOX_FOLDER]
    return sorted(place for place in root.glob(f"*/{SANDBOX_FOLDER}") if place.is_dir() and not place.is_symlink())


def _reap_run(place: Path) -> dict[str, Any]:
    from rookery.journal import open_lock
    from rookery.journal.schema import LOCK
    from rookery.sandboxes import leases

    run = place.parent
    one: dict[str, Any] = {"run": str(run), "ended": [], "keepers": [], "live": 0, "error": ""}
    try:
        if not (run / LOCK).exists():  # not a run of the engine: only its leases count
            _end_sandboxes(place, one)
            return one
        if host := _find_other_host((run / LOCK).read_text(errors="replace")):
            one["error"] = (
                f"skipped: it ran on {one_line(host, 80)}, and processes of other machines are not visible"
            )
            return one
        try:
            lock = open_lock(run, patience=0.0)
        except UsageError:  # the run is running
            one["live"] = len(leases.read_leases(place))
            return one
        try:
            _end_sandboxes(place, one)
            _remove_empty_folders(place)
        finally:
            lock.close()
    except (OSError, RookeryError) as error:
        one["error"] = f"not cleaned: {error}"
    return one


def _find_other_host(holder: str) -> str:
    """Return the host that last wrote the run if it is another one; its process IDs mean nothing here."""
    found = re.search(r" on (\S+)", holder)
    return found[1] if found and found[1] != socket.gethostname() else ""


def _end_sandboxes(place: Path, one: dict[str, Any]) -> None:
    from rookery.sandboxes import leases
    from rookery.sandboxes.reaper import reap as reaped
    from rookery.sandboxes.reaper import reap_homes

    one["keepers"] = reap_homes(place)
    one["ended"] = reaped(place, now=time.time())
    one["live"] = len(leases.read_leases(place))


def _remove_empty_folders(place: Path) -> None:
    """Remove the empty sandbox directory of a locked run."""
    for half in (place / "leases").glob("*.half"):
        half.unlink(missing_ok=True)
    for folder in (place / "leases", place):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
