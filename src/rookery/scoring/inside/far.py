"""The submission as the tests see it: references to what stays in another sandbox.

Promises:
- all that is done with a reference is asked for over there; what comes back is plain data, or a reference;
- a reference equals no plain value, whatever its class over there says;
- the tests are found to need the submission in their own process by what they hand over alone: nothing that came
  from a submission can bring that about.
"""

from __future__ import annotations

import builtins

from rookery.scoring.inside.codec import NotPlain, Wire, decode, encode, reduced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Gone(BaseException):
    """The submission ended, or was ended, under a call."""


class Inseparable(BaseException):
    """The tests need the submission in their own process."""


class Far:
    """The way to the submission."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.gone = ""
        self.detail = ""
        self._coroutines: dict[int, tuple[Any, Remote]] = {}

    def ask(self, do: str, args: Any) -> Any:
        if self.gone:
            raise Gone
        try:
            plain = [encode(one, self._sent) for one in args]
        except NotPlain as error:
            raise Inseparable(str(error)) from None
        self._wire.send("c", {"do": do, "a": plain})
        kind, answer = self._wire.receive()
        if kind == "d":
            self.gone, self.detail = answer["verdict"], answer["detail"]
            raise Gone
        if "x" in answer:
            raise _raised(answer["x"], ends=do == "next")
        if "m" in answer:
            for mine, theirs in zip(args[1], decode(answer["m"], self._received)):
                _take_over(mine, theirs)
        return decode(answer["v"], self._received)

    def _sent(self, value: Any) -> Any:
        if id(value) in self._coroutines:  # one of the submission's, passed on
            value = self._coroutines[id(value)][1]
        if type(value) is Remote:
            number = object.__getattribute__(value, "_number")
            if number is None:  # by its name: the submission may have been started again meanwhile
                number = object.__getattribute__(value, "_name")
            return {"t": "ref", "v": number}
        return encode(reduced(value), self._sent)

    def _received(self, plain: Any) -> Any:
        remote = Remote(self, plain["v"], str(plain.get("n", "")))
        if plain.get("n") != "coroutine":
            return remote
        made = _coroutine(remote)
        self._coroutines[id(made)] = (made, remote)
        return made


async def _coroutine(remote: Remote) -> Any:
    """`asyncio.run` takes nothing but a real one."""
    return await remote


def _take_over(mine: Any, theirs: Any) -> None:
    if type(mine) is list and type(theirs) is list:
        mine[:] = theirs
    elif type(mine) in (dict, set) and type(theirs) is type(mine):
        mine.clear()
        mine.update(theirs)
    elif type(mine) is bytearray and type(theirs) is bytearray:
        mine[:] = theirs


def _raised(told: dict[str, Any], *, ends: bool) -> BaseException:
    kind = getattr(builtins, str(told["base"]), Exception)
    if kind in (StopIteration, StopAsyncIteration) and not ends:
        kind = RuntimeError  # out of a call it would end a `map` of the tests', and with it their questions
    if not (isinstance(kind, type) and issubclass(kind, BaseException)) or kind in (BaseException, GeneratorExit):
        kind = Exception
    args = [told["said"]] if told["args"] is None else decode(told["args"], lambda _: None)
    try:
        error = kind(*args)
    except Exception:
        error = Exception(told["said"])
    error.__dict__["of_the_submission"] = str(told["name"]) + (": " + str(told["said"]) if told["said"] else "")
    return error


class Remote:
    """Something of the submission's. All it does is asked for; the answers are plain data, or the like of it."""

    __slots__ = ("_far", "_name", "_number")

    def __init__(self, far: Far, number: Any, name: str) -> None:
        object.__setattr__(self, "_far", far)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_name", name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _far(self).ask("call", [self, list(args), named])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return _far(self).ask("getattr", [self, name])

    def __setattr__(self, name: str, value: Any) -> None:
        _far(self).ask("setattr", [self, name, value])

    def __len__(self) -> int:
        return int(_far(self).ask("len", [self]))

    def __getitem__(self, key: Any) -> Any:
        return _far(self).ask("getitem", [self, key])

    def __setitem__(self, key: Any, value: Any) -> None:
        _far(self).ask("setitem", [self, key, value])

    def __delitem__(self, key: Any) -> None:
        _far(self).ask("delitem", [self, key])

    def __contains__(self, key: Any) -> bool:
        return _far(self).ask("contains", [self, key]) is True

    def __iter__(self) -> Any:
        return _far(self).ask("iter", [self])

    def __next__(self) -> Any:
        return _far(self).ask("next", [self])

    def __bool__(self) -> bool:
        return _far(self).ask("bool", [self]) is True

    def __str__(self) -> str:
        return str(_far(self).ask("str", [self]))

    def __repr__(self) -> str:
        return str(_far(self).ask("repr", [self]))

    def __eq__(self, other: object) -> bool:
        # Two of the submission's own: only it knows. One of its own and plain data: its word is worth nothing.
        return type(other) is Remote and (self is other or _far(self).ask("eq", [self, other]) is True)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__

    def __await__(self) -> Any:
        yield from ()
        return _far(self).ask("await", [self])


def _far(remote: Remote) -> Far:
    return object.__getattribute__(remote, "_far")  # type: ignore[no-any-return]
