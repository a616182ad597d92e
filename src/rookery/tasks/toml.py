"""Writes plain data as TOML. Python reads it and does not write it.

Promise: what is written reads as the same data; what TOML has no place for raises `ValueError`.
"""

import math
import re
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def dumps(data: dict[str, Any]) -> str:
    lines: list[str] = []
    _table(data, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(data: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    later = []
    for name, value in data.items():
        if isinstance(value, dict) or _is_tables(value):
            later.append((name, value))
        else:
            lines.append(f"{_key(name)} = {_value(value)}")
    for name, value in later:
        here = (*path, name)
        title = ".".join(_key(part) for part in here)
        for one in value if isinstance(value, list) else [value]:
            lines += ["", f"[[{title}]]" if isinstance(value, list) else f"[{title}]"]
            _table(one, here, lines)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"TOML has no number as large as {value}")
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(value)
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(one) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_value(one)}" for name, one in value.items()) + "}"
    raise ValueError(f"TOML has no place for {type(value).__name__}")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    text.encode()  # half a character: `ValueError`
    escaped = (_SHORT.get(char) or (char if char.isprintable() else f"\\U{ord(char):08x}") for char in text)
    return f'"{"".join(escaped)}"'
