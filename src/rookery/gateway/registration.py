"""The registration of a session: the options with which a client creates it over HTTP. Stored on disk.

Used in gateway shards.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Final, TypeAlias

import msgspec

from rookery.core import Limits, Sampling, UsageError
from rookery.core.sandboxes import Network
from rookery.sandboxes.egress.rules import EgressRules
from rookery.telemetry.tracing import is_traceparent

SESSION_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+=-]{0,199}")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Budgets(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Budgets of a session, which apply to its calls of the policy. None means no limit."""

    max_turns: _Count | None = None
    max_sequence_length: _Count | None = None
    """Maximum number of tokens of the prompt and the reply of one turn together."""
    max_tokens: _Count | None = None
    """Maximum number of sampled tokens of all turns together."""
    deadline: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Seconds from the registration until calls are rejected, not counting pauses of the gateway and time that
    calls wait in the queue of the inference engine."""

    def limits(self) -> Limits:
        """Convert the budgets to `Limits`, the type that `Session` takes."""
        return Limits(
            turns=self.max_turns, context=self.max_sequence_length, tokens=self.max_tokens, run=self.deadline
        )


class RoleOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options of a session for one model role: the model's name and sampling parameters.

    An empty name keeps the model that the gateway configures for the role. The sampling parameters override those
    of a client's request.
    """

    model: str = ""
    sampling: Sampling = Sampling()


class Registration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options with which a session is registered.

    `model`, `sampling` and `budgets` are for the policy, `roles` for any model role by name. Sampling parameters
    given here override those of a client's request.
    """

    id: str = ""
    model: str = ""
    roles: dict[str, RoleOptions] = {}
    sampling: Sampling = Sampling()
    budgets: Budgets = Budgets()
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    network: Network = "all"
    """The network that the programs of the session may use, as in `SandboxSpec`. The gateway uses it to decide
    which media URLs in messages it passes to the inference engine."""
    allow: tuple[str, ...] = ()
    """Hosts that programs may reach if `network` is `allow`, as in `SandboxSpec`."""
    traceparent: str = ""
    """W3C trace context of the rollout. The spans of the session's model calls are its children."""


class SessionOpened(msgspec.Struct, frozen=True, tag="opened"):
    """Event that is stored on disk when a session is registered.

    `digest` is the SHA-256 digest of the session's secret, and `at` the Unix time of the registration.
    """

    registration: Registration
    digest: bytes
    at: float
    paused_seconds: float = 0.0
    """Total seconds for which the gateway had been paused before the registration. After a restart, the shard uses
    it to compute how long pauses have lasted since then, because they do not count against the deadline."""


def validate_registration(registration: Registration, roles: Iterable[str]) -> None:
    """Raise `UsageError` if the registration is invalid.

    `roles` are the model roles that the gateway configures.
    """
    if not SESSION_ID.fullmatch(registration.id):
        raise UsageError(
            f"{registration.id[:80]!r} is not a valid session ID: use 1 to 200 letters, digits and ._:@+=-"
        )
    if registration.traceparent and not is_traceparent(registration.traceparent):
        raise UsageError(f"`traceparent` of the registration is not a W3C one: {registration.traceparent!r:.80}")
    known = sorted(roles)
    for name in registration.roles:
        if name not in known:
            raise UsageError(f"no model is configured for the role {name!r}; the roles are {', '.join(known)}")
    if registration.allow and registration.network != "allow":
        raise UsageError(f"`allow` requires the network 'allow', but the network is {registration.network!r}")
    try:
        EgressRules.parse(registration.allow)
    except ValueError as error:
        raise UsageError(f"`allow` of the registration is invalid: {error}") from None
    try:
        registration.budgets.limits()
    except ValueError as error:
        raise UsageError(f"`budgets` of the registration are invalid: {error}") from None
