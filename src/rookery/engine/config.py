"""The configuration of an engine, and the settings that runners and the journal get from it.

`EngineConfig` is plain data. The journal stores it without secrets, so that a resume creates the same engine
again.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from rookery.core import Limits, Sampling, SandboxSpec, UsageError
from rookery.core.errors import suggestion
from rookery.core.prices import Price
from rookery.core.sandboxes import Network
from rookery.engine.retry import RetryPolicy
from rookery.engine.runner_protocol import RunSettings
from rookery.environments import EnvironmentRef
from rookery.gateway.public_url import is_url, parse_gateway_url, parse_listen_address, parse_public_url
from rookery.gateway.session import RecordMode
from rookery.gateway.tunnels import make_tunnel
from rookery.sandboxes import is_poolable
from rookery.telemetry import parse_address
from rookery.telemetry.logs import LogFormat
from rookery.telemetry.tracing import TraceSettings
from rookery.trajectories.alternatives import MAX_ALTERNATIVES
from rookery.upstreams import own_rendering
from rookery.upstreams.protocol import UpstreamConfig
from rookery.upstreams.urls import redact

DEFAULT_WARM = 32
"""Maximum number of sandboxes that are created in advance if `EngineConfig.warm` is not set."""


def refuse_training(config: "EngineConfig") -> None:
    """Raise `UsageError` if a run cannot train: it records no token IDs, or has a cache of replies."""
    if config.record == "off":
        raise UsageError("training needs token IDs, and --record off records nothing: use another --record")
    if config.recording == "plain":
        raise UsageError("training needs token IDs: use record='tokens' or 'messages' instead of 'plain'")
    refuse_cached_training(config.cache)


def refuse_cached_training(cache: str) -> None:
    """Raise `UsageError` if a run that is used for training has a cache of replies."""
    if cache:
        raise UsageError(
            "a cache of replies (--cache) is for evaluation only: training needs new samples of current weights"
        )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All settings of a run except the environment's code, the tasks and secrets."""

    environment: str
    """The location of the environment's class: the name of an entry point, `module:attr` or `file.py[:attr]`.
    Empty if the engine got an environment object."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for the environment's class."""
    upstreams: dict[str, UpstreamConfig] = {}
    """The upstream of each model role. The role `policy` is required."""
    sandbox: SandboxSpec = SandboxSpec()
    """Sandbox settings that override those of the environment, field by field. An empty provider is replaced by
    the chosen one when an engine is created."""
    explicit_sandbox_fields: tuple[str, ...] = ()
    """Names of fields of `sandbox` that override the environment's even if they have the default value."""
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    runners: int = msgspec.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Number of runner processes; on a cluster, on each node."""
    cluster: str = ""
    """The cluster on which the runners are started: `ray`, `ray:ADDRESS`, or another entry point of
    `rookery.clusters`. Empty means this machine."""
    shared_files: bool = False
    """True if the nodes of the cluster share the run's directory, at the same path. Runners then write their token
    files there, instead of to their node, from which they are streamed."""
    concurrency: int = 64
    longest_first: bool = False
    """Start long rollouts before short ones. Lengths are predicted from earlier rollouts of the task, or of its
    environment. Which groups are delivered does not change."""
    warm: int | None = None
    """Number of sandboxes that are created before they are needed, if the provider is slow to create them. None
    means `concurrency`, but at most `DEFAULT_WARM`."""
    seed: int | None = None
    """Root from which all random seeds are derived. If it is set, inference engines also get a seed with each
    call. None means root 0 for Rookery's own seeds, and inference engines sample without a seed."""
    retry: RetryPolicy = RetryPolicy()
    breaker: float | None = 0.5
    """The run stops if more than this fraction of the latest attempts failed. None never stops it."""
    block_limit: float = 30.0
    """Seconds that the event loop of a runner may be blocked before the runner is killed."""
    record: RecordMode | Literal["off"] | None = None
    """The mode in which model calls are recorded. None means `tokens` if `rendering` is set or if the policy is
    `hf:PATH`, otherwise `messages`. With `off`, agents call the inference engine directly, for evaluation: no
    gateway is started, nothing is recorded, and no budget of turns or tokens is enforced."""
    pass_key: bool = False
    """True to give the API key of the inference engine to agents, if `record` is `off` and the network of their
    sandbox is not `model`."""
    rendering: dict[str, Any] = {}
    """The policy's chat format: the fields of `RenderingConfig`."""
    top_logprobs: int = 0
    """Number of most likely tokens to record for each token that the policy samples, from 0 to 20. They are the
    per-token extras `top_ids` and `top_logprobs`, which the viewer shows. Inference engines that do not identify
    them by token ID give none."""
    tool_parser: str = ""
    """The name of the parser for the policy's tool calls; copied into `rendering`."""
    replica_concurrency: int | None = None
    """Maximum number of concurrent calls to each replica of the policy. None means what the replica reports, or
    256."""
    wait_for_upstream: float = 0.0
    """Seconds to wait for an inference engine that is not available, at the start or during the run, before the
    run stops. Attempts that fail in the meantime do not count against the retry budget."""
    allow_no_tools: bool = False
    """Run without tools if the chat template does not support them, instead of refusing to start."""
    listen: str = ""
    """Address `tcp://HOST:PORT` on which the engine accepts `Engine.connect` from other machines. The key that
    clients need is in the file `control.key` of the run's directory."""
    public: str = ""
    """The address at which programs on other machines reach the run's gateway: a URL, or `ssh:USER@HOST` for a
    tunnel."""
    gateway_listen: str = ""
    """Address `HOST:PORT` on which the run's gateway listens. It is required if `public` is a URL; otherwise the
    gateway listens on a free port of 127.0.0.1."""
    gateway_url: str = ""
    """URL of a gateway that already runs, for example beside the inference servers. The run then starts no gateway
    of its own. Its admin key is read from the environment variable ROOKERY_GATEWAY_KEY."""
    metrics: str = ""
    """Address `HOST:PORT` on which the engine serves metrics for Prometheus; port 0 picks a free one. Empty: none
    are served."""
    traces: str = ""
    """Base URL of an OTLP/HTTP receiver, such as `http://localhost:4318`, to which all processes send traces.
    Empty: none are sent."""
    trace_content: bool = False
    """True if traces contain prompts, replies, and arguments and results of tools."""
    log_format: LogFormat = "text"
    """The format of the logs of all processes. With `json`, `logs/supervisor.log` also has a line for each event
    and each finished rollout."""
    cache: str = ""
    """Directory of a cache of model replies, for repeated evaluations. Training is refused with it."""
    prices: dict[str, Price] = {}
    """Prices of tokens by model name, from which summaries and exports compute the cost."""
    stream: dict[str, Any] = {}
    """Arguments of `Engine.groups` for the run's main stream, such as `k`, which `resume` uses again."""

    @property
    def root_seed(self) -> int:
        """The seed from which the seeds of all rollouts are derived."""
        return self.seed or 0

    @property
    def recording(self) -> RecordMode:
        """The mode in which model calls of this process are recorded: `record`, or its default if it is None."""
        if self.record == "off":
            return "plain"
        if self.record:
            return self.record
        policy = self.upstreams.get("policy")
        renders = self.rendering or (policy and "tokenizer" in own_rendering(policy))
        return "tokens" if renders else "messages"

    @property
    def trace_settings(self) -> TraceSettings | None:
        """The settings of traces, or None if none are sent."""
        return TraceSettings(endpoint=self.traces, content=self.trace_content) if self.traces else None

    def __post_init__(self) -> None:
        _at_least("runners", self.runners, 0)
        _at_least("concurrency", self.concurrency, 1)
        if self.cluster and not self.runners:
            raise UsageError("a run on a cluster needs runner processes on its nodes: set runners to at least 1")
        if self.shared_files and not self.cluster:
            raise UsageError("shared files (--shared-files) are for runs on a cluster: add --cluster")
        _at_least("warm", self.warm or 0, 0)
        _at_least("retry.attempts", self.retry.attempts, 1)
        if self.breaker is not None and not (_is_number(self.breaker) and 0 < self.breaker <= 1):
            raise UsageError(f"breaker must be above 0 and at most 1, or None, got {self.breaker!r}")
        if not (_is_number(self.top_logprobs) and 0 <= self.top_logprobs <= MAX_ALTERNATIVES):
            raise UsageError(f"top_logprobs must be from 0 to {MAX_ALTERNATIVES}, got {self.top_logprobs!r}")
        if self.replica_concurrency is not None:
            _at_least("replica_concurrency", self.replica_concurrency, 1)
        if not (_is_number(self.wait_for_upstream) and 0 <= self.wait_for_upstream < float("inf")):
            raise UsageError(f"wait_for_upstream must be at least 0 seconds, got {self.wait_for_upstream!r}")
        self._check_public()
        self._check_unrecorded()
        if self.metrics:
            parse_address(self.metrics)
        if self.trace_settings is not None:
            self.trace_settings.check()
        elif self.trace_content:
            raise UsageError("content in traces (--trace-content) needs the endpoint of traces: add --traces URL")
        if not (_is_number(self.block_limit) and self.block_limit > 0):
            raise UsageError(f"block_limit must be above 0 seconds, got {self.block_limit!r}")

    def _check_unrecorded(self) -> None:
        """Raise `UsageError` for settings that only a gateway can apply, if the run has none."""
        if self.record != "off":
            if self.pass_key:
                raise UsageError(
                    "--pass-key is for agents that call the inference engine directly: add --record off"
                )
            return
        policy = self.upstreams.get("policy", UpstreamConfig())
        without_gateway = {
            "--gateway, --public-url and --gateway-listen": self.gateway_url or self.public or self.gateway_listen,
            "--cache": self.cache,
            "--tokenizer, --renderer and --tool-parser": self.rendering or self.tool_parser,
            "--top-logprobs": self.top_logprobs,
            "the sampling parameters": self.sampling != Sampling() or policy.sampling != Sampling(),
            "the limits of turns, tokens and context": self.limits.turns
            or self.limits.tokens
            or self.limits.context,
        }
        if ignored := [names for names, value in without_gateway.items() if value]:
            raise UsageError(
                f"--record off lets agents call the inference engine directly, so {ignored[0]} would have no "
                "effect: remove what you set"
            )

    def _check_public(self) -> None:
        """Raise `UsageError` if the gateway's addresses are wrong, before anything listens."""
        if self.gateway_url:
            parse_gateway_url(self.gateway_url)
            if self.public or self.gateway_listen or self.cluster:
                raise UsageError(
                    "an existing gateway (--gateway) has its own public address and needs no other: remove "
                    "--public-url, --gateway-listen and --cluster"
                )
            return
        if not is_url(self.public):
            if self.public:
                make_tunnel(self.public, 0)  # raises if the address is not valid
            if self.gateway_listen:
                raise UsageError(
                    "a listen address of the gateway (--gateway-listen) needs the public URL that leads to it: "
                    "add --public-url http://HOST:PORT"
                )
            return
        parse_public_url(self.public)
        if not self.gateway_listen:
            raise UsageError(
                f"the public URL {redact(self.public)} must lead to the run's gateway, which listens on a random "
                "port of 127.0.0.1: choose its address with --gateway-listen HOST:PORT"
            )
        parse_listen_address(self.gateway_listen)


