"""Find plug-ins: objects that installed packages register as entry points."""

from collections.abc import Sequence
from typing import Any

from rookery.core.errors import UsageError, describe, suggestion


def list_plugin_names(group: str) -> list[str]:
    """Return the names of the installed plug-ins in an entry-point group, sorted."""
    from importlib.metadata import entry_points  # slow to import

    return sorted({point.name for point in entry_points(group=group)})


def load_plugin(group: str, name: str, kind: str, *, more: Sequence[str] = (), hint: str = "") -> Any:
    """Return the object of the plug-in `name` in an entry-point group. `kind` says what it is, for messages.

    Raise `UsageError` if it is not installed or cannot be imported. The message lists the installed names and
    `more`, further names that the caller accepts, and ends with `hint`.
    """
    from importlib.metadata import entry_points  # slow to import

    point = next(iter(entry_points(group=group, name=name)), None)
    if point is None:
        known = list(dict.fromkeys((*more, *list_plugin_names(group))))
        raise UsageError(
            f"unknown {kind} {name!r:.80}: known are {', '.join(known) or 'none'}{hint}{suggestion(name, known)}"
        )
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise UsageError(f"the {kind} {name!r} ({point.value}) cannot be imported: {describe(error)}") from error
