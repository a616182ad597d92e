"""The `rlm` environment: recursive language models over contexts that are too long for a prompt.

The root model works in a persistent Python or bash REPL, in a sandbox that contains the context. From code it
calls sub-models and sets its answer. Sub-calls run in the runner process, not in the REPL, and each is recorded
as a branch. One budget of calls, tokens, depth and time covers the whole tree of calls. The REPL has no network
except the channel for these functions.
"""

from rookery.environments.rlm.environment import RlmEnvironment
from rookery.environments.rlm.options import RlmOptions

__all__ = ["RlmEnvironment", "RlmOptions"]
