"""The gateway: every model call goes through it, over HTTP or in Python, and every sampled token is recorded.

This package has two front ends for one turn pipeline (`pipeline`). Environments call models in-process, in the
runner (`session`). External agents call them over HTTP; their requests are served by gateway shards, which are
separate processes (`shard`), in the APIs of several providers (`dialects`).

Guarantees:
- a call that was answered is recorded exactly once, before its reply reaches the caller;
- if a budget is exhausted, the rollout ends as Truncated, even if the environment catches the exception;
- a closed session starts no model call, and closing it cancels the calls in flight.
"""

from rookery.gateway.chat_arguments import ChatArgumentError
from rookery.gateway.session import Model, ModelRole, Session, WaitObserver
from rookery.upstreams.protocol import ModelReply

__all__ = ["ChatArgumentError", "Model", "ModelReply", "ModelRole", "Session", "WaitObserver"]
