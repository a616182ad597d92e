"""References to objects of the submission, which stay in its own sandbox. Runs in the tests' sandbox.

Guarantees:
- every operation on a reference is a request to the submission's sandbox. The response is plain data or a
  reference;
- a reference equals no plain value, even if the class of its object defines `__eq__`;
- a container that is a reference is read once, as plain data. Iteration, `in`, `len` and indexing all use that
  copy until the next call to the submission, so that the object cannot give different answers to each of them;
- if only the submission can decide an operation (`==` of two references, `in` on an object that cannot be
  iterated, an object whose index or length contradicts its iteration), `SubmissionClient.decided` records that,
  and the grade is labelled as easier to forge;
- a malformed response counts as a crash of the submission.
"""

from __future__ import annotations

import builtins

from rookery.sandbox_runtime.grader.codec import GraderChannel, Malformed, NotPlain, decode, encode, reduce_to_base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_ITEMS_READ = 10_000
"""Maximum number of items that are read from a container to decide one operation on it."""
FIRST_ITEMS_READ = 16
MUTATING_REQUESTS = frozenset(("call", "setattr", "setitem", "delitem", "await"))
"""Requests after which the objects of the submission may have changed."""


class SubmissionEnded(BaseException):
    """The submission's process ended or was killed while the tests used it."""


class NotPlainArgument(BaseException):
    """The tests pass a value to the submission that is not plain data and cannot be sent."""


class Unreadable(Exception):  # noqa: N818  (not an error: another operation is tried)
    """The object of the submission cannot be read as a container."""


class SubmissionClient:
    """Sends the operations of the tests to the submission's sandbox and returns their results."""

    def __init__(self, channel: GraderChannel) -> None:
        self._channel = channel
        self.end_verdict = ""
        self.detail = ""
        self.decided = ""
        """The method of the submission whose answer could not be checked; empty if there was none."""
        self.epoch = 0
        self._coroutines: dict[int, tuple[Any, Remote]] = {}

    def request(self, operation: str, args: Any) -> Any:
        if self.end_verdict:
            raise SubmissionEnded
        try:
            plain = [encode(one, self._encode_reference) for one in args]
        except NotPlain as error:
            raise NotPlainArgument(str(error)) from None
        if operation in MUTATING_REQUESTS:
            self.epoch += 1
        self._channel.send("c", {"do": operation, "a": plain})
        try:
            return self._receive_result(operation, args)
        except Malformed as error:
            self.end_verdict, self.detail = "crash", "the submission's response is malformed: " + str(error)
            raise SubmissionEnded from None

    def _receive_result(self, operation: str, args: Any) -> Any:
        kind, response = self._channel.receive()
        if kind == "d":
            self.end_verdict, self.detail = response["verdict"], response["detail"]
            raise SubmissionEnded
        if type(response) is not dict or not ("x" in response or "v" in response):
            raise Malformed("it contains neither a value nor an exception")
        if "x" in response:
            raise _build_exception(response["x"], ends=operation == "next")
        if "m" in response and operation == "call":
            after = decode(response["m"], self._decode_reference)
            if type(after) is not list:
                raise Malformed("the changed arguments are not a list")
            for mine, theirs in zip(args[1], after):
                _copy_contents(mine, theirs)
        return decode(response["v"], self._decode_reference)

    def decide(self, what: str) -> None:
        """Record the method of the submission whose answer could not be checked. Only the first one is kept."""
        self.decided = self.decided or what

    def _encode_reference(self, value: Any) -> Any:
        if id(value) in self._coroutines:  # a coroutine of the submission that is passed back
            value = self._coroutines[id(value)][1]
        if type(value) is Remote:
            number = _number(value)
            if number is None:  # by name: the submission may have been restarted meanwhile
                number = object.__getattribute__(value, "_name")
            return {"t": "ref", "v": number}
        return encode(reduce_to_base(value), self._encode_reference)

    def _decode_reference(self, plain: Any) -> Any:
        if type(plain["v"]) is not int:
            raise Malformed("a reference has no number")
        remote = Remote(self, plain["v"], str(plain.get("n", ""))[:200])
        if plain.get("n") != "coroutine":
            return remote
        made = _coroutine(remote)
        self._coroutines[id(made)] = (made, remote)
        return made


