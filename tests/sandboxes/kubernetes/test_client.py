"""The client for the Kubernetes API: credentials, kubeconfig files, repeated requests and watches."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from rookery.core import SandboxSpec, UsageError
from rookery.sandboxes import ProviderHome
from rookery.sandboxes.kubernetes import client as client_module
from rookery.sandboxes.kubernetes import cluster_access, pod_manifest
from rookery.sandboxes.kubernetes.client import APIError, ExecStream, KubernetesClient
from rookery.sandboxes.kubernetes.cluster_access import ClusterAccess, find_cluster
from rookery.sandboxes.kubernetes.provider import open_kubernetes
from tests.sandboxes.kubernetes.api_server import NAMESPACE, TOKEN, StandInCluster, run_cluster
from tests.sandboxes.kubernetes.manifest_validation import Refused, validate
from tests.waiting import wait_until

POLICIES = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"


@pytest.fixture
async def server(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StandInCluster]:
    """A cluster without a container engine, and a kubeconfig file for it."""
    async with run_cluster(str(tmp_path / "no-engine"), certificates) as made:
        monkeypatch.setenv("KUBECONFIG", str(made.write_kubeconfig(tmp_path / "config")))
        yield made


async def list_policies() -> Any:
    client = KubernetesClient(find_cluster())
    try:
        return await client.list(POLICIES, label="app.kubernetes.io/managed-by")
    finally:
        await client.close()


async def test_credentials_of_a_kubeconfig_file_are_used(
    server: StandInCluster, certificates: Path, tmp_path: Path
) -> None:
    def encode(name: str) -> str:
        return base64.b64encode((certificates / name).read_bytes()).decode()

    (tmp_path / "token").write_text(f"{TOKEN}\n")
    calls = tmp_path / "calls"
    answer = json.dumps({"kind": "ExecCredential", "status": {"token": TOKEN}})
    plugin = tmp_path / "plugin"
    plugin.write_text(f"#!/bin/sh\necho \"$KUBERNETES_EXEC_INFO $MORE\" >> {calls}\necho '{answer}'\n")
    plugin.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    more = [{"name": "MORE", "value": "more"}]
    for user in (
        {"tokenFile": "token"},
        {"client-certificate": str(certificates / "cert.pem"), "client-key": str(certificates / "key.pem")},
        {"client-certificate-data": encode("cert.pem"), "client-key-data": encode("key.pem")},
        {"exec": {"apiVersion": version, "command": "./plugin", "env": more}},
    ):
        server.write_kubeconfig(tmp_path / "config", user=user)
        assert await list_policies() == []
    assert "ExecCredential" in calls.read_text()
    assert calls.read_text().endswith("more\n")
    server.write_kubeconfig(tmp_path / "config", user={"token": "wrong"})
    with pytest.raises(APIError) as caught:
        await list_policies()
    assert caught.value.status == 401
    for broken in ({"exec": {"command": "./missing"}}, {"tokenFile": "missing"}):
        server.write_kubeconfig(tmp_path / "config", user=broken)
        with pytest.raises(UsageError):
            await list_policies()


async def test_failed_credential_plug_in_is_asked_again(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    access = ClusterAccess(
        {"server": "https://x"}, {"exec": {"command": "./plugin"}}, namespace="x", folder=tmp_path
    )
    for _ in range(2):
        with pytest.raises(UsageError):
            await access.make_headers()
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps({'status': {'token': TOKEN}})}'\n")
    plugin.chmod(0o755)
    assert await access.make_headers() == {"Authorization": f"Bearer {TOKEN}"}


async def test_service_account_is_used_without_a_kubeconfig_file(
    server: StandInCluster, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "account"
    folder.mkdir()
    for name, content in (
        ("token", TOKEN),
        ("namespace", "mine"),
        ("ca.crt", (certificates / "ca.pem").read_text()),
    ):
        (folder / name).write_text(content)
    monkeypatch.setattr(cluster_access, "SERVICE_ACCOUNT", folder)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    assert find_cluster().namespace == "mine"
    assert await list_policies() == []


@pytest.mark.parametrize(
    "content",
    ["[", "[]", "{}", '{"current-context": "x"}', '{"contexts": [{"name": "", "context": {"cluster": "y"}}]}'],
)
def test_invalid_kubeconfig_files_are_refused(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: ProviderHome
) -> None:
    (tmp_path / "config").write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UsageError):
        find_cluster()
    monkeypatch.setenv("ROOKERY_KUBERNETES_NAMESPACE", NAMESPACE)
    assert open_kubernetes(home).check(SandboxSpec(image="x"))


def test_without_a_namespace_no_cluster_is_contacted(home: ProviderHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROOKERY_KUBERNETES_NAMESPACE", raising=False)
    provider = open_kubernetes(home)
    assert provider.check(SandboxSpec(image="x"))
    assert provider.reap_machine() == []
    assert [check.status for check in provider.diagnose()] == ["info"]


async def test_requests_wait_for_an_overloaded_server_a_bounded_number_of_times(
    server: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_RETRIES", 3)
    server.answer = lambda _method, _path: Refused(429, "TooManyRequests", "busy", **{"Retry-After": "0"})
    with pytest.raises(APIError) as caught:
        await list_policies()
    assert (caught.value.status, len(server.requests)) == (429, 4)


async def test_watches_wait_for_an_overloaded_server_a_bounded_number_of_times(
    server: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_RETRIES", 3)
    monkeypatch.setattr(client_module, "WATCH_PAUSE_SECONDS", 0.0)
    server.answer = lambda _method, _path: Refused(503, "Unavailable", "busy", **{"Retry-After": "0"})
    client = KubernetesClient(find_cluster())
    with pytest.raises(APIError) as caught:
        await anext(client.follow(POLICIES, pod_manifest.POLICY, version="1"))
    assert (caught.value.status, len(server.requests)) == (503, 4)
    await client.close()


async def test_watches_that_end_at_once_are_not_opened_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, pauses = 0, []

    async def watch(*_: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        nonlocal opened
        opened += 1
        if opened == 3:
            yield "ADDED", {"metadata": {"resourceVersion": "2"}}

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    client = KubernetesClient(ClusterAccess({"server": "https://x"}, {}, folder=Path()))
    monkeypatch.setattr(client, "watch", watch)
    monkeypatch.setattr(client_module, "WATCH_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(client_module.asyncio, "sleep", sleep)
    assert await anext(client.follow("/x", "x", version="1"))
    assert len(pauses) == 2
    assert min(pauses) > 0


async def test_message_without_a_channel_does_not_end_the_stream_of_a_program() -> None:
    messages = [aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, data, "") for data in (b"", b"\x01", b"\x01out")]

    class Socket:
        async def receive(self) -> aiohttp.WSMessage:
            return messages.pop(0)

    assert await ExecStream(cast("Any", Socket())).read() == b"out"


async def test_watch_that_misses_changes_lists_again(
    server: StandInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LIST_LIMIT", 1)
    client = KubernetesClient(find_cluster())
    body = pod_manifest.build_policy()
    made = await client.call("POST", POLICIES, body)
    await client.call("POST", POLICIES, {**body, "metadata": {**body["metadata"], "name": "other"}})
    assert len(await client.list(POLICIES, label="app.kubernetes.io/managed-by")) == 2  # on two pages
    states = client.follow(POLICIES, pod_manifest.POLICY, version=made["metadata"]["resourceVersion"])
    waiting = asyncio.ensure_future(anext(states))
    await wait_until(lambda: any("watch" in path or method == "GET" for method, path in server.requests))
    await server.expire_history()
    found = await waiting
    assert found is not None
    assert found["metadata"]["uid"] == made["metadata"]["uid"]
    waiting = asyncio.ensure_future(anext(states))
    await client.call("DELETE", f"{POLICIES}/{pod_manifest.POLICY}")
    assert await waiting is None
    await states.aclose()
    await client.close()


def test_manifests_of_all_settings_are_valid() -> None:
    labels = {"rookery": "0" * 16, "rookery-run": "a run/with (odd) characters-"}
    for spec in (
        SandboxSpec(image="x"),
        SandboxSpec(image="x", network="all", memory=None, gpus=2, cpus=0.1, disk=1 << 30, labels={"a/b": "c"}),
    ):
        assert pod_manifest.find_spec_problems(spec, {}) == []
        validate(pod_manifest.build_pod("rookery-x", spec, labels=labels, lifetime=900, template={}), "pods")
    validate(pod_manifest.build_policy(), "networkpolicies")
    assert len(pod_manifest.find_spec_problems(SandboxSpec(labels={"rookery": "x", "a b": "c"}, gpus=-1), {})) == 4


def status(waiting: str = "", detail: str = "", ended: str = "", **fields: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"waiting": {"reason": waiting, "message": detail}} if waiting else {}
    if ended:
        state = {"terminated": {"reason": ended, "exitCode": 1}}
    container = {"name": "sandbox", "state": state}
    pod = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "sandbox"}]}}
    return {**pod, "status": {"phase": "Pending", "containerStatuses": [container], **fields}}


@pytest.mark.parametrize(
    ("pod", "cause"),
    [
        (None, "sandbox.host"),
        (status(), None),
        (status("ContainerCreating"), None),
        (status("ErrImagePull", "dial tcp: i/o timeout"), None),
        (status("ImagePullBackOff", "manifest unknown"), "task.image"),
        (status("InvalidImageName"), "task.image"),
        (status("CreateContainerConfigError", "secret not found"), "sandbox.refused"),
        (status(ended="OOMKilled", phase="Failed"), "sandbox.exhausted"),
        (status(ended="StartError", phase="Failed"), "task.image"),
        (status(ended="Error", phase="Failed"), "sandbox.lost"),
        (
            status(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
            "sandbox.host",
        ),
        (
            status(
                phase="Failed", reason="Evicted", message="Pod ephemeral local storage usage exceeds the limit"
            ),
            "sandbox.exhausted",
        ),
        (status(phase="Running", reason="NodeLost", message="Node x is unresponsive"), "sandbox.host"),
        (status(phase="Failed", reason="OutOfcpu", message="Node didn't have enough resource"), "sandbox.create"),
    ],
)
def test_state_of_a_pod_says_who_is_responsible(pod: dict[str, Any] | None, cause: str | None) -> None:
    failure = pod_manifest.find_failure(pod, "x")
    assert (failure.code if failure else None) == cause


@pytest.mark.parametrize(
    ("selector", "opens"),
    [
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["2"]}]}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "NotIn", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "b", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}, True),
    ],
)
def test_policies_that_open_a_pod_are_those_that_select_it(selector: dict[str, Any], opens: bool) -> None:
    policy = {"metadata": {"name": "x"}, "spec": {"podSelector": selector, "egress": [{}]}}
    denying = {"metadata": {"name": "y"}, "spec": {"podSelector": selector, "policyTypes": ["Egress"]}}
    assert pod_manifest.find_open_policies([denying, policy], {"a": "1"}) == (["x"] if opens else [])
