"""Agents: any command-line agent, unmodified, in a box whose only network is the gateway.

Promises:
- the agent drives its own loop; every token it sampled is its attempt's, and trains;
- an exit code, a deadline or a spent budget is the policy's, and is scored; a lost box is infra;
- an agent is installed once for a machine, and every box has it read-only;
- after its end an agent reaches nothing: its door is shut before anything is scored.
"""

from rookery.environments.agent.environment import AgentEnvironment
from rookery.environments.agent.launchers import Install, Launcher, Mcp, find_launcher, known_launchers

__all__ = ["AgentEnvironment", "Install", "Launcher", "Mcp", "find_launcher", "known_launchers"]
