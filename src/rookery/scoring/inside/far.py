"""References to objects of the submission, which stay in its own sandbox. Runs in the tests' sandbox.

Guarantees:
- every operation on a reference is a request to the submission's sandbox. The answer is plain data or a reference;
- a reference equals no plain value, whatever its class says;
- a container that is a reference is read once, as plain data. Iteration, `in`, `len` and indexing all use that
  copy until the next call to the submission, so that the object cannot give different answers to each of them;
- where only the submission can answer (`==` of two references, `in` on something that cannot be iterated, an
  object whose index or length contradicts its iteration), `Far.decided` says so, and the grade is labelled;
- an answer that is not an answer ends the submission's part in the test, as its own crash.
"""

from __future__ import annotations

import builtins

from rookery.scoring.inside.codec import Malformed, NotPlain, Wire, decode, encode, reduced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

MOST_READ = 10_000
"""Items of a container that are read to answer one question about it."""
FIRST_READ = 16
CHANGES = frozenset(("call", "setattr", "setitem", "delitem", "await"))
"""Requests after which an object of the submission may hold something else."""


class Gone(BaseException):
    """The submission ended, or was ended, during a call."""


class Inseparable(BaseException):
    """The tests pass something that is not plain data to the submission."""


class Unreadable(Exception):  # noqa: N818  (says that another way is needed)
    """An object of the submission that cannot be read as a container."""


class Far:
    """Sends requests to the submission."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.gone = ""
        self.detail = ""
        self.decided = ""
        """What the submission itself decided, and the tests could not check."""
        self.epoch = 0
        self._coroutines: dict[int, tuple[Any, Remote]] = {}

    def ask(self, do: str, args: Any) -> Any:
        if self.gone:
            raise Gone
        try:
            plain = [encode(one, self._sent) for one in args]
        except NotPlain as error:
            raise Inseparable(str(error)) from None
        if do in CHANGES:
            self.epoch += 1
        self._wire.send("c", {"do": do, "a": plain})
        try:
            return self._answer(do, args)
        except Malformed as error:
            self.gone, self.detail = "crash", "what it answered is not an answer: " + str(error)
            raise Gone from None

    def _answer(self, do: str, args: Any) -> Any:
        kind, answer = self._wire.receive()
        if kind == "d":
            self.gone, self.detail = answer["verdict"], answer["detail"]
            raise Gone
        if type(answer) is not dict or not ("x" in answer or "v" in answer):
            raise Malformed("neither a value nor an exception")
        if "x" in answer:
            raise _raised(answer["x"], ends=do == "next")
        if "m" in answer and do == "call":
            after = decode(answer["m"], self._received)
            if type(after) is not list:
                raise Malformed("arguments that are not a list")
            for mine, theirs in zip(args[1], after):
                _take_over(mine, theirs)
        return decode(answer["v"], self._received)

    def decide(self, what: str) -> None:
        """Note that the submission's own word was taken for something."""
        self.decided = self.decided or what

    def _sent(self, value: Any) -> Any:
        if id(value) in self._coroutines:  # one of the submission's, passed on
            value = self._coroutines[id(value)][1]
        if type(value) is Remote:
            number = _number(value)
            if number is None:  # by its name: the submission may have been started again meanwhile
                number = object.__getattribute__(value, "_name")
            return {"t": "ref", "v": number}
        return encode(reduced(value), self._sent)

    def _received(self, plain: Any) -> Any:
        if type(plain["v"]) is not int:
            raise Malformed("a reference without a number")
        remote = Remote(self, plain["v"], str(plain.get("n", ""))[:200])
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


def _raised(told: Any, *, ends: bool) -> BaseException:
    """Return the exception that the submission says it raised."""
    if type(told) is not dict or not all(type(told.get(key)) is str for key in ("base", "name", "said")):
        raise Malformed("not an exception")
    args = [told["said"]] if told.get("args") is None else decode(told["args"], lambda _: None)
    if type(args) is not list:
        raise Malformed("not the arguments of an exception")
    kind = getattr(builtins, told["base"], Exception)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)) or kind in (BaseException, GeneratorExit):
        kind = Exception
    if kind in (StopIteration, StopAsyncIteration) and not ends:
        kind = RuntimeError  # out of a call it would end a `map` of the tests', and with it their questions
    try:
        error = kind(*args)
    except Exception:
        error = Exception(told["said"])
    error.__dict__["of_the_submission"] = told["name"] + (": " + told["said"] if told["said"] else "")
    return error


class Contents:
    """The items of a container of the submission, read once and in order, as far as they are asked for."""

    def __init__(self, far: Far, iterator: Remote) -> None:
        self.epoch = far.epoch
        self._far = far
        self._iterator = iterator
        self._items: list[Any] = []
        self._ended = False

    def _take(self, count: int) -> list[Any]:
        answer = self._far.ask("take", [self._iterator, count])
        if type(answer) is list and len(answer) == 2 and type(answer[0]) is list and type(answer[1]) is bool:
            items: list[Any] = answer[0]
            self._ended = answer[1]
            if len(items) <= count and (items or self._ended):
                return items
        self._far.gone, self._far.detail = "crash", "what it answered is not a list of items"
        raise Gone

    def _read(self, count: int) -> bool:
        """Return whether there are so many items. `Unreadable` if more are needed than are read."""
        while len(self._items) < count and not self._ended:
            left = MOST_READ - len(self._items)
            if left <= 0:
                raise Unreadable
            self._items += self._take(min(max(FIRST_READ, len(self._items)), left))
        return len(self._items) >= count

    def whole(self) -> list[Any]:
        """Return all items, or raise `Unreadable`."""
        self._read(MOST_READ + 1)
        return self._items

    def each(self) -> Iterator[Any]:
        at = 0
        try:
            while self._read(at + 1):
                yield self._items[at]
                at += 1
        except Unreadable:  # endless, perhaps: the rest is read item by item, and not kept
            while not self._ended:
                yield from self._take(1)


