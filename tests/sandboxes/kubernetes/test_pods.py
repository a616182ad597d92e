"""Sandboxes in pods: one connection per pod, the manifest, and what kubectl and the official client see of it."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.kubernetes.client import KubernetesClient
from rookery.sandboxes.kubernetes.cluster_access import find_cluster
from rookery.sandboxes.kubernetes.pod_manifest import NETWORK_LABEL
from rookery.sandboxes.kubernetes.provider import KubernetesProvider, open_kubernetes
from tests.conftest import KUBECTL
from tests.sandboxes.docker.engine import IMAGE
from tests.sandboxes.kubernetes.api_server import NAMESPACE, StandInCluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.needs("docker")]
SPEC = SandboxSpec(wall=60.0)
OFFICIAL_CLIENT = """
import sys
from kubernetes import client, config
from kubernetes.stream import stream
from kubernetes.watch import Watch

config.load_kube_config()
api, namespace = client.CoreV1Api(), sys.argv[1]
(pod,) = api.list_namespaced_pod(namespace, label_selector="rookery").items
name = pod.metadata.name
assert (pod.status.phase, pod.spec.restart_policy) == ("Running", "Never")
options = {"command": ["sh", "-c", "echo $((6 * 7))"], "stdout": True, "stderr": True}
assert stream(api.connect_get_namespaced_pod_exec, name, namespace, **options) == "42\\n"
api.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
watch = Watch()
for event in watch.stream(api.list_namespaced_pod, namespace, resource_version=pod.metadata.resource_version):
    if event["type"] == "DELETED":
        watch.stop()
