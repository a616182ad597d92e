"""Inference engines: how a model call reaches a server and comes back.

Guarantees:
- a model call returns one reply or raises one typed error; a truncated reply is never returned as a complete one;
- an upstream is a class that implements the `Upstream` protocol and is registered as an entry point in the group
  `rookery.upstreams`, so that a plug-in can add one without a change to this package;
- a configuration that cannot work raises `UsageError` when the upstream is constructed, not at the first call.
"""

from typing import TYPE_CHECKING, Any, cast

import msgspec

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
    SuppliesRendering,
    ToolSet,
    Upstream,
    UpstreamConfig,
    UpstreamInfo,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AUTO",
    "CallDelta",
    "DecodeTokens",
    "Delta",
    "ModelReply",
    "ModelRequest",
    "OnDelta",
    "OnWait",
    "PauseMode",
    "SuppliesRendering",
    "ToolSet",
    "Upstream",
    "UpstreamConfig",
    "UpstreamInfo",
    "absolute_address",
    "kind_of",
    "kinds",
    "open_upstream",
    "own_rendering",
]

_GROUP = "rookery.upstreams"
AUTO = "auto"
"""Value of `UpstreamConfig.kind` that requests detection of the server's kind when a run or a gateway starts."""
_PATH_PREFIXES = {"embedded": "embedded", "hf": "torch", "torch": "torch"}
"""Prefix of addresses that are a file path instead of a URL, as in `embedded:weights/`, to the kind of
upstream."""


def kinds() -> tuple[str, ...]:
    """Return the sorted names of the installed kinds of upstream, such as `vllm` and `openai`."""
    from importlib.metadata import entry_points  # 20 ms, which `--help` should not pay

    return tuple(sorted({point.name for point in entry_points(group=_GROUP)}))


def open_upstream(config: UpstreamConfig, key: str | None = None) -> Upstream:
    """Construct the upstream that `config` describes, without connecting to its servers.

    The kind `auto` is treated as `openai`, unless the first URL begins with the name of a kind. `key` is the API
    key; if it is None, the key is read from the environment variable that `config.key_env` names.
    """
    kind = kind_of(config)
    if kind == AUTO:
        kind = "openai"
    return load_kind(kind)(msgspec.structs.replace(config, kind=kind), key=key)


def load_kind(kind: str) -> "Callable[..., Upstream]":
    """Return the class or function that constructs upstreams of `kind`. Raises `UsageError` if it cannot be
    loaded."""
    from importlib.metadata import entry_points

    points = tuple(entry_points(group=_GROUP, name=kind))
    if not points:
        known = ", ".join(kinds()) or "none: is rookery-rl installed?"
        raise UsageError(f"there is no upstream kind {kind!r}; known: {known}")
    try:
        return cast("Callable[..., Upstream]", points[0].load())
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the upstream kind {kind!r} cannot be loaded: {describe(error)}") from error


def own_rendering(config: UpstreamConfig) -> dict[str, Any]:
    """Return the settings of the chat format that belongs to an upstream's model, for example its tokenizer.

    They come from the class method `own_rendering` of the upstream's class (`SuppliesRendering`), if it has one.
    Opens no file and does not connect to a server.
    """
    kind = kind_of(config)
    upstream = load_kind(kind) if kind != AUTO else None
    return upstream.own_rendering(config) if isinstance(upstream, SuppliesRendering) else {}


def kind_of(config: UpstreamConfig) -> str:
    """Return the upstream kind of a configuration.

    This is `config.kind`, unless that is `auto` and the first URL begins with the name of a kind, as in
    `embedded:weights/`.
    """
    first = config.urls[0] if config.urls else ""
    head = first.partition(":")[0]
    head = _PATH_PREFIXES.get(head, head)
    if config.kind == AUTO and "://" not in first and head in kinds():
        return head
    return config.kind


def absolute_address(address: str) -> str:
    """Return an address that is valid in any directory: the path in `embedded:weights/` becomes absolute."""
    from pathlib import Path

    kind, mark, path = address.partition(":")
    if not mark or not path or path.startswith("//") or kind not in _PATH_PREFIXES:
        return address
    return f"{kind}:{Path(path).expanduser().absolute()}"
