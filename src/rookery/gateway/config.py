"""Configuration of a gateway, as plain data that is passed to each of its shard processes at startup.

Guarantees:
- `choose_rendering` raises `UsageError` if the record mode does not work with the policy's upstream or with the
  chat format, before a process is started;
- a resolved chat format means the same in every process: it names its tokenizer by a directory and contains the
  text of its chat template.

The chat format, or rendering, is the tokenizer and the chat template (or model family) with which messages are
converted to prompt token IDs.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import UsageError
from rookery.gateway.public_url import parse_public_url
from rookery.gateway.session import RecordMode
from rookery.telemetry.logs import LogFormat
from rookery.telemetry.tracing import TraceSettings
from rookery.upstreams import kind_of, own_rendering
from rookery.upstreams.protocol import UpstreamConfig

START_FAILED: Final = b"wrong: "
"""Prefix of the line with the reason that a shard writes to standard output, instead of `ready`, if it cannot
start."""
SHUTDOWN: Final = b"bye"
"""The parent writes this to a shard's standard input before closing it. If it is missing, the parent was
killed."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Configuration of a gateway.

    `upstreams` maps each model role to its inference engine; the role `policy` is required.
    """

    upstreams: dict[str, UpstreamConfig]
    record: RecordMode = "messages"
    rendering: dict[str, Any] | None = None
    """Settings of the chat format (tokenizer and chat template); only for the record mode `tokens`."""
    top_logprobs: int = 0
    """Number of most likely tokens to record for each token that the policy samples."""
    shards: int = 1
    public: str = ""
    """URL at which clients reach the gateway; the base URLs of sessions start with it. If empty, it is taken from
    the `Host` header of the request that registers the session."""
    traces: TraceSettings | None = None
    """The receiver of the shards' traces, or None if they send none."""
    log_format: LogFormat = "text"
    run: str = ""
    """Name of the run in traces and logs; empty if the gateway does not belong to one."""

    def __post_init__(self) -> None:
        if "policy" not in self.upstreams:
            raise UsageError(
                "the gateway configuration has no upstream for the role 'policy': add one to `upstreams`"
            )
        if self.public:
            parse_public_url(self.public)
        if not 1 <= self.shards <= 256:
            raise UsageError(f"the number of gateway shards must be from 1 to 256, not {self.shards}")


def choose_rendering(
    record: RecordMode, rendering: dict[str, Any] | None, policy: UpstreamConfig
) -> dict[str, Any]:
    """Return the settings of the policy's chat format (tokenizer and chat template).

    In the record mode `tokens` these are the configured settings `rendering`, on top of those of the policy's
    model (`own_rendering`). In other modes no chat format is needed, and the result is empty. Raises `UsageError`
    if record mode, chat format and upstream do not fit together. Opens no file.
    """
    if record != "tokens":
        if rendering:
            raise UsageError(
                f"a tokenizer or chat format works only with --record tokens: remove it to record {record}"
            )
        return {}
    own = own_rendering(policy)
    chosen = own | (rendering or {})
    if not chosen:
        raise UsageError(
            "--record tokens needs the policy's tokenizer to render prompts: pass a directory or a hub name with "
            "--tokenizer, or use --record messages, with which the server renders them"
        )
    if "name" in own and chosen != own:
        raise UsageError(
            f"the {kind_of(policy)} policy has its own tokenizer and chat format: remove the configured ones"
        )
    return chosen


def resolve_rendering(
    record: RecordMode, rendering: dict[str, Any] | None, policy: UpstreamConfig
) -> tuple[dict[str, Any], str]:
    """Check the policy's chat format, and resolve its tokenizer and template so that other processes can open it.

    Returns the resolved settings as plain data ({} if the record mode needs no chat format), and a warning if the
    chat template ignores tools, else an empty string. May download a tokenizer.
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
    """Settings of one shard process, which it reads from standard input. `key` is the key of the admin API."""

    config: GatewayConfig
    index: int
    key: str
    folder: str
    """Directory in which the gateway stores sessions and turns."""
    sockets: str
    """Directory of the Unix sockets on which the shards listen."""
    listener: int
    """File descriptor of the public listening socket, which all shards share; negative for none."""
    keys: dict[str, str] = {}
    """API keys of upstreams, by model role. They are not in `config`, because it may be written to a file."""

    @property
    def state(self) -> Path:
        """Path of the pause file, in which the shards store the policy version and whether calls are paused."""
        return Path(self.folder) / "state.json"
