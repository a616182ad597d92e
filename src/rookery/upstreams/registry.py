"""The installed kinds of upstream: find them by name or address, detect them by URL, and open them.

A kind is an entry point in the group `rookery.upstreams`. Only the kind of servers that no kind recognises is
named here.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.upstreams.protocol import AcceptsPath, LoadMetrics, SuppliesRendering, Upstream, UpstreamConfig
from rookery.upstreams.urls import Address

log = logging.getLogger("rookery.upstreams")
_GROUP: Final = "rookery.upstreams"
AUTO: Final = "auto"
"""Value of `UpstreamConfig.kind` that requests detection of the server's kind when a run or a gateway starts."""
_DEFAULT: Final = "openai"
"""The kind of servers that no kind recognises."""


def kinds() -> tuple[str, ...]:
    """Return the sorted names of the installed kinds of upstream, such as `vllm` and `openai`."""
    from importlib.metadata import entry_points  # 20 ms, which `--help` should not pay

    return tuple(sorted({point.name for point in entry_points(group=_GROUP)}))


def open_upstream(config: UpstreamConfig, key: str | None = None) -> Upstream:
    """Construct the upstream that `config` describes, without connecting to its servers.

    The kind `auto` is treated as `openai`, unless the first URL begins with the name of a kind. `key` is the API
    key; if it is None, the key is read from the environment variable that `config.key_env` names.
    """
    kind = kind_of(config)
    if kind == AUTO:
        kind = _DEFAULT
    return load_kind(kind)(msgspec.structs.replace(config, kind=kind), key=key)


def read_key(config: UpstreamConfig, key: str | None = None) -> str | None:
    """Return the API key of an upstream: `key`, or that in an environment variable; None if there is none."""
    names = [config.key_env] if config.key_env != "ROOKERY_API_KEY" else [config.key_env, "OPENAI_API_KEY"]
    if key is None:
        key = next((found for name in names if name and (found := os.environ.get(name))), None)
    key = key.strip() if key else None
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(
            "the inference engine's API key has characters that no HTTP header can contain; set it again"
        )
    return key or None


def load_kind(kind: str) -> Callable[..., Upstream]:
    """Return the class or function that constructs upstreams of `kind`. Raises `UsageError` if it cannot be
    loaded."""
    from importlib.metadata import entry_points

    points = tuple(entry_points(group=_GROUP, name=kind))
    if not points:
        known = ", ".join(kinds()) or "none: is rookery-rl installed?"
        raise UsageError(f"there is no upstream kind {kind!r}; known: {known}")
    try:
        return cast("Callable[..., Upstream]", points[0].load())
    except Exception as error:  # a plug-in may raise anything when it is imported
        raise UsageError(f"the upstream kind {kind!r} cannot be loaded: {describe(error)}") from error


def own_rendering(config: UpstreamConfig) -> dict[str, Any]:
    """Return the settings of the chat format that belongs to an upstream's model, for example its tokenizer.

    They come from the class method `own_rendering` of the upstream's class (`SuppliesRendering`), if it has one.
    Opens no file and does not connect to a server.
    """
    kind = kind_of(config)
    upstream = load_kind(kind) if kind != AUTO else None
    return upstream.own_rendering(config) if isinstance(upstream, SuppliesRendering) else {}


def kind_of(config: UpstreamConfig) -> str:
    """Return the upstream kind of a configuration.

    This is `config.kind`, unless that is `auto` and the first URL begins with the name of a kind or with one of
    its path prefixes, as in `embedded:weights/`.
    """
    first = config.urls[0] if config.urls else ""
    if config.kind != AUTO or "://" in first:
        return config.kind
    prefix = first.partition(":")[0]
    return prefix if prefix in kinds() else _find_kind_of_path(first) or AUTO


def absolute_address(address: str) -> str:
    """Return an address that is valid in any directory: the path in `embedded:weights/` becomes absolute."""
    prefix, _, path = address.partition(":")
    return f"{prefix}:{Path(path).expanduser().absolute()}" if _find_kind_of_path(address) else address


def _find_kind_of_path(address: str) -> str | None:
    """Return the kind of upstream whose `path_prefixes` contain the prefix of an address such as `hf:model/`.

    Return None if the address is not a prefix and a path.
    """
    prefix, _, path = address.partition(":")
    if not path or path.startswith("//"):
        return None
    known = kinds()
    for kind in (prefix,) if prefix in known else known:
        try:
            loaded: object = load_kind(kind)
        except UsageError:  # a broken plug-in matters only to those who ask for it
            continue
        if isinstance(loaded, AcceptsPath) and prefix in loaded.path_prefixes:
            return kind
    return None


@cache
def list_load_metrics() -> tuple[LoadMetrics, ...]:
    """Return the load metrics of every installed kind, for servers of an unknown kind.

    The first call imports every kind, which takes up to a second.
    """
    found = []
    for kind in kinds():
        try:
            metrics = getattr(load_kind(kind), "load_metrics", None)
        except UsageError as error:
            log.warning("the load metrics of the upstream kind %s are not used: %s", kind, error)
            continue
        if isinstance(metrics, LoadMetrics):
            found.append(metrics)
    return tuple(found)


async def detect_kind(config: UpstreamConfig, key: str | None = None) -> UpstreamConfig:
    """Return the configuration with `kind` filled in: if it is `auto`, query the first server to detect its kind.

    A server that no kind recognises, or that does not respond, is treated as `openai`. `key` is the API key.
    """
    if (kind := kind_of(config)) != AUTO:
        return msgspec.structs.replace(config, kind=kind)
    recognised = await asyncio.gather(*[_recognises(name, config, key) for name in kinds()])
    detected = next((name for name, matched in zip(kinds(), recognised, strict=True) if matched), _DEFAULT)
    log.info(
        "the inference engine %s is treated as a server of the kind %s", Address(config.urls[0]).shown, detected
    )
    return msgspec.structs.replace(config, kind=detected)


async def _recognises(kind: str, config: UpstreamConfig, key: str | None) -> bool:
    try:
        loaded = load_kind(kind)
    except UsageError:  # a broken plug-in matters only to those who ask for it
        return False
    from rookery.upstreams.http_upstream import HttpUpstream  # slow to import

    if not isinstance(loaded, type) or not issubclass(loaded, HttpUpstream) or not loaded.identity_paths:
        return False
    upstream = loaded(msgspec.structs.replace(config, kind=kind), key=key)
    try:
        return await upstream.identify()
    finally:
        await upstream.close()
