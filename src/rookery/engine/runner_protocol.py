"""The messages between the supervisor and its runner processes.

Values that an environment stored or logged are converted to plain data of bounded size before they are sent, so
that every message can be encoded.
"""

from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import force_setattr

from rookery.core import Attempt, CancelledReason, Extent, Limits, Outcome, SandboxSpec, Task, Timing, Usage
from rookery.core.errors import escape_surrogates
from rookery.engine.plain_data import plain_data, plain_numbers
from rookery.environments.loader import EnvironmentRef
from rookery.gateway.client import GatewayAddress
from rookery.gateway.session import RecordMode
from rookery.sandboxes.protocol import ProviderHome
from rookery.telemetry import Snapshot
from rookery.telemetry.logs import LogFormat
from rookery.telemetry.tracing import TraceSettings
from rookery.upstreams.protocol import PauseMode, UpstreamConfig

NOT_ISOLATED = "sandbox.not_isolated"
"""Kind of the event that sandboxes do not isolate programs. Each runner may send it; a run records it once."""
NO_TOKENS = "upstream.no_tokens"
"""Kind of the event that the policy's server returns no token IDs. Each runner may send it; a run records it
once."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a run that a runner needs. API keys are not included, only the names of their variables."""

    run: str
    folder: str
    environment: EnvironmentRef
    upstreams: dict[str, UpstreamConfig]
    """The upstream of each model role. The role `policy` is always present."""
    sandbox: SandboxSpec
    """The sandbox spec of attempts; in a mixture, that of its first environment."""
    limits: Limits
    sandboxes: dict[str, SandboxSpec] = {}
    """The sandbox specs of the environments of a mixture, by name; empty in other runs."""
    runner_count: int = msgspec.field(default=1, name="share")
    """The number of runners. Each of them gets an equal part of the concurrent calls that an upstream allows."""
    warm: int = 0
    """Number of sandboxes that are created before they are needed, in all runners together."""
    block_warning: float = 1.0
    """Seconds after which a blocked event loop is reported."""
    record: RecordMode = "messages"
    rendering: dict[str, Any] = {}
    top_logprobs: int = 0
    """Number of most likely tokens to record for each token that the policy samples."""
    public: str = ""
    """The address at which programs on other machines reach the gateway: a URL, or the target of a tunnel. Empty
    if they do not."""
    gateway_listen: str = ""
    gateway_url: str = ""
    """URL of an existing gateway that the run uses; empty if it starts its own."""
    unrecorded: bool = False
    """True if agents call the policy's inference engine directly, so that the run has no gateway."""
    metrics: bool = False
    """True if runners send their metrics to the supervisor."""
    traces: TraceSettings | None = None
    """Settings of the traces of runners and the gateway, or None if they send none."""
    log_format: LogFormat = "text"
    shared_files: bool = False
    """True if the nodes of a cluster share the run's directory and write their token files there themselves."""

    def sandbox_of(self, environment: str) -> SandboxSpec:
        """Return the sandbox spec for tasks of the environment with this name in a mixture."""
        return self.sandboxes.get(environment, self.sandbox)

    @property
    def provider_home(self) -> ProviderHome:
        """The directory in which sandbox providers keep the state of this run."""
        return ProviderHome(folder=Path(self.folder) / "sandboxes", run=self.run)


# ---- to a runner


