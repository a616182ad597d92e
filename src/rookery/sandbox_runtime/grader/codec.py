"""Encode Python values as JSON, for the calls between tests and a submission. Runs inside the sandboxes of both.

Plain data are values of built-in types, of a few types of the standard library, and numeric NumPy arrays. Other
objects are encoded as references by the callback `refer`.

Guarantees:
- `decode` returns plain data and references only. It never creates an instance of a class of the other side, so no
  method of such a class runs here;
- `decode` accepts only data that `encode` can produce. For all other data it raises `Malformed`. It raises no
  other exception, except those of `refer`;
- numbers, text and containers come back equal to what was encoded, including tuples, sets, bytes, huge integers,
  non-finite numbers and dictionary keys that are not text.
"""

from __future__ import annotations

import json
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DEPTH = 200
MAX_LINE = 64 << 20
SMALL = 1 << 62


DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")


class NotPlain(Exception):  # noqa: N818  (not an error: the value is passed in another way)
    """The value is not plain data and cannot be converted to it."""


class Malformed(ValueError):  # noqa: N818  (what the other side did, not an error of ours)
    """The other side sent data that `encode` cannot have produced."""


def encode(value: Any, refer: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return the value as JSON types. `refer` encodes objects that are not plain data, or raises."""
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
    if kind in (range, slice):
        ends = [value.start, value.stop, value.step]
        return {"t": kind.__name__, "v": [encode(one, refer, depth + 1) for one in ends]}
    module = kind.__module__
    if module == "decimal" and kind.__name__ == "Decimal":
        return {"t": "Decimal", "v": str(value)}
    if module == "fractions" and kind.__name__ == "Fraction":
        return {"t": "Fraction", "v": [hex(value.numerator), hex(value.denominator)]}
    if module == "datetime" and kind.__name__ in ("date", "datetime", "time") and _has_exact_isoformat(value):
        return {"t": kind.__name__, "v": value.isoformat()}
    if module == "datetime" and kind.__name__ == "timedelta":
        return {"t": "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if module == "numpy" and kind.__name__ == "ndarray" and value.dtype.kind in "biufc":
        shape = [int(n) for n in value.shape]
        return {"t": "ndarray", "v": [value.dtype.str, shape, value.tobytes().hex()]}
    return refer(value)


BASE_CONVERSIONS: list[tuple[type, Callable[[Any], Any]]] = [
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
"""Conversions from a subclass to its built-in base type that use no method of the subclass."""


def reduce_to_base(value: Any) -> Any:
    """Convert an instance of a subclass of a built-in type to that type, or a NumPy scalar to a number.

    Raise `NotPlain` for other values.
    """
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
        return value.item()
    for base, convert in BASE_CONVERSIONS:
        if isinstance(value, base):
            return convert(value)
    raise NotPlain("a " + kind.__name__ + " is not plain data")


def _has_exact_isoformat(value: Any) -> bool:
    """Return whether `isoformat` is lossless: the date or time is naive or has a fixed offset from UTC."""
    import datetime as dt

    zone = getattr(value, "tzinfo", None)
    return zone is None or type(zone) is dt.timezone


def decode(plain: Any, refer: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return the value that `plain` encodes. `refer` resolves references.

    Raise `Malformed` if `encode` cannot have produced `plain`.
    """
    kind = type(plain)
    if plain is None or kind in (bool, int, str, float):
        return plain
    if depth > MAX_DEPTH:
        raise Malformed("a value is nested too deep")
    if kind is list:
        return [decode(one, refer, depth + 1) for one in plain]
    if kind is not dict or type(plain.get("t")) is not str or "v" not in plain:
        raise Malformed("the data is not an encoded value")
    name, value = plain["t"], plain["v"]
    if name == "ref":
        return refer(plain)
    if name in ("dict", "tuple", "set", "frozenset", "range", "slice"):
        if type(value) is not list:
            raise Malformed(f"the {name} has no list of items")
        items = [decode(one, refer, depth + (0 if name == "dict" else 1)) for one in value]
        return _decode_or_raise(_decode_container, name, items)
    return _decode_or_raise(_decode_scalar, name, value)


def _decode_or_raise(make: Callable[[Any, Any], Any], name: str, value: Any) -> Any:
    try:
        return make(name, value)
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, ImportError) as error:
        raise Malformed(f"the data is not an encoded {name:.20}: {type(error).__name__}") from None


