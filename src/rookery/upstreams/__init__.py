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
from rookery.upstreams.protocol import ModelReply, ModelRequest, Upstream, UpstreamConfig, UpstreamInfo

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ModelReply", "ModelRequest", "Upstream", "UpstreamConfig", "UpstreamInfo", "kinds", "open_upstream"]

_GROUP = "rookery.upstreams"


def kinds() -> tuple[str, ...]:
    """The kinds of upstream that are installed."""
    from importlib.metadata import entry_points  # 20 ms, which `--help` should not pay

    return tuple(sorted({point.name for point in entry_points(group=_GROUP)}))


def open_upstream(config: UpstreamConfig, key: str | None = None) -> Upstream:
    """The upstream that `config` describes; connects to nothing. A key given here goes over `key_env`."""
    from importlib.metadata import entry_points

    found = tuple(entry_points(group=_GROUP, name=config.kind))
    if not found:
        known = ", ".join(kinds()) or "none: is rookery installed?"
        raise UsageError(f"there is no upstream kind {config.kind!r}; known: {known}")
    try:
        build = cast("Callable[..., Upstream]", found[0].load())
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the upstream kind {config.kind!r} cannot be loaded: {describe(error)}") from error
    return build(config, key=key)
