"""What a gateway is made of, as plain data: given to each shard when it starts."""

from pathlib import Path
from typing import Any

import msgspec

from rookery.core import UsageError
from rookery.gateway.session import Record
from rookery.upstreams.protocol import UpstreamConfig


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A gateway and its upstreams, by role; `policy` is the one that is trained."""

    upstreams: dict[str, UpstreamConfig]
    record: Record = "messages"
    rendering: dict[str, Any] | None = None
    """The chat format, for the record `tokens`."""
    shards: int = 1
    public: str = ""
    """The address that sessions are told, where it is not the one that they were registered at."""

    def __post_init__(self) -> None:
        if "policy" not in self.upstreams:
            raise UsageError("a gateway needs an upstream for the policy")
        if not 1 <= self.shards <= 256:
            raise UsageError(f"a gateway has 1 to 256 shards, not {self.shards}")


class ShardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard is told on its standard input."""

    config: GatewayConfig
    index: int
    key: str
    folder: str
    """What is kept: sessions and turns."""
    sockets: str
    """Where the shards reach each other."""
    listener: int
    """The descriptor of the door that all shards share."""
    keys: dict[str, str] = {}
    """Keys of upstreams, by role: of this process's environment, not of a file."""

    @property
    def state(self) -> Path:
        return Path(self.folder) / "state.json"
