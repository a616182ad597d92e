"""Small things of the standard library, without their modules. Stand-alone: the keeper and its boxes use it.

Every box is a fork of the keeper and copies the pages of it that it touches. `json`, `contextlib`, `socket` and
`signal` bring `re`, `enum`, `functools` and `collections` along: two megabytes more, and a third of a fork's time.

Promises:
- `dumps` and `loads` are JSON: what the one writes the other reads, and so does everybody else.
"""

import _json
import _socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections import deque
    from collections.abc import Sequence
    from typing import Any
else:
    import _signal
    from _collections import deque

__all__ = ["_signal", "deque", "dumps", "loads", "receive", "send", "suppress"]


class suppress:  # noqa: N801  (as the one it stands for)
    """As `contextlib.suppress`."""

    __slots__ = ("_kinds",)

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self._kinds)


class _Reading:
    """How the scanner is to read."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def dumps(value: "Any") -> bytes:
    """Of plain data whose names are text."""
    return _text(value).encode()


def _text(value: "Any") -> str:
    if isinstance(value, str):
        text: str = _json.encode_basestring_ascii(value)
        return text
    if isinstance(value, dict):
        return "{" + ",".join([f"{_text(name)}:{_text(item)}" for name, item in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join([_text(item) for item in value]) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


_scan = _json.make_scanner(_Reading)  # type: ignore[arg-type]


def loads(data: bytes) -> "Any":
    """What `dumps` or any encoder without spaces around the whole wrote."""
    return _scan(data.decode(), 0)[0]


def send(sock: "_socket.socket", data: bytes, fds: "Sequence[int]" = ()) -> None:
    """A message and descriptors with it."""
    if fds:
        rights = struct.pack(f"{len(fds)}i", *fds)
        sock.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    else:
        sock.send(data)


def receive(sock: "_socket.socket", size: int, most: int) -> tuple[bytes, list[int]]:
    """A message and its descriptors, none of which a program that we start would inherit."""
    data, extra, _, _ = sock.recvmsg(size, _socket.CMSG_SPACE(most * 4), _socket.MSG_CMSG_CLOEXEC)
    rights = [raw for level, kind, raw in extra if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)]
    return data, [fd for raw in rights for fd in struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4])]
