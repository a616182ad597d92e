"""Conformance checks of the protocol for pods of a stand-in cluster."""

import pytest

from rookery.sandboxes.conformance import CHECKS, files, networks
from rookery.sandboxes.kubernetes.provider import KubernetesProvider

# Programs run in a pod as in any machine of a service (tests/sandboxes/remote): a part of their checks is enough.
TRANSFERS = (*files.CHECKS, *networks.CHECKS)
CHOSEN = (*TRANSFERS, *[check for check in CHECKS if check not in TRANSFERS][::8])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.needs("docker")
async def test_kubernetes_conforms(provider: KubernetesProvider) -> None:
    for check in CHOSEN:
        try:
            await check(provider)
        except Exception as error:
            error.add_note(f"in the check {check.__name__}")
            raise
