"""Inference engines: how a model call reaches a server and comes back.

Promises:
- one call, one answer or one typed error; a truncated answer is never a complete one;
- an upstream is one class behind the `Upstream` protocol, found by entry point (`rookery.upstreams`):
  adding one edits nothing here;
- a configuration that cannot work raises `UsageError` when the upstream is built, in words.
"""

from typing import TYPE_CHECKING, cast

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.upstreams.protocol import (
    CallDelta,
    DecodeTokens,
    Delta,
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    PauseMode,
    ToolSet,
    Upstream,
    UpstreamConfig,
    UpstreamInfo,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CallDelta",
    "DecodeTokens",
    "Delta",
    "ModelReply",
    "ModelRequest",
    "OnDelta",
    "OnWait",
    "PauseMode",
    "ToolSet",
    "Upstream",
    "UpstreamConfig",
    "UpstreamInfo",
    "kind_of",
    "kinds",
    "open_upstream",
    "settled",
]

_GROUP = "rookery.upstreams"
_OF_FILES = frozenset({"embedded"})
"""Kinds whose addresses are paths."""


def kinds() -> tuple[str, ...]:
    """The kinds of upstream that are installed."""
    from importlib.metadata import entry_points  # 20 ms, which `--help` should not pay

    return tuple(sorted({point.name for point in entry_points(group=_GROUP)}))


def open_upstream(config: UpstreamConfig, key: str | None = None) -> Upstream:
    """The upstream that `config` describes; connects to nothing. A key given here goes over `key_env`."""
    from importlib.metadata import entry_points

    kind = kind_of(config)
    found = tuple(entry_points(group=_GROUP, name=kind))
    if not found:
        known = ", ".join(kinds()) or "none: is rookery-rl installed?"
        raise UsageError(f"there is no upstream kind {kind!r}; known: {known}")
    try:
        build = cast("Callable[..., Upstream]", found[0].load())
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the upstream kind {kind!r} cannot be loaded: {describe(error)}") from error
    return build(config, key=key)


def kind_of(config: UpstreamConfig) -> str:
    """The kind that is named, or the one that the first address begins with, as in `embedded:weights/`."""
    first = config.urls[0] if config.urls else ""
    head = first.partition(":")[0]
    if config.kind == UpstreamConfig().kind and "://" not in first and head in kinds():
        return head
    return config.kind


def settled(address: str) -> str:
    """An address that means the same from any folder: `embedded:weights/` with its path made absolute."""
    from pathlib import Path

    kind, mark, path = address.partition(":")
    if not mark or not path or path.startswith("//") or kind not in _OF_FILES:
        return address
    return f"{kind}:{Path(path).expanduser().absolute()}"
