"""Conformance checks of the protocol for the documentation's example of a provider."""

import pytest

from rookery.sandboxes.conformance import CHECKS
from rookery.sandboxes.remote import ServiceProvider


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_example_of_the_documentation_conforms(provider: ServiceProvider) -> None:
    for check in CHECKS:
        try:
            await check(provider)
        except Exception as error:
            error.add_note(f"in the check {check.__name__}")
            raise
