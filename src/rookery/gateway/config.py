"""Configuration of a gateway, as plain data that is passed to each shard when it starts.

Guarantees:
- a record mode that does not work with the policy's upstream or chat format raises `UsageError` before anything
  starts;
- a resolved chat format is the same in every process: its tokenizer is a directory and its template a text.
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
"""Prefix of the reason that a shard writes instead of `ready` if it cannot start."""
SHUTDOWN: Final = b"bye"
"""Written to a shard's standard input before it is closed. If it is missing, the parent was killed."""
EMBEDDED = "embedded"


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Configuration of a gateway. `upstreams` are by role; the role `policy` is required."""

    upstreams: dict[str, UpstreamConfig]
    record: RecordMode = "messages"
    rendering: dict[str, Any] | None = None
    """The chat format, for the record mode `tokens`."""
    shards: int = 1
    public: str = ""
    """Base URL of sessions for their clients; empty for the URL at which they were registered."""

    def __post_init__(self) -> None:
        if "policy" not in self.upstreams:
            raise UsageError("a gateway needs an upstream for the role policy")
        if self.public:
            parse_public_url(self.public)
        if not 1 <= self.shards <= 256:
            raise UsageError(f"shards must be from 1 to 256, not {self.shards}")


def choose_rendering(
    record: RecordMode, rendering: dict[str, Any] | None, policy: UpstreamConfig
) -> dict[str, Any]:
    """Return the chat format for a policy: the configured one, the embedded policy's, or {} if none is needed.

    Raises `UsageError` if record mode, chat format and upstream do not fit together. Opens no file.
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
    """Check the chat format and make it independent of this process. May download a tokenizer.

    Returns the plain settings, and a warning if the chat template ignores tools.
    """
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
    """Settings of one shard, passed over its standard input."""

    config: GatewayConfig
    index: int
    key: str
    folder: str
    """Directory in which sessions and turns are stored."""
    sockets: str
    """Directory of the Unix sockets of the shards."""
    listener: int
    """File descriptor of the public listener, which all shards share."""
    keys: dict[str, str] = {}
    """API keys of upstreams, by role. They are not part of the config, which may be written to a file."""

    @property
    def state(self) -> Path:
        """The pause file, which all shards share."""
        return Path(self.folder) / "state.json"