def _decode_container(name: str, items: list[Any]) -> Any:
    if name == "dict":
        if any(type(pair) is not list or len(pair) != 2 for pair in items):
            raise ValueError("not pairs")
        return dict(items)
    if name in ("range", "slice"):
        if len(items) != 3 or (name == "range" and any(type(one) not in (int, bool) for one in items)):
            raise ValueError("not three numbers")
        return range(*items) if name == "range" else slice(*items)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[name](items)


def _decode_scalar(name: str, value: Any) -> Any:
    if name in ("complex", "Fraction", "timedelta", "ndarray"):
        if type(value) is not list:
            raise ValueError("not a list")
    elif type(value) is not str:
        raise ValueError("not text")
    if name == "int":
        return int(value, 16)
    if name == "float":
        return float(value)
    if name == "complex":
        real, imaginary = value
        return complex(float(real), float(imaginary))
    if name in ("bytes", "bytearray"):
        return (bytes if name == "bytes" else bytearray).fromhex(value)
    if name == "Decimal":
        import decimal

        return decimal.Decimal(value)
    if name == "Fraction":
        import fractions

        return fractions.Fraction(int(value[0], 16), int(value[1], 16))
    if name in ("date", "datetime", "time"):
        import datetime as dt

        return getattr(dt, name).fromisoformat(value)
    if name == "timedelta":
        import datetime as dt

        if len(value) != 3 or any(type(one) is not int for one in value):
            raise ValueError("not three numbers")
        return dt.timedelta(*value)
    if name == "ndarray":
        return _decode_array(*value)
    raise ValueError("an unknown type")


def _decode_array(dtype: Any, shape: Any, data: Any) -> Any:
    import numpy as np

    if type(dtype) is not str or not DTYPE.fullmatch(dtype) or type(shape) is not list or type(data) is not str:
        raise ValueError("not an array")
    array_type, size = np.dtype(dtype), 1
    for one in shape:
        if type(one) is not int or one < 0:
            raise ValueError("not a shape")
        size *= one
    raw = bytes.fromhex(data)
    if len(raw) != size * array_type.itemsize:
        raise ValueError("not as many bytes as the shape needs")
    return (np.frombuffer(raw, dtype=array_type) if raw else np.zeros(0, dtype=array_type)).reshape(shape).copy()


def escape_surrogates(text: str) -> str:
    """Return the text with lone surrogates as escape sequences, because UTF-8 cannot encode them."""
    return text.encode("utf-8", "backslashreplace").decode()


class GraderChannel:
    """Sends and receives lines over private copies of stdin and stdout.

    What the program prints to standard output goes to standard error instead.
    """

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
            raise ValueError(
                f"a value passed between the tests and the submission has {len(data)} bytes as JSON; the maximum "
                f"is {MAX_LINE}: pass or return less data"
            )
        view = memoryview(data)
        while view:
            view = view[self._write(self._out, view) :]

    def receive(self) -> tuple[str, Any]:
        """Return the kind and the data of the next line. Raise `Malformed` if the data is not JSON.

        If the other side has closed the connection, end this process.
        """
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            data = self._read(self._in, 1 << 16)
            if not data:
                os._exit(3)
            parts.append(data)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        try:
            return line[:1].decode(), self._loads(line[1:])
        except (ValueError, RecursionError) as error:
            raise Malformed(f"the line is not JSON: {type(error).__name__}") from None


def add_module(name: str, source: str) -> Any:
    """Create a module from source and add it to `sys.modules`, without running it.

    Return the module and its compiled code. Tracebacks show the lines of the source.
    """
    import linecache
    from types import ModuleType

    path = name + ".py"
    module = ModuleType(name)
    module.__file__ = path
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    sys.modules[name] = module
    return module, compile(source, path, "exec", dont_inherit=True)
