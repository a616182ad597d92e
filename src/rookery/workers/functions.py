"""Functions of the host's that cells can call.

Promises:
- arguments and results are plain data, of bounded size, checked on this side;
- each call has a deadline; one that passes, or an exception, is told to the cell, which goes on;
- what ends a rollout (a budget that is spent, an error of ours, a cancellation) is raised, never told to a cell.
"""

import asyncio
import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rookery.core import RookeryError, Truncation, UsageError
from rookery.core.errors import describe

MOST_ARGUMENTS = 4 << 20
MOST_RESULT = 16 << 20
MOST_ERROR = 2_000


class HostFunction(msgspec.Struct, frozen=True, kw_only=True):
    """What is called, and for how long. A plain `def` runs in a thread, which its deadline does not end."""

    call: Callable[..., Any]
    timeout: float = 60.0


def checked(functions: Mapping[str, "HostFunction | Callable[..., Any]"]) -> dict[str, HostFunction]:
    """By name; a bare callable has the usual deadline."""
    found = {}
    for name, function in functions.items():
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
            raise UsageError(f"functions: {name!r} is no name that a cell could call")
        made = function if isinstance(function, HostFunction) else HostFunction(call=function)
        if not callable(made.call) or not made.timeout > 0:
            raise UsageError(f"functions: {name!r} needs something to call and a timeout above 0")
        found[name] = made
    return found


async def answer(functions: Mapping[str, HostFunction], asked: bytes) -> bytes:
    """What goes back to the cell: a byte that says whether it went well, then JSON, or a name and words."""
    try:
        name, args, kwargs = msgspec.json.decode(asked, type=tuple[str, list[Any], dict[str, Any]])
    except (msgspec.DecodeError, RecursionError) as error:
        return _refused("HostFunctionError", f"the call could not be read: {error}")
    function = functions.get(name)
    if function is None:
        return _refused("HostFunctionError", f"there is no function {name!r}")
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
    except Exception as error:  # noqa: BLE001  (whatever it raises is the cell's to know)
        if deadline.expired():
            return _refused("TimeoutError", f"{name}() took longer than {function.timeout:g} s")
        return _refused("HostFunctionError", f"{name}(): {describe(error)}")
    if len(data) > MOST_RESULT:
        return _refused("HostFunctionError", f"{name}() returned {len(data)} bytes; {MOST_RESULT} is the most")
    return b"\1" + data


def _refused(kind: str, words: str) -> bytes:
    return b"\0" + f"{kind}\n{words[:MOST_ERROR]}".encode("utf-8", "backslashreplace")
