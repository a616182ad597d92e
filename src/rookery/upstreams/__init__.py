"""Inference engines: how a model call reaches a server and comes back.

Guarantees:
- a model call returns one reply or raises one typed error; a truncated reply is never returned as a complete one;
- an upstream is a class that implements the `Upstream` protocol and is registered as an entry point in the group
  `rookery.upstreams`, so that a plug-in can add one without a change to this package;
- a configuration that cannot work raises `UsageError` when the upstream is constructed, not at the first call.
"""

from rookery.upstreams.protocol import (
    AcceptsPath,
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
from rookery.upstreams.registry import (
    AUTO,
    absolute_address,
    detect_kind,
    kind_of,
    kinds,
    open_upstream,
    own_rendering,
)

__all__ = [
    "AUTO",
    "AcceptsPath",
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
    "detect_kind",
    "kind_of",
    "kinds",
    "open_upstream",
    "own_rendering",
]