async def _coroutine(remote: Remote) -> Any:
    """Wrap a reference to a coroutine of the submission, because `asyncio.run` accepts real coroutines only."""
    return await remote


def _copy_contents(mine: Any, theirs: Any) -> None:
    if type(mine) is list and type(theirs) is list:
        mine[:] = theirs
    elif type(mine) in (dict, set) and type(theirs) is type(mine):
        mine.clear()
        mine.update(theirs)
    elif type(mine) is bytearray and type(theirs) is bytearray:
        mine[:] = theirs


def _build_exception(report: Any, *, ends: bool) -> BaseException:
    """Return the exception that the submission reports, as an instance of a built-in class.

    `ends` says that `StopIteration` is allowed. Raise `Malformed` if the report is not valid.
    """
    if type(report) is not dict or not all(type(report.get(key)) is str for key in ("base", "name", "message")):
        raise Malformed("the reported exception is incomplete")
    args = [report["message"]] if report.get("args") is None else decode(report["args"], lambda _: None)
    if type(args) is not list:
        raise Malformed("the arguments of the exception are not a list")
    kind = getattr(builtins, report["base"], Exception)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)) or kind in (BaseException, GeneratorExit):
        kind = Exception
    if kind in (StopIteration, StopAsyncIteration) and not ends:
        kind = RuntimeError  # raised by a call, it would silently end a `map` of the tests
    try:
        error = kind(*args)
    except Exception:
        error = Exception(report["message"])
    error.__dict__["of_the_submission"] = report["name"] + (": " + report["message"] if report["message"] else "")
    return error


class RemoteItems:
    """The items of a container in the submission's sandbox, read once, in order, and only as far as needed."""

    def __init__(self, client: SubmissionClient, iterator: Remote) -> None:
        self.epoch = client.epoch
        self._client = client
        self._iterator = iterator
        self._items: list[Any] = []
        self._ended = False

    def _take(self, count: int) -> list[Any]:
        response = self._client.request("take", [self._iterator, count])
        if (
            type(response) is list
            and len(response) == 2
            and type(response[0]) is list
            and type(response[1]) is bool
        ):
            items: list[Any] = response[0]
            self._ended = response[1]
            if len(items) <= count and (items or self._ended):
                return items
        self._client.end_verdict, self._client.detail = "crash", "the submission's response is not a list of items"
        raise SubmissionEnded

    def _read(self, count: int) -> bool:
        """Read until there are `count` items or the container ends; return whether there are that many.

        Raise `Unreadable` if more than `MAX_ITEMS_READ` would be read.
        """
        while len(self._items) < count and not self._ended:
            left = MAX_ITEMS_READ - len(self._items)
            if left <= 0:
                raise Unreadable
            self._items += self._take(min(max(FIRST_ITEMS_READ, len(self._items)), left))
        return len(self._items) >= count

    def read_all(self) -> list[Any]:
        """Return all items. Raise `Unreadable` if there are more than `MAX_ITEMS_READ`."""
        self._read(MAX_ITEMS_READ + 1)
        return self._items

    def iterate(self) -> Iterator[Any]:
        at = 0
        try:
            while self._read(at + 1):
                yield self._items[at]
                at += 1
        except Unreadable:  # possibly endless: the rest is read item by item and not stored
            while not self._ended:
                yield from self._take(1)


