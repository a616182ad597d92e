"""A run's settings in one line, so that two runs can be told apart."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

_HIDDEN: Final = frozenset({"environment", "stream.path", "sandbox_named"})
"""Shown elsewhere, or only for a resume."""
_SHORT: Final = ("stream.", "upstreams.", "sampling.", "arguments.")
"""Prefixes that add nothing for a reader."""


def flat_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a configuration as `name: value` pairs. What is at its default is not in a configuration."""
    return {_short(name): value for name, value in _flat(config, "") if name not in _HIDDEN and value}


def differing(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of settings that are not the same in all runs, short ones first. One run has them all."""
    names = dict.fromkeys(name for run in runs for name in run)
    found = [name for name in names if len(runs) == 1 or len({run.get(name) for run in runs}) > 1]
    return sorted(found, key=lambda name: max(len(run.get(name, "")) for run in runs))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str):
        yield name, value
    elif isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        yield name, ",".join(value)
    else:
        yield name, msgspec.json.encode(value).decode()


def _short(name: str) -> str:
    for prefix in _SHORT:
        name = name.removeprefix(prefix)
    return name