print(name, end="")
"""


async def test_all_commands_of_a_pod_use_one_connection(
    cluster: StandInCluster, provider: KubernetesProvider
) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    for text in (b"one", b"two"):
        assert (await sandbox.exec(Command(argv=("cat",), stdin=text))).stdout == text
    await sandbox.write("x", b"1" * 1_000_000)
    assert await sandbox.read("x") == b"1" * 1_000_000
    # PID 1 is Rookery's program, and programs can neither stop nor kill it.
    script = "for name in STOP TERM INT HUP KILL; do kill -$name 1; done; id -u; cat /proc/1/cmdline"
    result = await sandbox.exec(Command(argv=("sh", "-c", script)))
    assert result.stdout.startswith(b"1000\n")
    assert b"remote.host" in result.stdout
    await sandbox.close()
    assert len([path for _, path in cluster.requests if path.endswith("/exec")]) == 1


async def test_pod_has_the_limits_of_the_spec_and_the_fields_of_the_template(
    cluster: StandInCluster, home: ProviderHome, tmp_path: Path
) -> None:
    template: dict[str, Any] = {
        "metadata": {"labels": {"team": "agents"}},
        "spec": {
            "nodeSelector": {"pool": "sandboxes"},
            "tolerations": [{"key": "sandboxes", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
            "activeDeadlineSeconds": 7200,
            "containers": [{"name": "x", "image": IMAGE, "resources": {"requests": {"cpu": "100m"}}}],
        },
    }
    (tmp_path / "pod.yaml").write_bytes(msgspec.yaml.encode(template))
    spec = SandboxSpec(memory=256 << 20, cpus=0.5, disk=1 << 30, labels={"experiment": "seven"})
    provider = open_kubernetes(home)
    sandbox = await provider.create(spec, attempt="a")
    (pod,) = cluster.pods()
    found, (container,) = pod["spec"], pod["spec"]["containers"]
    for field in ("nodeSelector", "tolerations", "imagePullSecrets", "activeDeadlineSeconds"):
        assert found[field] == template["spec"][field]
    assert container["resources"] == {
        "requests": {"cpu": "100m"},
        "limits": {"memory": str(352 << 20), "cpu": "500m", "ephemeral-storage": str(1 << 30)},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert found["securityContext"]["runAsNonRoot"] is True
    assert found["automountServiceAccountToken"] is False
    labels = pod["metadata"]["labels"]
    assert (labels["team"], labels["experiment"], labels[NETWORK_LABEL]) == ("agents", "seven", "closed")
    policy = cluster.find("networkpolicies", "rookery-closed")["spec"]
    assert policy["podSelector"] == {"matchLabels": {NETWORK_LABEL: "closed"}}
    lease = pod["metadata"]["annotations"]["rookery-expires"]
    await provider.service.extend(pod["metadata"]["name"], lifetime=10_000)
    assert pod["metadata"]["annotations"]["rookery-expires"] > lease
    await sandbox.close()
    await provider.close()


async def run_program(*command: str, stdin: bytes = b"") -> bytes:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HOME": "/nonexistent"},
    )
    output, errors = await process.communicate(stdin)
    assert process.returncode == 0, errors
    return output


async def kubectl(*arguments: str, stdin: bytes = b"") -> bytes:
    return await run_program(str(KUBECTL), *arguments, stdin=stdin)


@pytest.mark.needs("kubectl")
async def test_kubectl_sees_uses_and_deletes_a_pod(cluster: StandInCluster, provider: KubernetesProvider) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    await sandbox.write("/tmp/shared", b"from rookery")
    (pod,) = json.loads(await kubectl("get", "pods", "-l", "rookery", "-o", "json"))["items"]
    name = pod["metadata"]["name"]
    await kubectl("wait", "--for=jsonpath={.status.phase}=Running", f"pod/{name}", "--timeout=60s")
    assert await kubectl("exec", name, "--", "cat", "/tmp/shared") == b"from rookery"
    assert await kubectl("exec", "-i", name, "--", "cat", stdin=b"hello") == b"hello"
    await kubectl("delete", "pod", name, "--now")
    await wait_until(lambda: not cluster.pods())
    await sandbox.close()
    policies = json.loads(await kubectl("get", "networkpolicies", "-o", "json"))["items"]
    assert [policy["metadata"]["name"] for policy in policies] == ["rookery-closed"]


async def test_official_client_sees_uses_and_deletes_a_pod(
    cluster: StandInCluster, provider: KubernetesProvider
) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    (pod,) = cluster.pods()
    name = await run_program(sys.executable, "-c", OFFICIAL_CLIENT, NAMESPACE)
    assert name.decode() == pod["metadata"]["name"]
    assert ("pods", name.decode()) not in cluster.objects
    await sandbox.close()


async def test_pods_of_a_warm_pool_are_claimed(
    cluster: StandInCluster, provider: KubernetesProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_KUBERNETES_WARM_POOL", "warm")
    with pytest.raises(SandboxError) as caught:
        await provider.create(SPEC, attempt="a")  # agent-sandbox is not installed
    assert caught.value.code == "sandbox.refused"
    cluster.warm_pools["other"] = IMAGE
    with pytest.raises(SandboxError) as caught:
        await provider.create(SPEC, attempt="a")  # there is no such warm pool
    assert caught.value.code == "sandbox.refused"
    cluster.warm_pools["warm"] = IMAGE
    assert provider.check(SandboxSpec(image=IMAGE))
    # The pod is not used before it has the label that the network policy selects.
    cluster.labels_claimed_pods.clear()
    creating = asyncio.ensure_future(provider.create(SPEC, attempt="a"))
    await wait_until(lambda: [pod["status"]["phase"] for pod in cluster.pods()] == ["Running"])
    watches = len(cluster.requests)
    await wait_until(lambda: len(cluster.requests) >= watches + 2)
    assert not creating.done()
    cluster.labels_claimed_pods.set()
    sandbox = await creating
    assert (await sandbox.exec(Command(argv=("cat",), stdin=b"warm"))).stdout == b"warm"
    await cluster.break_connections()
    assert (await sandbox.exec(Command(argv=("true",)))).ok
    (name,) = [name for kind, name in cluster.objects if kind == "sandboxclaims"]
    claim = cluster.find("sandboxclaims", name)
    (pod,) = cluster.pods()
    assert pod["metadata"]["labels"] == {"pool": "warm", NETWORK_LABEL: "closed"}
    lease = claim["spec"]["lifecycle"]["shutdownTime"]
    await provider.service.extend(name, lifetime=10_000)
    assert claim["spec"]["lifecycle"]["shutdownTime"] > lease
    assert await provider.list_machines() == {name: {**claim["metadata"]["labels"], "rookery-expiry": ""}}
    await sandbox.close()
    assert ("sandboxclaims", name) not in cluster.objects


def make_policy(name: str, selector: dict[str, Any], **rules: Any) -> dict[str, Any]:
    spec = {"podSelector": selector, "policyTypes": ["Egress"], **rules}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


async def call_policies(method: str, name: str = "", body: Any = None) -> None:
    client = KubernetesClient(find_cluster())
    path = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies{name}"
    await client.call(method, path, body)
    await client.close()


async def apply(policy: dict[str, Any]) -> None:
    await call_policies("POST", body=policy)


async def delete(policy: str) -> None:
    await call_policies("DELETE", f"/{policy}")


async def test_closed_pod_that_another_policy_opens_is_refused(
    cluster: StandInCluster, home: ProviderHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    dns = {"egress": [{"ports": [{"protocol": "UDP", "port": 53}]}]}
    await apply(make_policy("allow-names", {}, **dns))
    await apply(make_policy("other-pods", {"matchLabels": {"a": "b"}}, **dns))
    provider = open_kubernetes(home)
    with pytest.raises(SandboxError) as caught:
        await provider.create(SPEC, attempt="a")
    assert caught.value.code == "sandbox.refused"
    assert "allow-names" in str(caught.value)
    assert not cluster.pods()
    await (await provider.create(SandboxSpec(network="all"), attempt="a")).close()
    await provider.close()
    # agent-sandbox creates such a policy for the pods of a template, unless the template says otherwise.
    await delete("allow-names")
    await apply(make_policy("template", {"matchLabels": {"pool": "warm"}}, egress=[{}]))
    monkeypatch.setenv("ROOKERY_KUBERNETES_WARM_POOL", "warm")
    cluster.warm_pools["warm"] = IMAGE
    provider = open_kubernetes(home)
    with pytest.raises(SandboxError) as caught:
        await provider.create(SPEC, attempt="a")
    assert caught.value.code == "sandbox.refused"
    await provider.close()
    await wait_until(lambda: not cluster.pods())
