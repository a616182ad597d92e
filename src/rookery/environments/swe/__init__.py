"""The `swe` environment: software engineering tasks with a shell, an editor and protected grading."""

from rookery.environments.swe.environment import SweEnvironment, sandbox_for
from rookery.environments.swe.mcp_servers import McpServer
from rookery.environments.swe.tool_config import PRESETS, ToolConfig, ToolSettings, parse_tool_config

__all__ = [
    "PRESETS",
    "McpServer",
    "SweEnvironment",
    "ToolConfig",
    "ToolSettings",
    "parse_tool_config",
    "sandbox_for",
]
