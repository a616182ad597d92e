"""How a task is attempted and scored: the base that users subclass, a function form, and the tool loop.

Promises:
- asking an environment for its tasks or tool schemas starts nothing: no sandbox, no pool, no connection;
- everything an attempt opens through its context is closed when the attempt ends, on every path;
- one attempt's context knows nothing of another's: secrets, sandboxes, state and seed are its own.
"""

from rookery.environments.base import Environment, Score, reward_bounds
from rookery.environments.context import Context, Log
from rookery.environments.function import FunctionEnvironment, environment
from rookery.environments.loading import EnvironmentRef, load_environment, reference
from rookery.environments.tools import Tool, ToolEnvironment, tool

__all__ = [
    "Context",
    "Environment",
    "EnvironmentRef",
    "FunctionEnvironment",
    "Log",
    "Score",
    "Tool",
    "ToolEnvironment",
    "environment",
    "load_environment",
    "reference",
    "reward_bounds",
    "tool",
]
