"""Tasks in a box: a shell, an editor, and grading that the agent cannot reach."""

from rookery.environments.swe.config import PRESETS, Tooling, ToolSettings, tooling_of
from rookery.environments.swe.environment import SweEnvironment, sandbox_for
from rookery.environments.swe.mcp_config import McpServer

__all__ = ["PRESETS", "McpServer", "SweEnvironment", "ToolSettings", "Tooling", "sandbox_for", "tooling_of"]
