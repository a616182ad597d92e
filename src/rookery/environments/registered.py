"""Tools found by name: registered by entry point, or a function of a module.

Promises:
- a name that cannot be found is refused in words that list what exists, when the environment is made;
- finding a tool starts nothing.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.environments.schemas import Tool

GROUP: Final = "rookery.tools"


def find_tool(name: str, besides: Sequence[str] = ()) -> Tool:
    """A tool by the name it is registered under, or as `module:function`; `UsageError` where there is none.

    `besides`: names that the caller knows of, to be listed too.
    """
    found: Any
    if ":" in name:
        found = _imported(name)
    else:
        points = {point.name: point for point in entry_points(group=GROUP)}
        if name not in points:
            known = ", ".join(dict.fromkeys((*besides, *sorted(points)))) or "none"
            raise UsageError(f"there is no tool {name!r:.80}; there are {known}, or a function as module:function")
        try:
            found = points[name].load()
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"the tool {name!r} ({points[name].value}) cannot be imported: {describe(error)}"
            ) from error
    return found if isinstance(found, Tool) else Tool(found)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"{name!r:.80} names no tool: write module:function")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a console script starts without the folder it is called in
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{module} cannot be imported to find the tool {attribute!r}: {describe(error)}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module} has no {attribute!r} to make a tool of")
        found = getattr(found, part)
    return found