class Remote:
    """An object of the submission. Every operation is a request; answers are plain data or references."""

    __slots__ = ("_contents", "_ended", "_far", "_made", "_name", "_number")

    def __init__(self, far: Far, number: Any, name: str) -> None:
        object.__setattr__(self, "_far", far)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_contents", None)
        object.__setattr__(self, "_ended", False)
        object.__setattr__(self, "_made", False)

    def __call__(self, *args: Any, **named: Any) -> Any:
        value = _far(self).ask("call", [self, list(args), named])
        if type(value) is Remote and _number(self) is None:
            # By the name that the tests use: an object of a class under test is asked what it is asked for.
            object.__setattr__(value, "_made", object.__getattribute__(self, "_name")[:1].isupper())
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return _far(self).ask("getattr", [self, name])

    def __setattr__(self, name: str, value: Any) -> None:
        _far(self).ask("setattr", [self, name, value])

    def __len__(self) -> int:
        said = int(_far(self).ask("len", [self]))
        return _checked(self, said, len, "its own __len__")  # type: ignore[no-any-return]

    def __getitem__(self, key: Any) -> Any:
        said = _far(self).ask("getitem", [self, key])
        if type(key) not in (int, slice):
            return said
        return _checked(self, said, lambda items: items[key], "its own __getitem__")

    def __setitem__(self, key: Any, value: Any) -> None:
        object.__setattr__(self, "_made", True)  # keys that the tests choose: indexes no longer count items
        _far(self).ask("setitem", [self, key, value])

    def __delitem__(self, key: Any) -> None:
        _far(self).ask("delitem", [self, key])

    def __contains__(self, key: Any) -> bool:
        try:
            contents = _contents(self)
            items = iter(self) if contents is None else contents.whole()
            return any(one is key or one == key for one in items)
        except Exception:
            _far(self).decide("its own __contains__")
            return _far(self).ask("contains", [self, key]) is True

    def __iter__(self) -> Any:
        try:
            contents = _contents(self)
        except Unreadable:
            raise TypeError("the object is not iterable") from None
        return self if contents is None else contents.each()

    def __next__(self) -> Any:
        # An iterator that has ended has ended: it cannot start again with other items.
        if object.__getattribute__(self, "_ended"):
            raise StopIteration
        try:
            return _far(self).ask("next", [self])
        except StopIteration:
            object.__setattr__(self, "_ended", True)
            raise

    def __bool__(self) -> bool:
        return _far(self).ask("bool", [self]) is True

    def __str__(self) -> str:
        return str(_far(self).ask("str", [self]))

    def __repr__(self) -> str:
        return str(_far(self).ask("repr", [self]))

    def __eq__(self, other: object) -> bool:
        # Two of the submission's own: only it knows. One of its own and plain data: its word is worth nothing.
        if type(other) is not Remote:
            return False
        if self is other or (_number(self) is not None and _number(self) == _number(other)):
            return True
        _far(self).decide("its own __eq__")
        return _far(self).ask("eq", [self, other]) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__

    def __await__(self) -> Any:
        yield from ()
        return _far(self).ask("await", [self])


def _far(remote: Remote) -> Far:
    return object.__getattribute__(remote, "_far")  # type: ignore[no-any-return]


def _number(remote: Remote) -> Any:
    return object.__getattribute__(remote, "_number")


def _contents(remote: Remote) -> Contents | None:
    """The items of a container, or None for an iterator. `Unreadable` where it cannot be iterated."""
    far = _far(remote)
    known = object.__getattribute__(remote, "_contents")
    if known is not None and known.epoch == far.epoch:
        return known  # type: ignore[no-any-return]
    try:
        iterator = far.ask("items", [remote])
    except TypeError:
        raise Unreadable from None
    if iterator is None:
        return None
    if type(iterator) is not Remote:
        raise Unreadable
    made = Contents(far, iterator)
    object.__setattr__(remote, "_contents", made)
    return made


def _checked(remote: Remote, said: Any, expected: Any, what: str) -> Any:
    """Return what the object said of itself where its items say the same.

    Where they do not, the items count, unless the object is a mapping, or the tests made it from a class or put
    items into it: then indexes may not be positions, so its own word is taken, and that is noted.
    """
    far = _far(remote)
    try:
        contents = _contents(remote)
        found = None if contents is None else contents.whole()
    except Exception:
        found = None
    if found is not None:
        try:
            told = expected(found)
            if type(told) is type(said) and (told is said or told == said):
                return said
            if not object.__getattribute__(remote, "_made") and not _is_mapping(remote):
                return told
        except IndexError:
            if not object.__getattribute__(remote, "_made") and not _is_mapping(remote):
                raise
    far.decide(what)
    return said


def _is_mapping(remote: Remote) -> bool:
    try:
        _far(remote).ask("getattr", [remote, "keys"])
    except Exception:
        return False
    return True
