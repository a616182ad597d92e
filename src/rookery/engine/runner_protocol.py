"""The messages between the supervisor and its runners.

Everything that an environment stored or logged is converted to plain, bounded data before it is sent, so that
every message can be encoded.
"""

from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import force_setattr

from rookery.core import CancelledReason, Extent, Limits, Outcome, SandboxSpec, Task, Timing, Usage
from rookery.core.errors import escape_surrogates
from rookery.engine.plain_data import plain_data, plain_numbers
from rookery.environments.loader import EnvironmentRef
from rookery.gateway.client import GatewayAddress
from rookery.gateway.session import RecordMode
from rookery.sandboxes.protocol import ProviderHome
from rookery.upstreams.protocol import PauseMode, UpstreamConfig

NOT_ISOLATED = "sandbox.not_isolated"
"""Event: programs run without isolation. Each process sends it, a run records it once."""
NO_TOKENS = "upstream.no_tokens"
"""Event: the policy's server returns no token IDs. Each runner process sends it once, a run records it once."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a runner needs to know about its run. It contains no API keys, only their variables."""

    run: str
    folder: str
    environment: EnvironmentRef
    upstreams: dict[str, UpstreamConfig]
    """By model role; `policy` is always present."""
    sandbox: SandboxSpec
    limits: Limits
    share: int = 1
    """The number of runners. Each may use this fraction (1/share) of an upstream's concurrency."""
    warm: int = 0
    """Sandboxes to create before they are needed, over all runners together."""
    block_warning: float = 1.0
    """Seconds after which a blocked event loop is reported."""
    record: RecordMode = "messages"
    rendering: dict[str, Any] = {}
    public: str = ""
    """The gateway's address for other machines: a URL, or the target of a tunnel."""
    gateway_listen: str = ""

    @property
    def provider_home(self) -> ProviderHome:
        """Where sandbox providers keep the state of this run."""
        return ProviderHome(folder=Path(self.folder) / "sandboxes", run=self.run)


# ---- to a runner


class Hello(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """The first message: the runner loads the environment and replies with `Ready` or `RunnerFailed`."""

    settings: RunSettings
    writer: str
    """The runner's name, used for its token files."""
    pause: PauseMode | None = None
    """Start paused in this mode."""
    version: int | None = None
    """The policy version of the last weight sync; None: ask the upstream."""
    gateway: GatewayAddress | None = None
    """The run's gateway, if the environment needs one."""


class AttemptSpec(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Start an attempt."""

    id: str
    """The rollout's ID and the attempt's number: `GROUP.MEMBER.NUMBER`."""
    number: int
    seed: int
    task: Task
    queued: float = 0.0
    """Seconds that it has waited for a runner."""
    avoid: tuple[str, ...] = ()
    """Model replicas that earlier attempts of this rollout found hung."""


class Cancel(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Cancel an attempt."""

    attempt: str
    reason: CancelledReason


class Pause(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Pause all model calls; the runner replies with `Paused`."""

    number: int
    mode: PauseMode = "drain"
    timeout: float = 60.0
    """Seconds that running calls get to finish before they are aborted."""


class Resume(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Resume model calls."""

    version: int | None = None
    """The policy version from now on; None: unchanged."""


class Stop(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """End all attempts and exit."""


class PrewarmRequest(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The rollouts that will start at this runner next, in order. Replaces the previous request."""

    counts: list[tuple[str, int]]
    """Task IDs, and how many rollouts of each task will start."""
    tasks: list[Task]
    """The tasks that the previous request did not contain."""


# ---- from a runner


class Ready(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """The environment is loaded; the runner accepts attempts."""

    pid: int


class RunnerFailed(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """No attempt can run here: the environment cannot be loaded, or (`disk`) token data cannot be written."""

    detail: str
    traceback: str
    disk: bool = False

    def __post_init__(self) -> None:
        force_setattr(self, "detail", escape_surrogates(self.detail))
        force_setattr(self, "traceback", escape_surrogates(self.traceback))


class AttemptResult(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """An attempt has ended."""

    id: str
    outcome: Outcome
    started: float
    ended: float
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    info: dict[str, Any] = {}
    usage: Usage = Usage()
    timing: Timing = Timing()
    tokens: tuple[Extent, ...] = ()
    policy_loss: bool = False
    """The sandbox was lost during the policy's own command, and the host is healthy."""
    minimum: float = 0.0
    """The lowest reward of the environment's range."""
    evidence: dict[str, Any] = {}
    """Observations that decided the outcome, as in `Attempt`."""
    tainted: bool = False
    """Some code of this attempt could not be stopped: the runner must be replaced after its other attempts."""

    def __post_init__(self) -> None:
        for name in ("info", "metrics"):  # an environment may have replaced the dictionaries
            if type(getattr(self, name)) is not dict:
                force_setattr(self, name, plain_data(getattr(self, name)))

    def to_plain_data(self) -> "AttemptResult":
        """Return the result with the environment's values converted, so that every encoder accepts it."""
        metrics, others = plain_numbers(self.metrics)
        info = plain_data(self.info)
        if others:  # never drop a value silently
            info["metrics that are no numbers"] = others
        return msgspec.structs.replace(self, info=info, metrics=metrics, rewards=plain_numbers(self.rewards)[0])


class RunnerEvent(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """An event for the journal."""

    kind: str
    payload: dict[str, Any]


class Heartbeat(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """The event loop is running. Sent once a second."""


class Paused(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """No model call is running any more, or `problem` says why that is not possible."""

    number: int
    problem: str = ""


class LoopBlocked(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The event loop has not run for `seconds`. The watchdog thread sends this over its own pipe."""

    seconds: float
    attempt: str | None
    stack: str


class ImageUpdate(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """The progress of fetching an image, in bytes."""

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
