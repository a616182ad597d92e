"""Check models, sandbox spec, chat format and addresses of a run before its first rollout starts."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import SandboxSpec, UpstreamError, UsageError, get_cause
from rookery.engine.outage import FIRST_DELAY, MAX_DELAY, find_outage
from rookery.environments import Environment
from rookery.gateway.config import resolve_rendering
from rookery.gateway.public_url import is_loopback, is_url
from rookery.sandboxes import has_own_loopback, open_provider
from rookery.sandboxes.protocol import ProviderHome
from rookery.upstreams import AUTO, absolute_address, open_upstream
from rookery.upstreams.protocol import UpstreamConfig
from rookery.upstreams.registry import detect_kind

if TYPE_CHECKING:
    from rookery.engine.config import EngineConfig


def build_upstream_config(
    policy: str | Sequence[str] | UpstreamConfig, model: str, kind: str = ""
) -> UpstreamConfig:
    """Return the upstream configuration for the arguments `policy`, `model` and `kind` of `Engine`."""
    if isinstance(policy, UpstreamConfig):
        chosen = {name: value for name, value in (("model", model), ("kind", kind)) if value}
        return msgspec.structs.replace(policy, **chosen)
    urls = ((policy,) if policy else ()) if isinstance(policy, str) else tuple(policy)
    return UpstreamConfig(kind=kind or AUTO, urls=tuple(map(absolute_address, urls)), model=model)


def require_roles(environment: Environment, upstreams: Mapping[str, UpstreamConfig]) -> None:
    """Raise `UsageError` if the policy or another model role of the environment has no inference engine."""
    missing = sorted({"policy", *environment.roles} - {name for name, up in upstreams.items() if up.urls})
    if missing:
        policy = "--policy URL (--policy embedded for the built-in small model)"
        hints = [policy if role == "policy" else f"--role {role}=URL" for role in missing]
        raise UsageError(
            f"{environment.title} needs a model for: {', '.join(missing)}. Pass {' and '.join(hints)}; "
            "in Python, the arguments `policy` and `roles` of `Engine`"
        )


def resolve_chat_format(config: "EngineConfig", environment: Environment) -> tuple[dict[str, Any], str]:
    """Return the policy's chat format as plain data, and a warning if the format does not support tools.

    Raises `UsageError` if the format would hide the environment's tools from the policy, unless `allow_no_tools`
    is set. The warning is empty if the format supports tools.
    """
    wanted = config.rendering
    if wanted and config.allow_no_tools:
        wanted = {**wanted, "allow_no_tools": True}
    resolved, warning = resolve_rendering(config.recording, wanted, config.upstreams["policy"])
    if warning and not resolved.get("allow_no_tools") and environment.tools():
        names = ", ".join(tool.name for tool in environment.tools())
        raise UsageError(f"{environment.title} gives the policy tools ({names:.200}), and {warning}")
    return resolved, warning


def check_settings(
    environment: Environment, spec: SandboxSpec, config: "EngineConfig", folder: Path, unresolved: str
) -> None:
    """Raise `UsageError` if the environment cannot run in sandboxes of `spec` with this configuration.

    `unresolved` is the reason why `spec` names no provider, or empty. Providers get `folder` as their home.
    """
    if spec.provider:
        provider = open_provider(spec.provider, ProviderHome(folder=folder, run="check"))
        if refused := provider.check(spec):
            raise UsageError(f"the sandbox provider {provider.name!r} cannot do this: {'; '.join(refused)}")
    elif environment.needs_sandbox:
        raise UsageError(unresolved)
    problems = list(environment.check(spec))
    if config.record == "off":
        problems += find_direct_problems(environment, spec, config.upstreams["policy"].urls)
    elif environment.needs_gateway:
        problems += find_gateway_problems(spec, config.gateway_url or config.public)
    purpose = environment.needs_gateway
    if problems and isinstance(purpose, str):
        problems.append(f"the environment needs the gateway for {purpose}")
    if problems:
        raise UsageError(f"{environment.title} cannot run with these settings: {'; '.join(problems)}")


def find_gateway_problems(spec: SandboxSpec, public: str) -> list[str]:
    """Return why programs in such a sandbox cannot reach the gateway. The list is empty if they can.

    `public` is the public URL of the gateway, or empty.
    """
    if not _has_separate_loopback(spec) or (is_url(public) and not is_loopback(public)):
        return []
    problem = (
        f"a {spec.provider} sandbox with network 'all' uses the gateway's public address, which is a loopback "
        "address and cannot be reached from it: set an address of this machine (--public-url http://HOST:PORT "
        "--gateway-listen 0.0.0.0:PORT), or use the network 'model'"
    )
    return [problem]


def _has_separate_loopback(spec: SandboxSpec) -> bool:
    """Return whether programs in such a sandbox cannot reach this machine's loopback interface.

    With other networks than `all`, the sandbox has its own listener.
    """
    return spec.network == "all" and bool(spec.provider) and has_own_loopback(spec.provider)


def find_direct_problems(environment: Environment, spec: SandboxSpec, urls: Sequence[str]) -> list[str]:
    """Return why programs of an environment cannot call the policy's inference engine at `urls` directly."""
    if not environment.can_run_unrecorded:
        return ["--record off is for environments whose programs call the model themselves, such as `agent`"]
    if _has_separate_loopback(spec) and any(map(is_loopback, urls)):
        problem = (
            f"a {spec.provider} sandbox with network 'all' cannot reach the inference engine at a loopback "
            "address: use the network 'model', or another address of this machine in --policy"
        )
        return [problem]
    return []


