"""What a gateway is made of, as plain data: given to each shard when it starts.

Promises:
- a way of recording that cannot work with the policy's upstream or chat format is said in words before anything
  starts;
- what was settled here opens the same in every process: its tokenizer is a folder, its template a text.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import UsageError
from rookery.gateway.public_url import parse_public_url
from rookery.gateway.session import RecordMode
from rookery.upstreams import kind_of
from rookery.upstreams.protocol import UpstreamConfig

START_FAILED: Final = b"wrong: "
"""What a shard that cannot start says before its reason, instead of `ready`."""
SHUTDOWN: Final = b"bye"
"""What a shard is told before its standard input ends; without it, who started it was killed."""
EMBEDDED = "embedded"


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A gateway and its upstreams, by role; `policy` is the one that is trained."""

    upstreams: dict[str, UpstreamConfig]
    record: RecordMode = "messages"
    rendering: dict[str, Any] | None = None
    """The chat format, for the record `tokens`."""
    shards: int = 1
    public: str = ""
    """The address that sessions are told, where it is not the one that they were registered at."""

    def __post_init__(self) -> None:
        if "policy" not in self.upstreams:
            raise UsageError("a gateway needs an upstream for the policy")
        if self.public:
            parse_public_url(self.public)
        if not 1 <= self.shards <= 256:
            raise UsageError(f"shards must be from 1 to 256, not {self.shards}")


def choose_rendering(
    record: RecordMode, rendering: dict[str, Any] | None, policy: UpstreamConfig
) -> dict[str, Any]:
    """The chat format for a policy: what was said, or the embedded policy's own; nothing where none is needed.

    Raises `UsageError` where what was said cannot work together; opens nothing.
    """
    if record != "tokens":
        if rendering:
            raise UsageError(f"a tokenizer or chat format requires --record tokens: remove it to record {record}")
        return {}
    own = kind_of(policy) == EMBEDDED
    if not rendering:
        if own:
            return {"name": EMBEDDED}
        raise UsageError(
            "--record tokens needs the policy's tokenizer to render prompts: pass a directory or a hub name with "
            "--tokenizer, or use --record messages, with which the server renders them"
        )
    if own and rendering != {"name": EMBEDDED}:
        raise UsageError("the embedded policy has its own tokenizer and chat format: configure no other")
    return rendering


def resolved_rendering(
    record: RecordMode, rendering: dict[str, Any] | None, policy: UpstreamConfig
) -> dict[str, Any]:
    """Return the settings of `resolve_rendering` without its warning."""
    return resolve_rendering(record, rendering, policy)[0]


def resolve_rendering(
    record: RecordMode, rendering: dict[str, Any] | None, policy: UpstreamConfig
) -> tuple[dict[str, Any], str]:
    """As `resolved_rendering`, and why tools of calls would be lost; empty where they are not."""
    chosen = choose_rendering(record, rendering, policy)
    if not chosen:
        return {}, ""
    from rookery.gateway.chat_renderers import open_renderer_config, parse_renderer_config, resolve_config
    from rookery.gateway.chat_renderers.tool_prompt import dropped_tools_message

    config = resolve_config(parse_renderer_config(chosen))
    opened = open_renderer_config(config)
    plain: dict[str, Any] = msgspec.to_builtins(config)
    lost = dropped_tools_message(opened.name) if getattr(opened, "drops_tools", False) else ""
    return plain or {"name": config.name}, lost


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
