"""The `agent` environment: run any command-line agent, unmodified, in a sandbox that can only reach the gateway.

The agent drives its own loop. Every token that it samples is recorded and can be trained on. An agent is
installed once per machine and mounted read-only into every sandbox. Its gateway session is closed before
anything is scored.
"""

from rookery.environments.agent.environment import AgentEnvironment
from rookery.environments.agent.launchers import Install, Launcher, Mcp, find_launcher, list_launchers

__all__ = ["AgentEnvironment", "Install", "Launcher", "Mcp", "find_launcher", "list_launchers"]
