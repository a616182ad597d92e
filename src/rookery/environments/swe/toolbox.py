"""Make the tools of a tool configuration."""

from collections.abc import Callable
from typing import Final

from rookery.environments.swe.bash_tool import bash_tool, submit_tool
from rookery.environments.swe.edit_tool import edit_tool
from rookery.environments.swe.tool_config import BUILT_IN, ToolConfig, ToolSettings
from rookery.environments.tools import Tool, find_tool

_MADE: Final[dict[str, Callable[[ToolConfig], Tool]]] = {
    "bash": bash_tool,
    "edit": edit_tool,
    "submit": submit_tool,
}


def toolbox(tooling: ToolConfig) -> list[Tool]:
    """Return the tools in the configured order; raise `UsageError` for an unknown name."""
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
