"""The one door all model traffic passes through; it records every token.

Here is the turn pipeline as a library, for calls made in Python: budgets, pause, recording.

Promises:
- a call that was answered is recorded exactly once, before its answer reaches the caller;
- a spent budget ends the run stage as Truncated, whatever the environment does with the exception;
- a paused door starts no call, and `drained` returns only when none is under way;
- a closed session starts no call and leaves none running.
"""

from rookery.gateway.chat_arguments import ChatArgumentError
from rookery.gateway.session import Model, ModelRole, Session, WaitObserver
from rookery.upstreams.protocol import ModelReply

__all__ = ["ChatArgumentError", "Model", "ModelReply", "ModelRole", "Session", "WaitObserver"]
