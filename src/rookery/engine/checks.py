"""What is looked at before anything is admitted, so that what cannot work is said first."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rookery.core import SandboxSpec, UpstreamError, UsageError, cause_of
from rookery.engine.outage import FIRST_PAUSE, LONGEST_PAUSE, find_outage
from rookery.gateway.public import is_loopback, is_url
from rookery.sandboxes import open_provider
from rookery.sandboxes.protocol import Home
from rookery.upstreams import open_upstream, settled
from rookery.upstreams.protocol import UpstreamConfig


def upstream_of(policy: str | Sequence[str] | UpstreamConfig, model: str) -> UpstreamConfig:
    """The upstream behind what an `Engine` was given as its policy."""
    if isinstance(policy, UpstreamConfig):
        return msgspec.structs.replace(policy, model=model) if model else policy
    urls = ((policy,) if policy else ()) if isinstance(policy, str) else tuple(policy)
    return UpstreamConfig(urls=tuple(map(settled, urls)), model=model)


def check_sandbox(spec: SandboxSpec, folder: Path) -> None:
    """Raises what the spec's provider says against it. It opens nothing and is thrown away again."""
    provider = open_provider(spec.provider, Home(folder=folder, run="check"))
    problems = provider.check(spec)
    if problems:
        raise UsageError(f"the sandbox provider {provider.name!r} cannot do this: {'; '.join(problems)}")


def no_way(spec: SandboxSpec, public: str) -> list[str]:
    """Why programs in such a sandbox would not reach the gateway at its public address, in sentences."""
    if spec.network != "all" or spec.provider != "docker":
        return []  # a box has a listener of its own, or this machine's loopback
    if is_url(public) and not is_loopback(public):
        return []
    said = (
        "with the network 'all' a container reaches the gateway at its public address, and that is a loopback "
        "here, which a container does not reach: name an address of this machine (--public-url http://HOST:PORT "
        "--gateway-listen 0.0.0.0:PORT), or use the network 'model'"
    )
    return [said]


_AT_START = {
    "upstream.timeout": (
        "It accepts connections and does not answer: it hangs, or it is still loading its model. Read its log, "
        "and start again when it answers."
    ),
    "upstream.error": "The server itself fails. Read its log, and start again when it answers.",
    "upstream.overloaded": "The server turns every request away. Start again when it answers.",
}
"""What to do about a server that cannot be used before a run has begun, by cause."""


def not_usable(role: str, error: UpstreamError) -> UpstreamError:
    """The error of a check at the start: with the model's role, and with advice for that moment."""
    advice = cause_of(error.code).advice
    said = str(error).removesuffix(advice).rstrip()
    now = _AT_START.get(error.code, advice)
    return UpstreamError(f"the model server for the {role} cannot be used: {said} {now}", cause=error.code)


async def checked_upstreams(
    upstreams: Mapping[str, UpstreamConfig], *, tokens: bool = False, wait: float = 0.0
) -> dict[str, UpstreamConfig]:
    """Asks each server whether it is there; where it serves one model only, that is the model.

    `tokens`: the policy's prompts will be token ids. `wait`: seconds to wait for a server that is not there yet.
    """
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + wait, FIRST_PAUSE
    while loop.time() < until and await find_outage(upstreams):
        await asyncio.sleep(min(pause, max(0.0, until - loop.time())))
        pause = min(LONGEST_PAUSE, 2 * pause)
    checked: dict[str, UpstreamConfig] = {}
    for role, config in upstreams.items():
        upstream = open_upstream(config)
        try:
            if tokens and role == "policy" and not upstream.tokens_in:
                raise UsageError(
                    f"{upstream.name} takes no token ids: record messages or plain, or use another kind"
                )
            info = await upstream.check()
        except UpstreamError as error:
            raise not_usable(role, error) from error
        finally:
            await upstream.close()
        if not config.model and len(info.models) != 1:
            offer = f": it serves {', '.join(info.models[:8])}" if info.models else ""
            raise UsageError(f"name the model for the {role} at {info.url} (--model){offer}")
        checked[role] = config if config.model else msgspec.structs.replace(config, model=info.models[0])
    return checked
