"""`rookery tasks cached` and `rookery tasks prune`: what was unpacked, fetched or written out for tasks.

Promises:
- what a live process loaded or attempts is never removed, nor what an unfinished run in the runs folder needs;
- a run whose tasks were removed all the same is not resumed before they are there again: it would lose them;
- nothing but what interrupted work left is removed unless it is asked for; what is removed is said, with its size.
"""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.config import find_runs_folder, runs_option
from rookery.cli.options import Number, Size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rookery.core import Task
    from rookery.tasks.cache import CacheEntry, TaskCache

_PRUNE = """Removes what interrupted work left; with --to, --unused or --all also what was unpacked or fetched.

What a live process uses stays, and so does what an unfinished run needs that lies in the folder of runs: it could
not be resumed without. Everything that is removed is made again when it is asked for.
"""


@click.command(name="cached", short_help="What is kept of tasks, how large, and who uses it.")
@click.option("--json", is_flag=True, help="One JSON object a line.")
def list_cache(json: bool) -> int:
    """What was unpacked, fetched or written out for tasks: its size, its last use, and who uses it now."""
    import msgspec

    from rookery.cli.terminal import (
        bold,
        dim,
        format_age,
        format_bytes,
        format_table,
        one_line,
        plural,
        relative_path,
    )
    from rookery.tasks.cache import TaskCache

    cache = TaskCache()
    found = cache.listed()
    if json:
        for one in found:
            click.echo(msgspec.json.encode(one))
        return 0
    if not found:
        click.echo(f"nothing is kept in {relative_path(cache.folder)} yet", err=True)
        return 0
    rows = [[dim(word) for word in ("what", "files", "size", "used", "in use by")]]
    for one in _merge_rows(found):
        by = ", ".join(str(pid) for pid in one.used_by[:5]) + ("…" if len(one.used_by) > 5 else "")
        rows.append(
            [bold(one_line(one.what, 60)), f"{one.files:,}", format_bytes(one.bytes), format_age(one.used), by]
        )
    click.echo("\n".join(format_table(rows, right=frozenset({1, 2}))))
    whole = format_bytes(sum(one.bytes for one in found))
    click.echo(dim(f"{whole} of {plural(len(found), 'folder')} in {relative_path(cache.folder)}"), err=True)
    return 0


def _merge_rows(found: "list[CacheEntry]") -> "list[CacheEntry]":
    """The files of rows as one: there may be thousands of them."""
    import msgspec

    from rookery.cli.terminal import plural

    rows = [one for one in found if not one.what]
    if not rows:
        return found
    pids = sorted({pid for one in rows for pid in one.used_by})
    whole = msgspec.structs.replace(
        rows[0],
        what=f"the files of {plural(len(rows), 'row')}",
        bytes=sum(one.bytes for one in rows),
        files=sum(one.files for one in rows),
        used_by=tuple(pids),
    )
    return sorted([*(one for one in found if one.what), whole], key=lambda one: -one.used)


@click.command(help=_PRUNE, short_help="Remove what nobody needs, or make room.")
@click.option(
    "--to", "to", metavar="SIZE", type=Size(0), help="Until the rest is no larger: the longest unused first."
)
@click.option("--all", "everything", is_flag=True, help="All that is not in use.")
@click.option("--unused", metavar="DAYS", type=Number(float, 0, 1e6), help="What was not used for so many days.")
@runs_option
@click.option("--json", is_flag=True, help="One JSON object on stdout.")
def prune(to: int | None, everything: bool, unused: float | None, root: str | None, json: bool) -> int:
    import msgspec

    from rookery.cli.terminal import format_bytes, one_line, plural
    from rookery.tasks.cache import TaskCache

    cache = TaskCache()
    done = cache.prune(
        budget=0 if everything else to,
        older=time.time() - unused * 86_400 if unused is not None else 0.0,
        keep=_find_needed_keys(cache, find_runs_folder(root)),
    )
    if json:
        click.echo(msgspec.json.encode(done))
        return 0
    for one in _merge_rows(list(done.removed)):
        click.echo(f"removed {one_line(one.what, 80)}, {format_bytes(one.bytes)}")
    count = f"{plural(len(done.removed), 'folder')}, {plural(done.leftovers, 'leftover')}"
    click.echo(f"freed {format_bytes(done.bytes)}: {count}; {format_bytes(done.held)} are kept")
    if done.kept_in_use:
        click.echo(f"{plural(done.kept_in_use, 'folder')} in use stayed", err=True)
    if done.kept_asked:
        click.echo(f"{plural(done.kept_asked, 'folder')} that unfinished runs need stayed", err=True)
    if to is None and unused is None and not everything and done.held:
        click.echo("--to SIZE, --unused DAYS or --all remove more", err=True)
    return 0


def _find_needed_keys(cache: "TaskCache", root: Path) -> set[str]:
    """Keys of what the tasks of unfinished runs lie in."""
    from rookery.journal import RunReader, list_runs

    found: set[str] = set()
    for run in list_runs(root) if root.is_dir() else ():
        if run.status in ("finished", "unreadable"):
            continue
        with RunReader(run.path) as reader:
            found.update(_find_cached_folders(cache, reader.tasks()))
    return found


def _find_cached_folders(cache: "TaskCache", tasks: "Iterable[Task]") -> dict[str, str]:
    """Key → a folder of a task in it."""
    from rookery.tasks.swe import DATA_KEY

    found: dict[str, str] = {}
    for task in tasks:
        described = task.data.get(DATA_KEY)
        folder = str(described.get("folder", "")) if isinstance(described, dict) else ""
        if key := cache.key_at(folder):
            found.setdefault(key, folder)
    return found


def lock_cached_tasks(tasks: "Iterable[Task]", stream: "Mapping[str, Any]") -> None:
    """Keeps what the tasks of a journal lie in, for this process. `UsageError` where some of it is gone."""
    from rookery.cli.terminal import plural
    from rookery.core import UsageError
    from rookery.tasks.cache import TaskCache

    cache = TaskCache()
    found = _find_cached_folders(cache, tasks)
    with contextlib.suppress(OSError):  # one that can only be read is not pruned either
        cache.hold(found)
    gone = [folder for folder in found.values() if not Path(folder).is_dir()]
    if gone:
        said = (stream.get("tasks"), stream.get("task_data"))
        words = " --task-data ".join(str(one) for one in said if one)
        again = f"`rookery tasks list {words}` makes it again" if words else "load its tasks again"
        raise UsageError(
            f"what this run's tasks lie in was removed from the task cache ({plural(len(gone), 'folder')}, "
            f"such as {gone[0]}): {again}, then resume"
        )
