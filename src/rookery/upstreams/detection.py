"""Detect which kind of inference engine answers at a URL. Runs in the process that starts a run or a gateway.

Every installed kind of upstream that defines `identity_paths` (endpoints that identify its servers) is tried,
including kinds from plug-ins.
"""

import asyncio
import logging

import msgspec

from rookery.core import UsageError
from rookery.upstreams import AUTO, kind_of, kinds, load_kind
from rookery.upstreams.http_upstream import HttpUpstream
from rookery.upstreams.protocol import UpstreamConfig
from rookery.upstreams.urls import Address

log = logging.getLogger("rookery.upstreams")


async def detect_kind(config: UpstreamConfig, key: str | None = None) -> UpstreamConfig:
    """Return the configuration with `kind` filled in: if it is `auto`, query the first server to detect its kind.

    A server that no kind recognises, or that does not respond, is treated as `openai`. `key` is the API key.
    """
    if (kind := kind_of(config)) != AUTO:
        return msgspec.structs.replace(config, kind=kind)
    recognised = await asyncio.gather(*[_recognises(name, config, key) for name in kinds()])
    detected = next((name for name, matched in zip(kinds(), recognised, strict=True) if matched), "openai")
    log.info(
        "the inference engine %s is treated as a server of the kind %s", Address(config.urls[0]).shown, detected
    )
    return msgspec.structs.replace(config, kind=detected)


async def _recognises(kind: str, config: UpstreamConfig, key: str | None) -> bool:
    try:
        loaded = load_kind(kind)
    except UsageError:  # a broken plug-in matters only to those who ask for it
        return False
    if not isinstance(loaded, type) or not issubclass(loaded, HttpUpstream) or not loaded.identity_paths:
        return False
    upstream = loaded(msgspec.structs.replace(config, kind=kind), key=key)
    try:
        return await upstream.identify()
    finally:
        await upstream.close()
