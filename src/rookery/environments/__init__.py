"""Environments: how a task is attempted and scored.

The package contains the interface for environment authors (`Environment`, `Context`, `ToolEnvironment`, `tool`,
`environment`) and the built-in environments in its subpackages.
"""

from rookery.environments.base import Environment, FunctionEnvironment, Score, Ungraded, environment, reward_bounds
from rookery.environments.context import Context, Log
from rookery.environments.loader import EnvironmentRef, load_environment, make_reference
from rookery.environments.mixture import Mixture, MixtureEntry
from rookery.environments.multi_agent import MultiAgentEnvironment, Participant
from rookery.environments.tool_environment import ToolEnvironment
from rookery.environments.tools import CallLimit, Tool, tool

__all__ = [
    "CallLimit",
    "Context",
    "Environment",
    "EnvironmentRef",
    "FunctionEnvironment",
    "Log",
    "Mixture",
    "MixtureEntry",
    "MultiAgentEnvironment",
    "Participant",
    "Score",
    "Tool",
    "ToolEnvironment",
    "Ungraded",
    "environment",
    "load_environment",
    "make_reference",
    "reward_bounds",
    "tool",
]
