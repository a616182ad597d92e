"""Run a submission and execute the operations that the tests request on it. Runs in the submission's sandbox.

The tests are neither in this process nor in its sandbox: the process receives names, operations and arguments
that are plain data. Its responses are data too, so whatever a submission does here, it can send no more than its
functions could return.
"""

from __future__ import annotations

import operator
import sys
import time

from rookery.sandbox_runtime.grader.codec import (
    GraderChannel,
    NotPlain,
    add_module,
    decode,
    encode,
    escape_surrogates,
    reduce_to_base,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_OBJECTS = 100_000


def _call(function: Any, args: list[Any], named: dict[str, Any]) -> Any:
    return function(*args, **named)


def _await(value: Any) -> Any:
    import asyncio

    async def main() -> Any:
        return await value

    return asyncio.run(main())


class Items:
    """Reads the items of a container in order, a few at a time."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._error: BaseException | None = None

    def take(self, count: int) -> list[Any]:
        """Return a list of two elements: at most `count` next items, and whether the container ended."""
        items: list[Any] = []
        if self._error is not None:
            raise self._error
        try:
            while len(items) < count:
                items.append(next(self._iterator))
        except StopIteration:
            return [items, True]
        except BaseException as error:
            if not items:
                raise
            self._error = error  # raised after the items before it
        return [items, False]


def _items(value: Any) -> Any:
    iterator = iter(value)
    return None if iterator is value else Items(iterator)


OPERATIONS: dict[str, Any] = {
    "call": _call,
    "getattr": getattr,
    "setattr": setattr,
    "len": len,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "items": _items,
    "take": Items.take,
    "next": next,
    "bool": bool,
    "str": str,
    "repr": repr,
    "eq": operator.eq,
    "await": _await,
}


class ObjectTable:
    """Objects that the tests refer to: by name for names of the submission's module, otherwise by number."""

    def __init__(self) -> None:
        self.module: Any = None
        self._values: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        # Numbers from an earlier process must not be valid here.
        self._first = time.monotonic_ns()

    def refer(self, value: Any) -> Any:
        try:
            return encode(reduce_to_base(value), self.refer)
        except NotPlain:
            if len(self._values) >= MAX_OBJECTS:
                raise
        number = self._numbers.setdefault(id(value), self._first + len(self._values))
        self._values[number] = value
        return {"t": "ref", "v": number, "n": type(value).__name__}

    def find(self, plain: Any) -> Any:
        key = plain["v"]
        if isinstance(key, str):
            if key not in vars(self.module):
                raise NameError("name " + repr(key) + " is not defined")
            return vars(self.module)[key]
        if key not in self._values:
            raise LookupError("the object was lost when the submission was restarted")
        return self._values[key]


def encode_exception(error: BaseException) -> dict[str, Any]:
    """Encode an exception: the names of its class and nearest built-in base class, its arguments and message."""
    base = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        args = encode(list(error.args), _refuse)
    except Exception:
        args = None
    try:
        message = str(error)
    except Exception:
        message = ""
    return {
        "name": escape_surrogates(type(error).__name__),
        "base": base,
        "args": args,
        "message": escape_surrogates(message[:2000]),
    }


def _refuse(value: Any) -> Any:
    return encode(reduce_to_base(value), _refuse)


def main() -> None:
    channel = GraderChannel()
    objects = ObjectTable()
    _, setup = channel.receive()
    sys.modules["__main__"] = type(sys)("__main__")
    sys.argv[:] = ["solution.py"]
    sys.path.insert(0, "")
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    try:
        objects.module, code = add_module("solution", setup["source"])
        exec(code, objects.module.__dict__)
    except BaseException as error:
        channel.send("x", encode_exception(error))
        return
    channel.send("r", None)
    while True:
        _, request = channel.receive()
        try:
            response = _execute(objects, request)
        except BaseException as error:
            response = {"x": encode_exception(error)}
        try:
            channel.send("r", response)
        except ValueError as error:
            channel.send("r", {"x": encode_exception(error)})


def _execute(objects: ObjectTable, request: dict[str, Any]) -> dict[str, Any]:
    args = decode(request["a"], objects.find)
    value = OPERATIONS[request["do"]](*args)
    response = {"v": encode(value, objects.refer)}
    if request["do"] == "call":
        # Changes that a function made to its arguments are part of its result.
        after = encode(args[1], objects.refer)
        if after != request["a"][1]:
            response["m"] = after
    return response
