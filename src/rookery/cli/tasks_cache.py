"""`rookery tasks cached` and `rookery tasks prune`: the cache of unpacked and downloaded task files.

Guarantees:
- files that a live process uses, or that an unfinished run in the directory of runs needs, are never removed;
- a run whose task files are missing from the cache is not resumed until they are restored;
- without options only leftovers of interrupted downloads and unpacking are removed; every removed entry is printed
  with its size.
"""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.config import find_runs_folder, runs_option
from rookery.cli.options import Number, Size, option

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rookery.core import Task
    from rookery.tasks.cache import CacheEntry, TaskCache

_PRUNE = """Remove leftovers of interrupted work from the task cache. --to, --unused and --all remove more.

Files that a live process uses stay, and so do files that an unfinished run in the directory of runs needs. Removed
files are unpacked or downloaded again when they are needed.
"""


@click.command(name="cached", short_help="List the cached files of tasks.")
@option("--json", is_flag=True, help="Print one JSON object per line.")
def list_cache(json: bool) -> int:
    """List the cached files of tasks with their size, their last use and the processes that use them."""
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
    found = cache.list_entries()
    if json:
        for one in found:
            click.echo(msgspec.json.encode(one))
        return 0
    if not found:
        click.echo(f"the task cache {relative_path(cache.folder)} is empty", err=True)
        return 0
    rows = [[dim(word) for word in ("source", "files", "size", "used", "in use by")]]
    for one in _merge_rows(found):
        by = ", ".join(str(pid) for pid in one.used_by[:5]) + ("…" if len(one.used_by) > 5 else "")
        rows.append(
            [bold(one_line(one.what, 60)), f"{one.files:,}", format_bytes(one.bytes), format_age(one.used), by]
        )
    click.echo("\n".join(format_table(rows, right=frozenset({1, 2}))))
    whole = format_bytes(sum(one.bytes for one in found))
    click.echo(dim(f"{whole} in {plural(len(found), 'entry')} of {relative_path(cache.folder)}"), err=True)
    return 0


def _merge_rows(found: "list[CacheEntry]") -> "list[CacheEntry]":
    """Merge the cache entries of rows of a data set into one, because there may be thousands of them."""
    import msgspec

    from rookery.cli.terminal import plural

    rows = [one for one in found if not one.what]
    if not rows:
        return found
    pids = sorted({pid for one in rows for pid in one.used_by})
    whole = msgspec.structs.replace(
        rows[0],
        what=f"files of {plural(len(rows), 'row')}",
        bytes=sum(one.bytes for one in rows),
        files=sum(one.files for one in rows),
        used_by=tuple(pids),
    )
    return sorted([*(one for one in found if one.what), whole], key=lambda one: -one.used)


@click.command(help=_PRUNE, short_help="Remove cached files of tasks.")
@option("--to", "to", type=Size(0), help="Remove the least recently used files until SIZE is left.")
@option("--all", "everything", is_flag=True, help="Remove everything that is not in use.")
@option(
    "--unused", metavar="DAYS", type=Number(float, 0, 1e6), help="Remove files that were not used for DAYS days."
)
@runs_option
@option("--json", is_flag=True, help="Print one JSON object.")
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
    count = f"{plural(len(done.removed), 'entry')}, {plural(done.leftovers, 'leftover')}"
    click.echo(f"freed {format_bytes(done.bytes)}: {count}; {format_bytes(done.remaining)} left")
    if done.kept_in_use:
        click.echo(f"kept {plural(done.kept_in_use, 'entry')} in use", err=True)
    if done.kept_on_request:
        click.echo(f"kept {plural(done.kept_on_request, 'entry')} that unfinished runs need", err=True)
    if to is None and unused is None and not everything and done.remaining:
        click.echo("use --to SIZE, --unused DAYS or --all to remove more", err=True)
    return 0


def _find_needed_keys(cache: "TaskCache", root: Path) -> set[str]:
    """Return the keys of cache entries that unfinished runs in the directory `root` need."""
    from rookery.journal import RunReader, list_runs

    found: set[str] = set()
    for run in list_runs(root) if root.is_dir() else ():
        if run.status in ("finished", "unreadable"):
            continue
        with RunReader(run.path) as reader:
            found.update(_find_cached_folders(cache, reader.tasks()))
    return found


def _find_cached_folders(cache: "TaskCache", tasks: "Iterable[Task]") -> dict[str, str]:
    """Return the keys of the cache entries that these tasks use, each with the directory of one of the tasks."""
    from rookery.tasks.swe import DATA_KEY

    found: dict[str, str] = {}
    for task in tasks:
        described = task.data.get(DATA_KEY)
        folder = str(described.get("folder", "")) if isinstance(described, dict) else ""
        if key := cache.find_key(folder):
            found.setdefault(key, folder)
    return found


def lock_cached_tasks(tasks: "Iterable[Task]", stream: "Mapping[str, Any]") -> None:
    """Register this process as a user of the cache entries of a run's tasks, so that they are not removed.

    Raise `UsageError` if one of them is missing. `stream` are the stored arguments of the run's stream.
    """
    from rookery.cli.terminal import plural
    from rookery.core import UsageError
    from rookery.tasks.cache import TaskCache

    cache = TaskCache()
    found = _find_cached_folders(cache, tasks)
    with contextlib.suppress(OSError):  # a read-only cache cannot be pruned either
        cache.register(found)
    gone = [folder for folder in found.values() if not Path(folder).is_dir()]
    if gone:
        sources = (stream.get("tasks"), stream.get("task_data"))
        arguments = " --task-data ".join(str(source) for source in sources if source)
        again = f"run `rookery tasks list {arguments}`" if arguments else "load its tasks again"
        raise UsageError(
            f"task files of this run are missing from the task cache ({plural(len(gone), 'directory')}, "
            f"for example {gone[0]}): {again} to restore them, then resume"
        )
