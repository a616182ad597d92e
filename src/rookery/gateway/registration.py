"""The registration of a session, as it is sent over HTTP and stored on disk. Used in gateway shards."""

import re
from collections.abc import Iterable
from typing import Annotated, Final, TypeAlias

import msgspec

from rookery.core import Limits, Sampling, UsageError
from rookery.core.sandboxes import Network
from rookery.sandboxes.egress.rules import EgressRules

SESSION_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+=-]{0,199}")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Budgets(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of a session. None means no limit."""

    max_turns: _Count | None = None
    max_sequence_length: _Count | None = None
    """Tokens of prompt and reply together."""
    max_tokens: _Count | None = None
    """Sampled tokens of all turns."""
    deadline: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Seconds from the registration, not counting pauses and waiting in the upstream's queue."""

    def limits(self) -> Limits:
        """Convert to the limits of a session."""
        return Limits(
            turns=self.max_turns, context=self.max_sequence_length, tokens=self.max_tokens, run=self.deadline
        )


class RoleOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options of a session for one model role."""

    model: str = ""
    sampling: Sampling = Sampling()


class Registration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Options of a session. Its sampling parameters override those of its clients' requests."""

    id: str = ""
    model: str = ""
    roles: dict[str, RoleOptions] = {}
    sampling: Sampling = Sampling()
    budgets: Budgets = Budgets()
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    network: Network = "all"
    """The network of the session's programs. It decides which URLs in messages are passed to the inference
    engine."""
    allow: tuple[str, ...] = ()
    """Hosts that the network `allow` can reach, as in `SandboxSpec`."""


class SessionOpened(msgspec.Struct, frozen=True, tag="opened"):
    """Stored on disk when a session is registered."""

    registration: Registration
    digest: bytes
    at: float
    paused_seconds: float = 0.0
    """Total seconds of the gateway's pauses before the registration, to subtract later ones from the deadline."""


def validate_registration(registration: Registration, roles: Iterable[str]) -> None:
    """Raise `UsageError` if the registration is invalid. `roles` are the gateway's model roles."""
    if not SESSION_ID.fullmatch(registration.id):
        raise UsageError(
            f"{registration.id[:80]!r} is not a valid session ID: use 1 to 200 letters, digits and ._:@+=-"
        )
    known = sorted(roles)
    for name in registration.roles:
        if name not in known:
            raise UsageError(f"no model is configured for the role {name!r}; the roles are {', '.join(known)}")
    if registration.allow and registration.network != "allow":
        raise UsageError(f"`allow` requires the network 'allow', but the network is {registration.network!r}")
    try:
        EgressRules.parse(registration.allow)
    except ValueError as error:
        raise UsageError(f"allow: {error}") from None
    try:
        registration.budgets.limits()
    except ValueError as error:
        raise UsageError(f"budgets: {error}") from None
