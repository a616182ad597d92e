"""The `rlm` environment: recursive language models that work on contexts that are too long for a prompt.

A context is the text, data or files that a task is about. The root model works in a persistent Python or bash
REPL, in a sandbox that contains the context. From code in the REPL it calls functions that query sub-models and
that set its answer. Calls of sub-models (sub-calls) are made by the runner process, not by the sandbox, and each
is recorded as a separate branch of the rollout. One budget of calls, tokens, depth and time covers the whole tree
of calls. The sandbox has no network except the channel for these functions.
"""

from rookery.environments.rlm.environment import RlmEnvironment
from rookery.environments.rlm.options import RlmOptions

__all__ = ["RlmEnvironment", "RlmOptions"]
