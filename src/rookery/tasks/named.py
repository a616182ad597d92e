"""Tasksets that have a name: each a function that gives their folder, found by entry point.

Promises:
- a taskset is found by its name in the group `rookery.tasksets`; adding one edits nothing here;
- what lies under that name on disk goes first.
"""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from rookery.core import RookeryError, UsageError
from rookery.core.errors import describe

GROUP: Final = "rookery.tasksets"


def tasksets() -> tuple[str, ...]:
    """The names of all that are installed."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def named(name: str) -> Path | None:
    """The folder of task folders of that name; None where nothing is called so."""
    for point in entry_points(group=GROUP, name=name):
        try:
            return Path(point.load()()).absolute()
        except RookeryError:
            raise
        except Exception as error:
            raise UsageError(
                f"the taskset {name!r} ({point.value}) cannot be loaded: {describe(error)}"
            ) from error
    return None
