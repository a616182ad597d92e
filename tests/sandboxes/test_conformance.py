"""The subprocess provider keeps the promises of every provider."""

import pytest

from rookery.sandboxes import Home, open_provider
from rookery.sandboxes.conformance import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_subprocess(check: Check, home: Home) -> None:
    provider = open_provider("subprocess", home)
    try:
        await check(provider)
    finally:
        await provider.close()
