"""Decorator for methods that the event loop calls, where no caller would see an exception."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from rookery.core import RookeryError
from rookery.core.errors import describe
from rookery.engine.runner_pool import InternalError

P = ParamSpec("P")
log = logging.getLogger("rookery.engine")


class _CanStop(Protocol):
    def stop(self, error: RookeryError) -> None: ...


S = TypeVar("S", bound=_CanStop)


def stop_run_on_error(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Decorator for callbacks of the event loop: if the method raises, stop the run with an `InternalError`."""

    @wraps(method)
    def call(supervisor: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(supervisor, *args, **kwargs)
        except Exception as error:
            log.exception("the supervisor failed in %s", method.__name__)
            supervisor.stop(InternalError(f"Rookery's supervisor failed in {method.__name__}: {describe(error)}"))

    return call
