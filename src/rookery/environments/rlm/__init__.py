"""RLM: recursive language models over contexts that no prompt could hold.

The root model works in a persistent REPL, Python or bash, where the context lies; it calls sub-models from code,
and answers from code.

Promises:
- the context lies in the sandbox and in no prompt;
- sub-calls run outside of the REPL's process, through the gateway, each as a branch of its own, trained or not;
- calls, tokens, depth and time are budgets of the whole tree, enforced and visible at every level;
- what code does to its REPL is an observation: only a REPL that cannot be brought back ends the attempt, as infra;
- the REPL has no network but its one channel, with a secret of its own.
"""

from rookery.environments.rlm.environment import RlmEnvironment
from rookery.environments.rlm.options import Options

__all__ = ["Options", "RlmEnvironment"]
