"""Write data as TOML, which the standard library can only read.

What is written reads as the same data. Values that TOML cannot express raise `ValueError`.
"""

import math
import re
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def dumps(data: dict[str, Any]) -> str:
    lines: list[str] = []
    _write_table(data, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(data: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    later = []
    for name, value in data.items():
        if isinstance(value, dict) or _is_table_list(value):
            later.append((name, value))
        else:
            lines.append(f"{_format_key(name)} = {_format_value(value)}")
    for name, value in later:
        here = (*path, name)
        title = ".".join(_format_key(part) for part in here)
        for one in value if isinstance(value, list) else [value]:
            lines += ["", f"[[{title}]]" if isinstance(value, list) else f"[{title}]"]
            _write_table(one, here, lines)


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _format_string(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"TOML cannot express the number {value}")
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(value)
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format_value(one) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_key(name)} = {_format_value(one)}" for name, one in value.items()) + "}"
    raise ValueError(f"TOML cannot express {type(value).__name__}")


def _format_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _format_string(name)


def _format_string(text: str) -> str:
    text.encode()  # raises `ValueError` for lone surrogates
    escaped = (_SHORT.get(char) or (char if char.isprintable() else f"\\U{ord(char):08x}") for char in text)
    return f'"{"".join(escaped)}"'
