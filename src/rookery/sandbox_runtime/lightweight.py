"""Replacements for small parts of `json`, `contextlib`, `socket` and `signal` that import almost nothing.

They run in the keeper and in pid 1 of sandboxes. Every sandbox is a fork of the keeper and copies each memory
page that it touches: the modules of the standard library would import `re`, `enum`, `functools` and
`collections`, which is two megabytes more and a third of the time of a fork.
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

__all__ = ["_signal", "deque", "dumps", "loads", "receive_message", "send_message", "suppress"]


class suppress:  # noqa: N801  (named like `contextlib.suppress`)
    """Context manager like `contextlib.suppress`."""

    __slots__ = ("_types",)

    def __init__(self, *types: type[BaseException]) -> None:
        self._types = types

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> bool:
        return error_type is not None and issubclass(error_type, self._types)


class _ScannerOptions:
    """Options of the JSON scanner, by the attribute names of `json.JSONDecoder`."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def dumps(value: "Any") -> bytes:
    """Encode plain data as JSON. Keys of dictionaries must be strings."""
    return _encode(value).encode()


def _encode(value: "Any") -> str:
    if isinstance(value, str):
        text: str = _json.encode_basestring_ascii(value)
        return text
    if isinstance(value, dict):
        return "{" + ",".join([f"{_encode(key)}:{_encode(item)}" for key, item in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join([_encode(item) for item in value]) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    raise TypeError(f"cannot encode {type(value).__name__} as JSON")


_scan = _json.make_scanner(_ScannerOptions)  # type: ignore[arg-type]


def loads(data: bytes) -> "Any":
    """Decode JSON that has no white space before the value."""
    return _scan(data.decode(), 0)[0]


def send_message(sock: "_socket.socket", data: bytes, fds: "Sequence[int]" = ()) -> None:
    """Send a message over a Unix socket, together with file descriptors."""
    if fds:
        rights = struct.pack(f"{len(fds)}i", *fds)
        sock.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    else:
        sock.send(data)


def receive_message(sock: "_socket.socket", size: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Receive a message and its file descriptors, which are closed on exec."""
    data, ancillary, _, _ = sock.recvmsg(size, _socket.CMSG_SPACE(max_fds * 4), _socket.MSG_CMSG_CLOEXEC)
    rights = [raw for level, kind, raw in ancillary if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)]
    return data, [fd for raw in rights for fd in struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4])]
