"""The `agent` environment: run any command-line agent, unmodified, in a sandbox that can only reach the gateway.

The gateway is Rookery's HTTP service for model calls. The agent runs its own loop of model calls and tools. Every
token that it samples through the gateway is recorded and can be trained on. An agent is installed once per machine
and mounted read-only into every sandbox. Its gateway session ends before the attempt's final scoring.
"""

from rookery.environments.agent.environment import AgentEnvironment
from rookery.environments.agent.launchers import Install, Launcher, Mcp, find_launcher, list_launchers

__all__ = ["AgentEnvironment", "Install", "Launcher", "Mcp", "find_launcher", "list_launchers"]