class Remote:
    """A reference to an object in the submission's sandbox.

    Every operation sends a request there. Results are plain data or references.
    """

    __slots__ = ("_client", "_contents", "_ended", "_made", "_name", "_number")

    def __init__(self, client: SubmissionClient, number: Any, name: str) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_contents", None)
        object.__setattr__(self, "_ended", False)
        object.__setattr__(self, "_made", False)

    def __call__(self, *args: Any, **named: Any) -> Any:
        value = _get_client(self).request("call", [self, list(args), named])
        if type(value) is Remote and _number(self) is None:
            # The tests created it from a class under test (by its name): its own methods decide.
            object.__setattr__(value, "_made", object.__getattribute__(self, "_name")[:1].isupper())
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return _get_client(self).request("getattr", [self, name])

    def __setattr__(self, name: str, value: Any) -> None:
        _get_client(self).request("setattr", [self, name, value])

    def __len__(self) -> int:
        reported = int(_get_client(self).request("len", [self]))
        return _check_report(self, reported, len, "its own __len__")  # type: ignore[no-any-return]

    def __getitem__(self, key: Any) -> Any:
        reported = _get_client(self).request("getitem", [self, key])
        if type(key) not in (int, slice):
            return reported
        return _check_report(self, reported, lambda items: items[key], "its own __getitem__")

    def __setitem__(self, key: Any, value: Any) -> None:
        object.__setattr__(self, "_made", True)  # the tests choose the keys: indexes are not positions
        _get_client(self).request("setitem", [self, key, value])

    def __delitem__(self, key: Any) -> None:
        _get_client(self).request("delitem", [self, key])

    def __contains__(self, key: Any) -> bool:
        try:
            contents = _read_contents(self)
            items = iter(self) if contents is None else contents.read_all()
            return any(one is key or one == key for one in items)
        except Exception:
            _get_client(self).decide("its own __contains__")
            return _get_client(self).request("contains", [self, key]) is True

    def __iter__(self) -> Any:
        try:
            contents = _read_contents(self)
        except Unreadable:
            raise TypeError("the object is not iterable") from None
        return self if contents is None else contents.iterate()

    def __next__(self) -> Any:
        # An exhausted iterator stays exhausted: it cannot continue with other items.
        if object.__getattribute__(self, "_ended"):
            raise StopIteration
        try:
            return _get_client(self).request("next", [self])
        except StopIteration:
            object.__setattr__(self, "_ended", True)
            raise

    def __bool__(self) -> bool:
        return _get_client(self).request("bool", [self]) is True

    def __str__(self) -> str:
        return str(_get_client(self).request("str", [self]))

    def __repr__(self) -> str:
        return str(_get_client(self).request("repr", [self]))

    def __eq__(self, other: object) -> bool:
        # Two remote objects: only the submission can compare them. A remote object never equals plain data.
        if type(other) is not Remote:
            return False
        if self is other or (_number(self) is not None and _number(self) == _number(other)):
            return True
        _get_client(self).decide("its own __eq__")
        return _get_client(self).request("eq", [self, other]) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__

    def __await__(self) -> Any:
        yield from ()
        return _get_client(self).request("await", [self])


def _get_client(remote: Remote) -> SubmissionClient:
    return object.__getattribute__(remote, "_client")  # type: ignore[no-any-return]


def _number(remote: Remote) -> Any:
    return object.__getattribute__(remote, "_number")


def _read_contents(remote: Remote) -> RemoteItems | None:
    """Return the items of a referenced container, or None if it is an iterator.

    Raise `Unreadable` if the object cannot be iterated.
    """
    client = _get_client(remote)
    known = object.__getattribute__(remote, "_contents")
    if known is not None and known.epoch == client.epoch:
        return known  # type: ignore[no-any-return]
    try:
        iterator = client.request("items", [remote])
    except TypeError:
        raise Unreadable from None
    if iterator is None:
        return None
    if type(iterator) is not Remote:
        raise Unreadable
    made = RemoteItems(client, iterator)
    object.__setattr__(remote, "_contents", made)
    return made


def _check_report(remote: Remote, reported: Any, expected: Any, what: str) -> Any:
    """Check what an object reports about itself, such as its length, against its items, and return the result.

    If the items contradict the report, the value that follows from the items is returned. If the object is a
    mapping, or the tests created it from a class or put items into it, indexes may not be positions. Then its
    own report is returned and `what` is recorded as a decision of the submission.
    """
    client = _get_client(remote)
    try:
        contents = _read_contents(remote)
        found = None if contents is None else contents.read_all()
    except Exception:
        found = None
    if found is not None:
        try:
            report = expected(found)
            if type(report) is type(reported) and (report is reported or report == reported):
                return reported
            if not object.__getattribute__(remote, "_made") and not _is_mapping(remote):
                return report
        except IndexError:
            if not object.__getattribute__(remote, "_made") and not _is_mapping(remote):
                raise
    client.decide(what)
    return reported


def _is_mapping(remote: Remote) -> bool:
    try:
        _get_client(remote).request("getattr", [remote, "keys"])
    except Exception:
        return False
    return True
