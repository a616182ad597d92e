"""Format a value as text of limited length without formatting all of it. Runs in the interpreter of a worker.

- A value that fits is shown exactly as `repr` shows it.
- If a value does not fit, only the part that is shown is formatted; the number of missing items is added.
- The `__repr__` of other classes is called in full, and its result is truncated.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_DEPTH = 40
_PLAIN: dict[Any, tuple[str, str]] = {
    list.__repr__: ("[", "]"),
    tuple.__repr__: ("(", ")"),
    set.__repr__: ("{", "}"),
    frozenset.__repr__: ("frozenset({", "})"),
    dict.__repr__: ("{", "}"),
}
_TEXTS = (str, bytes, bytearray)
_DIGITS = 4000


def format_value(value: object, most: int) -> str:
    """Return a representation of a value, truncated to about `most` characters."""
    if _fits(value, most):
        return truncate(repr(value), most)
    return truncate("".join(_Walk(most).walk(value, 0)), most + most // 8 + 200)


def truncate(text: str, most: int) -> str:
    """Return a text of at most `most` characters unchanged.

    Of a longer text, return the head and the tail, with the number of missing characters between them.
    """
    if len(text) <= most:
        return text
    tail = most // 4
    head = most - tail
    return f"{text[:head]}\n… {len(text) - most} characters …\n{text[len(text) - tail :]}"


def _dataclass_fields(value: object) -> dict[str, object] | None:
    """Return the fields of a dataclass with a generated `__repr__`; None for other objects."""
    kind = type(value)
    made = getattr(kind.__repr__, "__wrapped__", None)
    names = kind.__dict__.get("__dataclass_fields__")
    if made is None or not isinstance(names, dict) or not getattr(made, "__qualname__", "").endswith("__repr__"):
        return None
    missing = object()
    pairs = (
        (name, getattr(value, name, missing)) for name, field in names.items() if getattr(field, "repr", True)
    )
    return {name: item for name, item in pairs if item is not missing}


def _list_parts(value: object) -> Iterable[object] | None:
    """Return the objects that a value's `repr` contains; None for values that are not containers."""
    if isinstance(value, dict):
        return (part for pair in dict.items(value) for part in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if type(value).__name__ in ("deque", "mappingproxy", "dict_keys", "dict_values", "dict_items", "array"):
        return value  # type: ignore[return-value]
    fields = _dataclass_fields(value)
    return None if fields is None else fields.values()


def _fits(value: object, most: int) -> bool:
    """Return whether the `repr` of a value probably has at most `most` characters."""
    left = most
    todo = [iter((value,))]
    while todo:
        for item in todo[-1]:
            if isinstance(item, _TEXTS):
                left -= len(item) + 2
            elif isinstance(item, int) and item.bit_length() > 3 * _DIGITS:
                return False
            else:
                left -= 3
                parts = _list_parts(item)
                if parts is not None:
                    if left > 0 and len(todo) < _DEPTH:
                        todo.append(iter(parts))
                        break
                    return False
            if left <= 0:
                return False
        else:
            todo.pop()
    return True


class _Walk:
    """Formats a nested value part by part until the limit of characters is reached."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.inside: set[int] = set()

    def text(self, text: str) -> str:
        self.left -= len(text)
        return text

    def walk(self, value: Any, depth: int) -> Iterable[str]:
        if isinstance(value, _TEXTS) and type(value).__repr__ in (
            str.__repr__,
            bytes.__repr__,
            bytearray.__repr__,
        ):
            yield self.text(self.format_text(value))
            return
        if isinstance(value, int) and value.bit_length() > 3 * _DIGITS:
            yield self.text(f"<an integer of about {(value.bit_length() - 1) * 30102999566 // 10**11 + 1} digits>")
            return
        parts = _list_parts(value)
        if parts is None:
            yield self.text(truncate(repr(value), max(self.left, 80)))
            return
        if id(value) in self.inside or depth >= _DEPTH:
            yield self.text("...".join(_PLAIN.get(type(value).__repr__, ("", ""))))
            return
        self.inside.add(id(value))
        try:
            yield from self.format_container(value, parts, depth)
        finally:
            self.inside.discard(id(value))

    def format_text(self, value: Any) -> str:
        if len(value) <= self.left:
            return repr(value)
        most = max(self.left, 20)
        unit = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:most]!r}… {len(value) - most} {unit} more"

    def format_container(self, value: Any, parts: Iterable[object], depth: int) -> Iterable[str]:
        kind = type(value)
        begin, end = _PLAIN.get(kind.__repr__, ("", ""))
        fields = (
            _dataclass_fields(value)
            if not begin and not isinstance(value, (dict, list, tuple, set, frozenset))
            else None
        )
        if not begin:
            begin, end = (kind.__name__ + "(", ")") if fields is not None else (kind.__name__ + "([", "])")
            if isinstance(value, dict):
                begin, end = kind.__name__ + "({", "})"
        yield self.text(begin)
        mapping = fields if fields is not None else value if isinstance(value, dict) else None
        size = len(mapping) if mapping is not None else len(value)
        items: Iterable[Any] = mapping.items() if mapping is not None else parts
        for at, item in enumerate(items):
            if at:
                yield self.text(", ")
            if self.left <= 0:
                yield self.text(f"… {size - at} more")
                break
            if mapping is None:
                yield from self.walk(item, depth + 1)
            else:
                if fields is not None:
                    yield self.text(item[0] + "=")
                else:
                    yield from self.walk(item[0], depth + 1)
                    yield self.text(": ")
                yield from self.walk(item[1], depth + 1)
        yield self.text(end)
