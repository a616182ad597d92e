"""Host functions: functions outside of the sandbox that a worker's cells can call. Runs in the caller's process.

- Arguments and results are JSON-compatible data of limited size. They are checked outside of the sandbox.
- Each call has a deadline. A timeout or an ordinary exception is raised in the cell, which can catch it.
- Exceptions that end an attempt (`Truncation`, `RookeryError`, cancellation) are raised by `Worker.run` instead.
"""

import asyncio
import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rookery.core import RookeryError, Truncation, UsageError
from rookery.core.errors import describe

MAX_RESULT = 16 << 20
MAX_ERROR = 2_000


class HostFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that cells can call, and the time limit of one call.

    A plain `def` runs in a thread. After a timeout the cell continues, but the thread cannot be stopped.
    """

    call: Callable[..., Any]
    timeout: float = 60.0
    """Time limit of one call in seconds."""


def check_functions(functions: Mapping[str, "HostFunction | Callable[..., Any]"]) -> dict[str, HostFunction]:
    """Check names and timeouts; raise `UsageError` if one is invalid. Plain callables get the default timeout."""
    checked = {}
    for name, function in functions.items():
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
            raise UsageError(
                f"functions: {name!r} cannot be the name of a host function: use a Python identifier that does "
                "not start with two underscores"
            )
        host_function = function if isinstance(function, HostFunction) else HostFunction(call=function)
        if not callable(host_function.call) or not host_function.timeout > 0:
            raise UsageError(f"functions: {name!r} needs a callable and a timeout above 0")
        checked[name] = host_function
    return checked


async def call_function(functions: Mapping[str, HostFunction], request: bytes) -> bytes:
    """Decode a cell's request, call the function that it names, and return the encoded response.

    The response is the byte 1 and the result as JSON, or the byte 0, the name of an exception, a newline and its
    message. Only exceptions that end the attempt are raised.
    """
    try:
        name, args, kwargs = msgspec.json.decode(request, type=tuple[str, list[Any], dict[str, Any]])
    except (msgspec.DecodeError, RecursionError) as error:
        return _encode_error("HostFunctionError", f"the call cannot be decoded: {error}")
    function = functions.get(name)
    if function is None:
        return _encode_error("HostFunctionError", f"there is no function {name!r}")
    deadline = asyncio.timeout(function.timeout)
    try:
        async with deadline:
            if inspect.iscoroutinefunction(function.call):
                result = await function.call(*args, **kwargs)
            else:
                result = await asyncio.to_thread(function.call, *args, **kwargs)
                if inspect.isawaitable(result):
                    result = await result
        data = msgspec.json.encode(result)
    except (RookeryError, Truncation):
        raise
    except Exception as error:  # noqa: BLE001  (reported to the cell)
        if deadline.expired():
            return _encode_error("TimeoutError", f"{name}() took longer than {function.timeout:g} s")
        return _encode_error("HostFunctionError", f"{name}(): {describe(error)}")
    if len(data) > MAX_RESULT:
        return _encode_error(
            "HostFunctionError", f"{name}() returned {len(data)} bytes; the limit is {MAX_RESULT}"
        )
    return b"\1" + data


def _encode_error(name: str, message: str) -> bytes:
    return b"\0" + f"{name}\n{message[:MAX_ERROR]}".encode("utf-8", "backslashreplace")
