"""What the supervisor works with: its settings, the attempts in runners, and a guard for its callbacks."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, Protocol, cast

import msgspec

from rookery.core import RookeryError
from rookery.core.errors import describe
from rookery.engine.channel import Channel
from rookery.engine.fleet import OwnBug
from rookery.engine.retry import RetryPolicy
from rookery.engine.schedule import Pick

P = ParamSpec("P")
log = logging.getLogger("rookery.supervisor")


class _Stoppable(Protocol):
    def stop(self, error: RookeryError) -> None: ...


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine treats rollouts: numbers only."""

    runners: int
    concurrency: int
    seed: int = 0
    retry: RetryPolicy = RetryPolicy()
    breaker: float | None = 0.5
    block_limit: float = 30.0
    wait_for_upstream: float = 0.0


def loudly(method: Callable[P, None]) -> Callable[P, None]:
    """For callbacks of the loop, whose exceptions nobody else would see: our own bug ends the run, in words."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            log.exception("the supervisor failed in %s", method.__name__)
            cast("_Stoppable", args[0]).stop(
                OwnBug(f"Rookery's own code failed in {method.__name__}: {describe(error)}")
            )

    return call


class Flight(msgspec.Struct, eq=False):
    """One attempt that a runner has."""

    channel: Channel
    pick: Pick
    attempt: str
    number: int
    seed: int
