"""An engine's configuration, as its supervisor, its runners and its journal are told it.

Promises:
- runners find the environment where this process found it;
- what the journal keeps has no secrets.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import SandboxSpec
from rookery.engine.config import WARM, EngineConfig
from rookery.engine.flights import Policy
from rookery.engine.wire import RunSettings
from rookery.environments import EnvironmentRef
from rookery.sandboxes import is_pooled
from rookery.upstreams.protocol import UpstreamConfig
from rookery.upstreams.urls import redact


def reference_to(config: EngineConfig) -> EnvironmentRef:
    """The environment that a configuration names."""
    source = config.environment
    path, _, attr = source.rpartition(":") if not source.endswith(".py") else (source, "", "")
    if path.endswith(".py"):
        resolved = str(Path(path).expanduser().resolve())
        source = f"{resolved}:{attr}" if attr else resolved
    return EnvironmentRef(source=source, config=config.arguments, path=tuple(sys.path))


def run_settings(config: EngineConfig, sandbox: SandboxSpec, folder: Path, ref: EnvironmentRef) -> RunSettings:
    """For runners. The policy has the run's sampling, where it says nothing itself."""
    policy = config.upstreams["policy"]
    policy = msgspec.structs.replace(policy, sampling=policy.sampling.over(config.sampling))
    return RunSettings(
        run=folder.name,
        folder=str(folder.resolve()),
        environment=ref,
        upstreams={role: _seeded(up, config) for role, up in {**config.upstreams, "policy": policy}.items()},
        sandbox=sandbox,
        limits=config.limits,
        share=max(1, config.runners),
        warm=_warm(config, sandbox),
        record=config.recording,
        rendering=config.rendering,
        public=config.public,
        gateway_listen=config.gateway_listen,
    )


def _seeded(upstream: UpstreamConfig, config: EngineConfig) -> UpstreamConfig:
    return upstream if config.seed is None else msgspec.structs.replace(upstream, seeded=True)


def _warm(config: EngineConfig, sandbox: SandboxSpec) -> int:
    """How many sandboxes to have ready ahead of need; none where they are made in no time."""
    if not sandbox.provider or not is_pooled(sandbox.provider):
        return 0
    return min(WARM, config.concurrency) if config.warm is None else config.warm


def policy_of(config: EngineConfig) -> Policy:
    """For the supervisor."""
    return Policy(
        runners=config.runners,
        concurrency=config.concurrency,
        seed=config.root_seed,
        retry=config.retry,
        breaker=config.breaker,
        block_limit=config.block_limit,
        wait_for_upstream=config.wait_for_upstream,
    )


def described(config: EngineConfig) -> dict[str, Any]:
    """Return a configuration as plain data, without secrets and without fields at their defaults.

    Two runs with the same settings are described alike, whether a default was given explicitly or not.
    """
    plain = msgspec.structs.replace(
        config,
        upstreams={
            role: msgspec.structs.replace(up, urls=tuple(redact(url) for url in up.urls))
            for role, up in config.upstreams.items()
        },
    )
    found: dict[str, Any] = msgspec.to_builtins(plain)
    for field in msgspec.structs.fields(EngineConfig):  # `omit_defaults` compares by identity, this by value
        if field.default is not msgspec.NODEFAULT and getattr(plain, field.name) == field.default:
            found.pop(field.encode_name, None)
    return found
