"""The submission's side of a graded call: holds the graded module and carries out the tests' requests on it.

Guarantees:
- the tests are neither in this process nor in its sandbox. It receives names, operations and plain arguments;
- what it answers is data: whatever a submission does here, it can say no more than its functions could return.
"""

from __future__ import annotations

import operator
import sys
import time

from rookery.scoring.inside.codec import NotPlain, Wire, decode, encode, put_module, reduced, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_HELD = 100_000


def _call(function: Any, args: list[Any], named: dict[str, Any]) -> Any:
    return function(*args, **named)


def _awaited(value: Any) -> Any:
    import asyncio

    async def main() -> Any:
        return await value

    return asyncio.run(main())


class Items:
    """The items of a container, handed out in order."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._error: BaseException | None = None

    def take(self, count: int) -> list[Any]:
        """Return the next items, at most so many, and whether these are the last ones."""
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
            self._error = error  # after the items that came before it
        return [items, False]


def _items(value: Any) -> Any:
    iterator = iter(value)
    return None if iterator is value else Items(iterator)


DEEDS: dict[str, Any] = {
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
    "await": _awaited,
}


class Held:
    """Values that stay here; the tests know their numbers, and the module's own by name."""

    def __init__(self) -> None:
        self.module: Any = None
        self._values: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        # Numbers of a process that ended must not mean something here.
        self._first = time.monotonic_ns()

    def refer(self, value: Any) -> Any:
        try:
            return encode(reduced(value), self.refer)
        except NotPlain:
            if len(self._values) >= MOST_HELD:
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
            raise LookupError("what this was went with the process that it was in")
        return self._values[key]


def told(error: BaseException) -> dict[str, Any]:
    """Return an exception as plain data: its class, the built-in class it derives from, its message."""
    base = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        args = encode(list(error.args), _refuse)
    except Exception:
        args = None
    try:
        said = str(error)
    except Exception:
        said = ""
    return {"name": visible(type(error).__name__), "base": base, "args": args, "said": visible(said[:2000])}


def _refuse(value: Any) -> Any:
    return encode(reduced(value), _refuse)


def main() -> None:
    wire = Wire()
    held = Held()
    _, given = wire.receive()
    sys.modules["__main__"] = type(sys)("__main__")
    sys.argv[:] = ["solution.py"]
    sys.path.insert(0, "")
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    try:
        held.module, code = put_module("solution", given["source"])
        exec(code, held.module.__dict__)
    except BaseException as error:
        wire.send("x", told(error))
        return
    wire.send("r", None)
    while True:
        _, asked = wire.receive()
        try:
            answer = _answer(held, asked)
        except BaseException as error:
            answer = {"x": told(error)}
        try:
            wire.send("r", answer)
        except ValueError as error:
            wire.send("r", {"x": told(error)})


def _answer(held: Held, asked: dict[str, Any]) -> dict[str, Any]:
    args = decode(asked["a"], held.find)
    value = DEEDS[asked["do"]](*args)
    answer = {"v": encode(value, held.refer)}
    if asked["do"] == "call":
        # What a function did to the lists it was given is part of what it did.
        after = encode(args[1], held.refer)
        if after != asked["a"][1]:
            answer["m"] = after
    return answer


main()
