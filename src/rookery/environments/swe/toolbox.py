"""The tools of a configuration: built-in ones as it says, others by name."""

from collections.abc import Callable
from typing import Final

from rookery.environments.registered import find_tool
from rookery.environments.schemas import Tool
from rookery.environments.swe.bash import bash_tool, submit_tool
from rookery.environments.swe.config import BUILT_IN, Tooling, ToolSettings
from rookery.environments.swe.editor import edit_tool

_MADE: Final[dict[str, Callable[[Tooling], Tool]]] = {"bash": bash_tool, "edit": edit_tool, "submit": submit_tool}


def toolbox(tooling: Tooling) -> list[Tool]:
    """In the configuration's order; `UsageError` for a name that nobody knows."""
    return [
        _MADE[name](tooling) if name in _MADE else _set(find_tool(name, BUILT_IN), tooling.others.get(name))
        for name in tooling.tools
    ]


def _set(made: Tool, settings: ToolSettings | None) -> Tool:
    if settings is None:
        return made
    return Tool(
        made.function,
        name=settings.name or made.name,
        description=settings.description or made.description,
        timeout=settings.timeout or made.timeout,
    )
