"""What a run is made of, as plain data: kept in the journal, so that a resume makes the same engine again."""

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rookery.core import Limits, Sampling, SandboxSpec, UsageError
from rookery.core.suggestions import suggestion
from rookery.engine.retry import RetryPolicy
from rookery.gateway.public import checked_url, is_url, listened
from rookery.gateway.session import Record
from rookery.gateway.tunnels import tunnel_of
from rookery.upstreams.protocol import UpstreamConfig
from rookery.upstreams.urls import redact

WARM = 32
"""Sandboxes made ahead, at most, where a run does not say: enough to make up for how long each takes."""

S = TypeVar("S", bound=msgspec.Struct)


def struct_option(name: str, value: S | Mapping[str, Any] | None, kind: type[S]) -> S:
    """Return the value of an option of `Engine` as a `kind`.

    A dictionary of fields is converted; None stands for the default. Raises `UsageError` for an unknown field, a
    field of the wrong type, and any other value.
    """
    if isinstance(value, kind):
        return value
    if value is None:
        return kind()
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a {kind.__name__} or a dictionary of its fields, not {value!r:.80}")
    known = kind.__struct_fields__
    for key in value:
        if key not in known:
            fields = ", ".join(sorted(known))
            raise UsageError(f"{name} has no field {key} (its fields are {fields}){suggestion(str(key), known)}")
    try:
        return msgspec.convert(dict(value), kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything but the environment's code, the tasks and the secrets."""

    environment: str
    """An entry point's name, `module:attr` or `file.py[:attr]`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for the environment's class."""
    upstreams: dict[str, UpstreamConfig] = {}
    sandbox: SandboxSpec = SandboxSpec()
    """What it says goes over the environment's own; its provider is settled when an engine is built of it."""
    sandbox_named: tuple[str, ...] = ()
    """Fields of `sandbox` that were said, also where they are the default."""
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    runners: int = msgspec.field(default_factory=lambda: os.cpu_count() or 1)
    concurrency: int = 64
    warm: int | None = None
    """Sandboxes to have ready ahead of need where making one takes long; None: `concurrency`, up to `WARM`."""
    seed: int | None = None
    """Root of all seeds. One that is given is also sent to model servers, as a seed for each call; None: root 0,
    and servers draw as they like."""
    retry: RetryPolicy = RetryPolicy()
    breaker: float | None = 0.5
    block_limit: float = 30.0
    """Seconds a runner's loop may stand still before the runner is ended."""
    record: Record | None = None
    """None: token by token where there is a chat format for it, by messages else."""
    rendering: dict[str, Any] = {}
    """The policy's chat format, as `RenderingConfig` takes it: its tokenizer, its name, its parsers."""
    tool_parser: str = ""
    """How the policy writes tool calls, by the name of a parser; goes into `rendering`."""
    replica_concurrency: int | None = None
    """Calls under way at once at each replica of the policy; None: what the engine reports, or 256."""
    wait_for_upstream: float = 0.0
    """Seconds to wait for a model server that is not there, at the start or under way, before the run stops.
    Attempts that fail meanwhile are not charged."""
    allow_no_tools: bool = False
    """Go on without tools where the chat template has no place for them, instead of refusing to start."""
    listen: str = ""
    """`tcp://HOST:PORT`, for `Engine.connect` from other machines; the run's folder holds the key for it."""
    public: str = ""
    """Where programs on other machines reach the run's gateway: a URL, or `ssh:USER@HOST` for a tunnel."""
    gateway_listen: str = ""
    """`HOST:PORT` where the run's gateway listens, for a public URL to lead to; else a free port of 127.0.0.1."""
    stream: dict[str, Any] = {}
    """`k`, `want`, … of the run's main stream, for `resume`."""

    @property
    def root_seed(self) -> int:
        """What the seeds of rollouts are derived from."""
        return self.seed or 0

    @property
    def recording(self) -> Record:
        """How turns are recorded."""
        return self.record or ("tokens" if self.rendering else "messages")

    def __post_init__(self) -> None:
        _at_least("runners", self.runners, 0)
        _at_least("concurrency", self.concurrency, 1)
        _at_least("warm", self.warm or 0, 0)
        _at_least("retry.attempts", self.retry.attempts, 1)
        if self.breaker is not None and not 0 < self.breaker <= 1:
            raise UsageError(f"breaker must be a rate above 0 and at most 1, or None; got {self.breaker}")
        if self.replica_concurrency is not None:
            _at_least("replica_concurrency", self.replica_concurrency, 1)
        if not 0 <= self.wait_for_upstream < float("inf"):
            raise UsageError(f"wait_for_upstream is a number of seconds from 0 on, got {self.wait_for_upstream}")
        self._check_public()
        if not self.block_limit > 0:
            raise UsageError(f"block_limit must be above 0 seconds, got {self.block_limit}")

    def _check_public(self) -> None:
        """What is wrong with the gateway's addresses, before anything listens."""
        if not is_url(self.public):
            if self.public:
                tunnel_of(self.public, 0)  # says what is wrong with it
            if self.gateway_listen:
                raise UsageError(
                    "where the gateway listens (--gateway-listen) is for a public URL to lead to: name that too "
                    "(--public-url http://HOST:PORT)"
                )
            return
        checked_url(self.public)
        if not self.gateway_listen:
            raise UsageError(
                f"the public URL {redact(self.public)} must lead to the run's gateway, and that listens at any "
                "free port of 127.0.0.1: say where it is to listen (--gateway-listen HOST:PORT)"
            )
        listened(self.gateway_listen)


def with_policy_options(config: EngineConfig) -> EngineConfig:
    """The same with `tool_parser` and `replica_concurrency` where they take effect."""
    changes: dict[str, Any] = {}
    if config.tool_parser:
        named = config.rendering.get("tool_parser", config.tool_parser)
        if named != config.tool_parser:
            raise UsageError(f"two parsers of tool calls are named: {named!r} and {config.tool_parser!r}")
        if not config.rendering and config.record is None:
            raise UsageError("a parser of tool calls (--tool-parser) needs the policy's tokenizer (--tokenizer)")
        changes["rendering"] = {**config.rendering, "tool_parser": config.tool_parser}
    policy = config.upstreams.get("policy")
    if config.replica_concurrency is not None and policy is not None:
        policy = msgspec.structs.replace(policy, concurrency=config.replica_concurrency)
        changes["upstreams"] = {**config.upstreams, "policy": policy}
        changes["runners"] = min(config.runners, config.replica_concurrency)  # each needs a place at a replica
    return msgspec.structs.replace(config, **changes) if changes else config


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise UsageError(f"{name} must be at least {low}, got {value}")