class Hello(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """The first message to a runner. It loads the environment and replies with `Ready` or `RunnerFailed`."""

    settings: RunSettings
    writer: str
    """The runner's name, from which the names of its files with recorded tokens are made."""
    pause: PauseMode | None = None
    """The mode of the current pause, in which the runner starts, or None if the run is not paused."""
    version: int | None = None
    """The policy version of the last weight sync. If it is None, the runner asks the upstream."""
    gateway: GatewayAddress | None = None
    """The address of the run's gateway, or None if the environment needs no gateway."""


class AttemptSpec(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Tells a runner to start an attempt."""

    id: str
    """The rollout's ID and the attempt's number: `GROUP.MEMBER.NUMBER`."""
    number: int
    seed: int
    task: Task
    queued: float = 0.0
    """Seconds that the attempt has waited for a runner."""
    avoid: tuple[str, ...] = ()
    """Replicas that were found hung in earlier attempts of this rollout. They are used only if no other
    works."""
    traceparent: str = ""
    """Context of the rollout's span, if the run sends traces."""

    def describe_end(self, outcome: Outcome, started: float, ended: float, **observed: Any) -> Attempt:
        """Return the record of the attempt after it has ended. `observed` are further fields of the record."""
        return Attempt(id=self.id, number=self.number, outcome=outcome, started=started, ended=ended, **observed)


class Cancel(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Tells a runner to cancel an attempt. Its `AttemptResult` still follows."""

    attempt: str
    reason: CancelledReason


class Pause(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Tells a runner to pause all model calls. The runner replies with `Paused` and the same number."""

    number: int
    mode: PauseMode = "drain"
    timeout: float = 60.0
    """Seconds that running calls get to finish in mode `drain` before they are aborted."""


class Resume(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Tells a runner to resume model calls."""

    version: int | None = None
    """The policy version from now on, or None if it did not change."""


class Stop(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """Tells a runner to cancel all attempts and exit."""


class PrewarmRequest(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The rollouts for which a runner should create sandboxes in advance, in order.

    A request replaces the previous one.
    """

    counts: list[tuple[str, int]]
    """Task IDs, and how many rollouts of each task will start."""
    tasks: list[Task]
    """The tasks that the previous request did not contain."""


# ---- from a runner


class Ready(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """The runner has loaded the environment and accepts attempts."""

    pid: int


class RunnerFailed(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """The runner cannot execute attempts, so the run stops.

    The environment cannot be loaded or lacks a declaration or, if `disk` is True, tokens cannot be written to
    disk.
    """

    detail: str
    traceback: str
    disk: bool = False

    def __post_init__(self) -> None:
        force_setattr(self, "detail", escape_surrogates(self.detail))
        force_setattr(self, "traceback", escape_surrogates(self.traceback))


class AttemptResult(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """An attempt has ended, with these measurements."""

    attempt: Attempt
    """The record of the attempt. The supervisor adds the runner, and whether the attempt is charged."""
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    info: dict[str, Any] = {}
    usage: Usage = Usage()
    timing: Timing = Timing()
    tokens: tuple[Extent, ...] = ()
    minimum: float = 0.0
    """The lowest reward of the environment's declared range."""
    tainted: bool = False
    """True if some code in the runner could not be stopped. The runner is replaced when its other attempts have
    ended."""

    def __post_init__(self) -> None:
        for name in ("info", "metrics"):  # an environment may have replaced the dictionaries
            if type(getattr(self, name)) is not dict:
                force_setattr(self, name, plain_data(getattr(self, name)))

    def to_plain_data(self) -> "AttemptResult":
        """Return the result with the environment's values converted to plain data, so that it can be encoded."""
        metrics, others = plain_numbers(self.metrics)
        info = plain_data(self.info)
        if others:  # never drop a value silently
            info["metrics that are no numbers"] = others
        return msgspec.structs.replace(self, info=info, metrics=metrics, rewards=plain_numbers(self.rewards)[0])


class RunnerEvent(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """An event that the supervisor writes to the run's journal."""

    kind: str
    payload: dict[str, Any]


class ReplicaCalls(msgspec.Struct, frozen=True, array_like=True):
    """State of a replica of an upstream as one runner sees it: whether it is healthy, its calls, and their limit.

    The limit is 0 if it is unknown.
    """

    role: str
    replica: str
    healthy: bool
    calls: int
    limit: int = 0


class RunnerState(msgspec.Struct, frozen=True, array_like=True):
    """The sandboxes and replicas that a runner uses at present, for `Engine.status`."""

    sandboxes: dict[str, int] = {}
    """Number of open sandboxes of attempts, by provider."""
    prewarmed: dict[str, int] = {}
    """Number of sandboxes that were created in advance, by provider."""
    replicas: tuple[ReplicaCalls, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Shows that the runner's event loop is not blocked. Sent once a second."""

    state: RunnerState = RunnerState()
    metrics: Snapshot = {}
    """Metrics of the runner since its last heartbeat, if the run serves metrics."""


class Paused(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """The runner has carried out the `Pause` with this number, or `problem` says why it could not."""

    number: int
    problem: str = ""


class LoopBlocked(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The runner's event loop has been blocked for `seconds`, with the stack and, if known, the attempt.

    A separate thread of the runner sends this message over its own pipe.
    """

    seconds: float
    attempt: str | None
    stack: str


class ImageUpdate(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """The progress of fetching a container image: the current step, and the bytes done and in total."""

    image: str
    step: str
    done: int = 0
    total: int = 0


ToRunner: TypeAlias = Hello | AttemptSpec | Cancel | Pause | Resume | Stop | PrewarmRequest
FromRunner: TypeAlias = (
    Ready | RunnerFailed | AttemptResult | RunnerEvent | Heartbeat | Paused | LoopBlocked | ImageUpdate
)

to_runner_decoder = msgspec.msgpack.Decoder(ToRunner)
from_runner_decoder = msgspec.msgpack.Decoder(FromRunner)
