"""Conformance checks of the protocol for `subprocess` and `local`."""

import pytest

from rookery.sandboxes import ProviderHome, open_provider
from rookery.sandboxes.conformance import CHECKS, Check


@pytest.mark.long
@pytest.mark.parametrize("name", ["subprocess", "local"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_provider_conforms(name: str, check: Check, home: ProviderHome) -> None:
    provider = open_provider(name, home)
    try:
        await check(provider)
    finally:
        await provider.close()
