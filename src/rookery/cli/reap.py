"""`rookery reap`: remove sandboxes whose owner process is dead.

Guarantees:
- a sandbox of a live process is not touched before its deadline; runs that are running, and runs of other
  machines, are skipped;
- containers of dead owners are removed even if the run's directory is gone, if a container engine is running;
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
from rookery.cli.options import option
from rookery.cli.terminal import one_line
from rookery.core import RookeryError, UsageError

SANDBOX_FOLDER = "sandboxes"
_HELP = """Remove sandboxes whose owner process is dead, with their processes, cgroups and directories.

DIR is a directory of runs, or one run.  [default: ROOKERY_OUT, `out` in rookery.toml, or runs]

Sandboxes of running runs stay. Leftovers of a killed `rookery exec` are removed too.
"""


@click.command(help=_HELP, short_help="Remove sandboxes of dead processes.")
@click.argument("folder", metavar="[DIR]", required=False)
@option("--json", is_flag=True, help="Print one JSON object.")
def reap(folder: str | None, json: bool) -> int:
    from rookery.cli.terminal import plural, relative_path
    from rookery.sandboxes.reaper import reap_machine, reap_scratch

    root = find_runs_folder(folder or os.environ.get("ROOKERY_OUT") or None)
    if folder is not None and not root.is_dir():
        raise UsageError(f"the directory {folder} does not exist: name a directory of runs, or a run")
    done = [_reap_run(path) for path in _find_sandbox_folders(root)]
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
    printed = bool(commands or containers)
    for one in done:
        parts = [f"ended {plural(len(one['ended']), 'sandbox')}"] if one["ended"] else []
        parts += [f"ended {plural(len(one['keepers']), 'keeper')}"] if one["keepers"] else []
        parts += [f"left {plural(one['live'], 'sandbox')} of live processes"] if one["live"] else []
        parts += [one["error"]] if one["error"] else []
        if parts:
            printed = True
            click.echo(f"{relative_path(Path(one['run']))}: {', '.join(parts)}")
    if commands:
        click.echo(f"leftovers of `rookery exec`: ended {plural(len(commands), 'sandbox')}")
    if containers:
        click.echo(f"containers of dead owners: ended {plural(len(containers), 'sandbox')}")
    if not printed:
        click.echo(f"nothing to remove in {relative_path(root)}")
    return 0


def _find_sandbox_folders(root: Path) -> list[Path]:
    """Return the directory of sandboxes of the run `root` or, if it is a directory of runs, those of all runs."""
    if (root / SANDBOX_FOLDER).is_dir():
        return [root / SANDBOX_FOLDER]
    return sorted(path for path in root.glob(f"*/{SANDBOX_FOLDER}") if path.is_dir() and not path.is_symlink())


def _reap_run(sandboxes: Path) -> dict[str, Any]:
    from rookery.journal import open_lock
    from rookery.journal.schema import LOCK
    from rookery.sandboxes import leases

    run = sandboxes.parent
    result: dict[str, Any] = {"run": str(run), "ended": [], "keepers": [], "live": 0, "error": ""}
    try:
        if not (run / LOCK).exists():  # not a run of the engine: only its leases count
            _end_sandboxes(sandboxes, result)
            return result
        if host := _find_other_host((run / LOCK).read_text(errors="replace")):
            result["error"] = (
                f"skipped: it ran on {one_line(host, 80)}, and processes of other machines are not visible"
            )
            return result
        try:
            lock = open_lock(run, timeout=0.0)
        except UsageError:  # the run is running
            result["live"] = len(leases.read_leases(sandboxes))
            return result
        try:
            _end_sandboxes(sandboxes, result)
            _remove_empty_folders(sandboxes)
        finally:
            lock.close()
    except (OSError, RookeryError) as error:
        result["error"] = f"not cleaned: {error}"
    return result


def _find_other_host(holder: str) -> str:
    """Return the host that last wrote the run, or an empty string if it is this machine.

    `holder` is the text in the run's lock file. The process IDs of another host mean nothing on this machine.
    """
    found = re.search(r" on (\S+)", holder)
    return found[1] if found and found[1] != socket.gethostname() else ""


def _end_sandboxes(sandboxes: Path, result: dict[str, Any]) -> None:
    from rookery.sandboxes import leases
    from rookery.sandboxes.reaper import reap as reaped
    from rookery.sandboxes.reaper import reap_homes

    result["keepers"] = reap_homes(sandboxes)
    result["ended"] = reaped(sandboxes, now=time.time())
    result["live"] = len(leases.read_leases(sandboxes))


def _remove_empty_folders(sandboxes: Path) -> None:
    """Remove the sandbox directory of a run if it is empty. The caller must hold the run's lock."""
    for partial in (sandboxes / "leases").glob("*.half"):
        partial.unlink(missing_ok=True)
    for folder in (sandboxes / "leases", sandboxes):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