def with_policy_options(config: EngineConfig) -> EngineConfig:
    """Return the configuration with `tool_parser` copied into `rendering` and `replica_concurrency` into the
    policy's upstream. The number of runners is reduced to `replica_concurrency`. Raises `UsageError` if two tool
    parsers differ.
    """
    changes: dict[str, Any] = {}
    if config.tool_parser:
        named = config.rendering.get("tool_parser", config.tool_parser)
        if named != config.tool_parser:
            raise UsageError(
                f"two tool parsers are set: {named!r} in `rendering` and {config.tool_parser!r} in `tool_parser`; "
                "remove one"
            )
        if not config.rendering and config.record is None and config.recording != "tokens":
            raise UsageError("a tool parser (--tool-parser) needs the policy's tokenizer: add --tokenizer NAME")
        changes["rendering"] = {**config.rendering, "tool_parser": config.tool_parser}
    policy = config.upstreams.get("policy")
    if config.replica_concurrency is not None and policy is not None:
        policy = msgspec.structs.replace(policy, concurrency=config.replica_concurrency)
        changes["upstreams"] = {**config.upstreams, "policy": policy}
        changes["runners"] = min(config.runners, config.replica_concurrency)  # each needs at least one call slot
    return msgspec.structs.replace(config, **changes) if changes else config


