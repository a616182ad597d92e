"""`rookery reap`: ends every sandbox whose owner is gone.

Promises:
- a sandbox that a live process holds within its deadline is never touched, whoever's run it is; a live run, and
  one of another machine, is left alone altogether;
- containers of dead owners are ended whatever became of their run's folder, where an engine answers;
- what it ended is said, run by run; exit code 0, whether there was anything or not;
- one run that cannot be looked at does not keep the others from being cleaned.
"""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import click

from rookery.cli.config import runs_folder
from rookery.cli.text import line
from rookery.core import RookeryError, UsageError

SANDBOXES = "sandboxes"
_HELP = """Ends every sandbox whose owner is gone, with all that it left: processes, control groups, folders.

DIR is a folder of runs, or one run.  [default: ROOKERY_OUT, the file's `out`, or runs]

Sandboxes of live runs stay. What a killed `rookery exec` left goes too.
"""


@click.command(help=_HELP, short_help="End sandboxes whose owner is gone.")
@click.argument("folder", metavar="[DIR]", required=False)
@click.option("--json", is_flag=True, help="One JSON object on stdout.")
def reap(folder: str | None, json: bool) -> int:
    from rookery.cli.text import plural, shown_path
    from rookery.sandboxes.reaper import reap_scratch

    root = runs_folder(folder or os.environ.get("ROOKERY_OUT") or None)
    if folder is not None and not root.is_dir():
        raise UsageError(f"there is no folder {folder}: name one that holds runs, or a run")
    done = [_reaped(place) for place in _places(root)]
    commands = reap_scratch(now=time.time())
    containers = _containers()
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
        parts = [f"ended {_count(len(one['ended']))}"] if one["ended"] else []
        parts += [f"ended {plural(len(one['keepers']), 'keeper')}"] if one["keepers"] else []
        parts += [f"left {_count(one['live'])} of live owners alone"] if one["live"] else []
        parts += [one["error"]] if one["error"] else []
        if parts:
            said = True
            click.echo(f"{shown_path(Path(one['run']))}: {', '.join(parts)}")
    if commands:
        click.echo(f"single commands: ended {_count(len(commands))}")
    if containers:
        click.echo(f"containers of dead owners: ended {_count(len(containers))}")
    if not said and not commands and not containers:
        click.echo(f"nothing to end in {shown_path(root)}")
    return 0


def _containers() -> list[str]:
    """Those whose runs are no longer here, by what their labels say. Where no engine answers there are none."""
    from rookery.core import SandboxError
    from rookery.sandboxes.docker import asking, orphans

    try:
        return orphans.reap(asking.socket_path())
    except (SandboxError, UsageError):
        return []


def _count(number: int) -> str:
    return f"{number:,} {'sandbox' if number == 1 else 'sandboxes'}"


def _places(root: Path) -> list[Path]:
    """The folders of sandboxes: of a run, or of each run below."""
    if (root / SANDBOXES).is_dir():
        return [root / SANDBOXES]
    return sorted(place for place in root.glob(f"*/{SANDBOXES}") if place.is_dir() and not place.is_symlink())


def _reaped(place: Path) -> dict[str, Any]:
    from rookery.journal import open_lock
    from rookery.journal.schema import LOCK
    from rookery.sandboxes import leases

    run = place.parent
    one: dict[str, Any] = {"run": str(run), "ended": [], "keepers": [], "live": 0, "error": ""}
    try:
        if not (run / LOCK).exists():  # no run of the engine's: its leases speak for themselves
            _end(place, one)
            return one
        if host := _elsewhere((run / LOCK).read_text(errors="replace")):
            one["error"] = f"left alone: it ran on {line(host, 80)}, whose processes cannot be seen from here"
            return one
        try:
            lock = open_lock(run, patience=0.0)
        except UsageError:  # it is live: what it holds is its own affair
            one["live"] = len(leases.read_all(place))
            return one
        try:
            _end(place, one)
            _forget(place)
        finally:
            lock.close()
    except (OSError, RookeryError) as error:
        one["error"] = f"not cleaned: {error}"
    return one


def _elsewhere(holder: str) -> str:
    """The machine that last wrote the run, where that is another: pids say nothing about it here."""
    found = re.search(r" on (\S+)", holder)
    return found[1] if found and found[1] != socket.gethostname() else ""


def _end(place: Path, one: dict[str, Any]) -> None:
    from rookery.sandboxes import leases
    from rookery.sandboxes.reaper import reap as reaped
    from rookery.sandboxes.reaper import reap_keepers

    one["keepers"] = reap_keepers(place)
    one["ended"] = reaped(place, now=time.time())
    one["live"] = len(leases.read_all(place))


def _forget(place: Path) -> None:
    """The empty folder of a run that we hold the lock of."""
    for half in (place / "leases").glob("*.half"):
        half.unlink(missing_ok=True)
    for folder in (place / "leases", place):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