_AT_START = {
    "upstream.timeout": (
        "It accepts connections but does not respond: it hangs, or it is still loading its model. Read its log, "
        "and try again when it responds."
    ),
    "upstream.error": "The server itself fails. Read its log, and start again when it answers.",
    "upstream.overloaded": "The server turns every request away. Try again when it answers.",
}
"""Advice to the user if an inference engine cannot be used at the start of a run, by cause code. Other causes have
the advice of the table of causes."""


def build_start_error(role: str, error: UpstreamError) -> UpstreamError:
    """Return the error to raise if the inference engine of `role` failed its check at the start of a run.

    The message names the role and gives advice for the start of a run instead of the usual advice.
    """
    advice = get_cause(error.code).advice
    reason = str(error).removesuffix(advice).rstrip()
    now = _AT_START.get(error.code, advice)
    return UpstreamError(f"the inference engine for the {role} cannot be used: {reason} {now}", cause=error.code)


async def check_upstreams(
    upstreams: Mapping[str, UpstreamConfig], *, tokens: bool = False, wait: float = 0.0
) -> dict[str, UpstreamConfig]:
    """Check the replicas of every role, and return the configurations with their kind and model filled in.

    With `tokens`, the policy's server must accept token IDs as prompts. `wait` is how many seconds to wait for
    servers that are not ready yet. Raises `UpstreamError` if a server cannot be used, and `UsageError` if no model
    is chosen and the server offers none or several.
    """
    loop = asyncio.get_running_loop()
    until, delay = loop.time() + wait, FIRST_DELAY
    while loop.time() < until and await find_outage(upstreams):
        await asyncio.sleep(min(delay, max(0.0, until - loop.time())))
        delay = min(MAX_DELAY, 2 * delay)
    checked: dict[str, UpstreamConfig] = {}
    for role, unresolved in upstreams.items():
        config = await detect_kind(unresolved)
        upstream = open_upstream(config)
        try:
            if tokens and role == "policy" and not upstream.accepts_tokens:
                raise UsageError(
                    f"{upstream.name} does not accept token IDs as prompts: use --record messages or plain, or "
                    "another --upstream-kind"
                )
            info = await upstream.check()
        except UpstreamError as error:
            raise build_start_error(role, error) from error
        finally:
            await upstream.close()
        if not config.model and len(info.models) != 1:
            offer = f": it serves {', '.join(info.models[:8])}" if info.models else ""
            setting = "--model" if role == "policy" else f"`model` of roles[{role!r}]"
            raise UsageError(f"choose the model for the role {role} at {info.url} with {setting}{offer}")
        checked[role] = config if config.model else msgspec.structs.replace(config, model=info.models[0])
    return checked