def _at_least(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or value < low:
        raise UsageError(f"{name} must be a whole number of at least {low}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def check_types(config: EngineConfig) -> None:
    """Raise `UsageError` if a field, also one of a nested struct, has a value that its type does not allow.

    Constructors do not check types, and runners refuse such a configuration only when they decode it.
    """
    for name, value, known in (
        ("record", config.record, (*get_args(RecordMode), "off")),
        ("log_format", config.log_format, get_args(LogFormat)),
        ("sandbox.network", config.sandbox.network, get_args(Network)),
    ):
        if value is not None and value not in known:
            hint = suggestion(str(value), known)
            raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}{hint}")
    for field in msgspec.structs.fields(EngineConfig):
        if field.name in ("arguments", "stream"):
            continue
        try:
            msgspec.convert(msgspec.to_builtins(getattr(config, field.name)), field.type)
        except (msgspec.ValidationError, TypeError) as error:  # `to_builtins` raises TypeError
            text, _, path = str(error).partition(" - at `$")
            raise UsageError(f"{field.name}{path.rstrip('`')}: {text[:1].lower()}{text[1:]}") from None


def environment_reference(config: EngineConfig) -> EnvironmentRef:
    """Return a reference with which runner processes import the same environment as this process.

    Relative paths are made absolute, and the import path of this process is included.
    """
    source = config.environment
    path, _, attr = source.rpartition(":") if not source.endswith(".py") else (source, "", "")
    if path.endswith(".py"):
        resolved = str(Path(path).expanduser().resolve())
        source = f"{resolved}:{attr}" if attr else resolved
    return EnvironmentRef(source=source, config=config.arguments, path=tuple(sys.path))


def build_run_settings(
    config: EngineConfig, sandboxes: dict[str, SandboxSpec], folder: Path, environment: EnvironmentRef
) -> RunSettings:
    """Return the settings that are sent to runner processes.

    `sandboxes` are the sandbox specs of the environments of a mixture, or one spec with an empty name.
    The run's sampling parameters fill those that the policy's upstream does not set. If the run has a seed, model
    calls of all roles are seeded.
    """
    policy = config.upstreams["policy"]
    policy = msgspec.structs.replace(policy, sampling=policy.sampling.over(config.sampling))
    upstreams = {**config.upstreams, "policy": policy}
    if config.seed is not None:
        upstreams = {role: msgspec.structs.replace(up, seeded=True) for role, up in upstreams.items()}
    if config.cache:
        path = str(Path(config.cache).expanduser().resolve())
        upstreams = {role: msgspec.structs.replace(up, cache=path) for role, up in upstreams.items()}
    return RunSettings(
        run=folder.name,
        folder=str(folder.resolve()),
        environment=environment,
        upstreams=upstreams,
        sandbox=next(iter(sandboxes.values())),
        sandboxes={} if "" in sandboxes else sandboxes,
        limits=config.limits,
        runner_count=max(1, config.runners),
        warm=_resolve_warm(config, sandboxes.values()),
        record=config.recording,
        rendering=config.rendering,
        top_logprobs=config.top_logprobs,
        public=config.public,
        gateway_listen=config.gateway_listen,
        gateway_url=config.gateway_url,
        unrecorded=config.record == "off",
        metrics=bool(config.metrics),
        traces=config.trace_settings,
        log_format=config.log_format,
        shared_files=config.shared_files,
    )


def _resolve_warm(config: EngineConfig, sandboxes: Iterable[SandboxSpec]) -> int:
    """Return how many sandboxes to create in advance: 0 if no provider is chosen or if all create them fast."""
    if not any(one.provider and is_poolable(one.provider) for one in sandboxes):
        return 0
    return min(DEFAULT_WARM, config.concurrency) if config.warm is None else config.warm


def describe_config(config: EngineConfig) -> dict[str, Any]:
    """Return a configuration as plain data, without secrets and without fields at their defaults.

    Two runs with the same settings have the same description, whether a default was set explicitly or not.
    """
    redacted = msgspec.structs.replace(
        config,
        upstreams={
            role: msgspec.structs.replace(up, urls=tuple(redact(url) for url in up.urls))
            for role, up in config.upstreams.items()
        },
    )
    found: dict[str, Any] = msgspec.to_builtins(redacted)
    for field in msgspec.structs.fields(EngineConfig):  # `omit_defaults` compares by identity, this by value
        if field.default is not msgspec.NODEFAULT and getattr(redacted, field.name) == field.default:
            found.pop(field.encode_name, None)
    return found
