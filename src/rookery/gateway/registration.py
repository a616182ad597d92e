"""What a session is registered as: plain data, as it comes over HTTP and lies on disk."""

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
    """What a session may use up. None: no limit."""

    max_turns: _Count | None = None
    max_sequence_length: _Count | None = None
    """Tokens of prompt and answer together."""
    max_tokens: _Count | None = None
    """Tokens sampled, over all turns."""
    deadline: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Seconds from the registration, without pauses and waiting for a place."""

    def limits(self) -> Limits:
        return Limits(
            turns=self.max_turns, context=self.max_sequence_length, tokens=self.max_tokens, run=self.deadline
        )


class RoleOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a session wants one of its roles."""

    model: str = ""
    sampling: Sampling = Sampling()


class Registration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a session is. Its sampling goes over what a client asks for."""

    id: str = ""
    model: str = ""
    roles: dict[str, RoleOptions] = {}
    sampling: Sampling = Sampling()
    budgets: Budgets = Budgets()
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    network: Network = "all"
    """The network of the session's programs: which URLs inside messages are handed to the engine."""
    allow: tuple[str, ...] = ()
    """The hosts of the network `allow`, as in `SandboxSpec`."""


class SessionOpened(msgspec.Struct, frozen=True, tag="opened"):
    """On disk: a session began."""

    registration: Registration
    digest: bytes
    at: float
    paused_seconds: float = 0.0
    """Seconds of the gateway's pauses before it: those after it are no time of its own."""


def validate_registration(registration: Registration, roles: Iterable[str]) -> None:
    """Raises `UsageError` in words for what cannot be."""
    if not SESSION_ID.fullmatch(registration.id):
        raise UsageError(f"{registration.id[:80]!r} is not a valid session ID: it must fit into a URL path")
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
