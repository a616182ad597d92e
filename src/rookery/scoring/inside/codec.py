"""Plain data as lines of JSON, for both sides of a graded call.

Promises:
- what comes out of `decode` is made of exact built-in types, and of references: no class of the other side's, so
  no method of the other side's runs here;
- what came out of `decode` goes into `encode` again: no value of the other side's can be one that cannot cross;
- numbers, text and containers come back equal to what went in: tuples, sets, bytes, huge integers, numbers that
  are not finite and keys that are no text too.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

MAX_DEPTH = 200
MAX_LINE = 64 << 20
SMALL = 1 << 62


class NotPlain(Exception):  # noqa: N818  (says that another way is needed)
    """A value that cannot cross."""


def encode(value: Any, refer: Callable[[Any], Any], depth: int = 0) -> Any:
    """The value as JSON takes it; what is not plain is given to `refer`, which answers likewise or raises."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is int:
        return value if -SMALL < value < SMALL else {"t": "int", "v": hex(value)}
    if kind is str:
        return value
    if kind is float:
        return value if value - value == 0 else {"t": "float", "v": repr(value)}
    if depth > MAX_DEPTH:
        raise ValueError("a value is nested too deep, or contains itself")
    if kind is list:
        return [encode(one, refer, depth + 1) for one in value]
    if kind in (tuple, set, frozenset):
        return {"t": kind.__name__, "v": [encode(one, refer, depth + 1) for one in value]}
    if kind is dict:
        pairs = [[encode(k, refer, depth + 1), encode(v, refer, depth + 1)] for k, v in value.items()]
        return {"t": "dict", "v": pairs}
    if kind in (bytes, bytearray):
        return {"t": kind.__name__, "v": value.hex()}
    if kind is complex:
        return {"t": "complex", "v": [repr(value.real), repr(value.imag)]}
    if kind is range:
        return {"t": "range", "v": [value.start, value.stop, value.step]}
    module = kind.__module__
    if module in ("decimal", "fractions"):
        return {"t": kind.__name__, "v": str(value)}
    if (
        module == "datetime"
        and kind.__name__ in ("date", "datetime", "time")
        and not getattr(value, "tzinfo", None)
    ):
        return {"t": kind.__name__, "v": value.isoformat()}
    if module == "datetime" and kind.__name__ == "timedelta":
        return {"t": "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if module == "numpy" and kind.__name__ == "ndarray" and value.dtype.kind in "biufc":
        shape = [int(n) for n in value.shape]
        return {"t": "ndarray", "v": [value.dtype.str, shape, value.tobytes().hex()]}
    return refer(value)


BASES: list[tuple[type, Callable[[Any], Any]]] = [
    (int, lambda value: int.__add__(value, 0)),
    (float, lambda value: float.__add__(value, 0.0)),
    (str, lambda value: str.__add__(value, "")),
    (bytes, lambda value: bytes.__add__(value, b"")),
    (complex, lambda value: complex.__add__(value, 0)),
    (dict, lambda value: dict(dict.items(value))),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
]
"""The base itself does the work: what a class made of its methods counts for nothing."""


def reduced(value: Any) -> Any:
    """A value of a class that is a built-in one with something added, as that one; else `NotPlain`."""
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
        return value.item()
    for base, made in BASES:
        if isinstance(value, base):
            return made(value)
    raise NotPlain("a " + kind.__name__ + " is no plain data")


def decode(plain: Any, refer: Callable[[Any], Any]) -> Any:
    """The value; a reference is given to `refer`."""
    if type(plain) is list:
        return [decode(one, refer) for one in plain]
    if type(plain) is not dict:
        return plain
    kind, value = plain["t"], plain["v"]
    if kind == "dict":
        return {decode(k, refer): decode(v, refer) for k, v in value}
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(one, refer) for one in value)
    if kind == "int":
        return int(value, 16)
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(float(value[0]), float(value[1]))
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(value)
    if kind == "range":
        return range(*value)
    if kind in ("Decimal", "Fraction"):
        import decimal
        import fractions

        return decimal.Decimal(value) if kind == "Decimal" else fractions.Fraction(value)
    if kind in ("date", "datetime", "time"):
        import datetime as dt

        return getattr(dt, kind).fromisoformat(value)
    if kind == "timedelta":
        import datetime as dt

        return dt.timedelta(*value)
    if kind == "ndarray":
        import numpy as np

        dtype = np.dtype(value[0])
        if dtype.kind not in "biufc":
            raise ValueError("an array of " + str(dtype))
        return np.frombuffer(bytes.fromhex(value[2]), dtype=dtype).reshape(value[1]).copy()
    return refer(plain)


class Wire:
    """Lines over two descriptors of our own; what the program prints goes to its error stream."""

    def __init__(self) -> None:
        self._in = os.dup(0)
        self._out = os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._rest = b""
        self._read, self._write, self._loads, self._dumps = os.read, os.write, json.loads, json.dumps

    def send(self, kind: str, plain: Any) -> None:
        data = (kind + self._dumps(plain, separators=(",", ":")) + "\n").encode()
        if len(data) > MAX_LINE:
            raise ValueError("a value is too large")
        view = memoryview(data)
        while view:
            view = view[self._write(self._out, view) :]

    def receive(self) -> tuple[str, Any]:
        """A kind and its data; ends the process when the other side has gone."""
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            data = self._read(self._in, 1 << 16)
            if not data:
                os._exit(3)
            parts.append(data)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line[:1].decode(), self._loads(line[1:])


def put_module(name: str, source: str) -> Any:
    """A module that is not run yet, and its code; tracebacks and `inspect` find its lines."""
    import linecache
    from types import ModuleType

    path = name + ".py"
    module = ModuleType(name)
    module.__file__ = path
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    sys.modules[name] = module
    return module, compile(source, path, "exec", dont_inherit=True)
