"""Fixtures: a stand-in cluster per test, on one private Docker engine per test process."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from rookery.core import SandboxSpec
from rookery.sandboxes import ProviderHome
from rookery.sandboxes.kubernetes.provider import KubernetesProvider, open_kubernetes
from rookery.sandboxes.remote import service
from tests.certificates import make_certificates
from tests.sandboxes.docker.conftest import engine, image_archives
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine
from tests.sandboxes.kubernetes.api_server import NAMESPACE, StandInCluster, run_cluster
from tests.waiting import wait_until

__all__ = ["engine", "image_archives"]

TEMPLATE = {"spec": {"containers": [{"name": "sandbox", "image": IMAGE}]}}


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MIN_WAIT", 0.05)


@pytest.fixture
async def cluster(
    engine: PrivateEngine,
    certificates: Path,
    home: ProviderHome,  # it counts file descriptors after the cluster is closed
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[StandInCluster]:
    """Yield a cluster that this process uses by default, as a user with a kubeconfig file would."""
    async with run_cluster(engine.socket, certificates) as made:
        monkeypatch.setenv("KUBECONFIG", str(made.write_kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.setenv("ROOKERY_KUBERNETES_NAMESPACE", NAMESPACE)
        template = tmp_path / "pod.yaml"
        template.write_bytes(msgspec.yaml.encode(TEMPLATE))
        monkeypatch.setenv("ROOKERY_KUBERNETES_POD", str(template))
        yield made
        await wait_until(lambda: not made.pods())
    assert engine.containers() == []


@pytest.fixture
async def provider(cluster: StandInCluster, home: ProviderHome) -> AsyncIterator[KubernetesProvider]:
    made = open_kubernetes(home)
    assert list(made.check(SandboxSpec())) == []
    yield made
    await made.close()
