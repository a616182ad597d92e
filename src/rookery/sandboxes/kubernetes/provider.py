"""The `kubernetes` provider: each sandbox is a pod of a cluster. Runs in the owner's process.

ROOKERY_KUBERNETES_NAMESPACE names the namespace of the pods. The image needs Python 3.11 or newer as `python3`.

Guarantees:
- PID 1 of a pod is Rookery's program, which programs of the sandbox cannot kill, and one WebSocket carries all
  commands, files, shells and model calls of the pod;
- a connection that breaks is opened again, and commands go on;
- a pod whose owner died ends by itself soon after its connection ended, or without one when its lease ends. The
  object that remains is deleted by the reaper;
- a pod with the network `none` or `model` is not used if a network policy of the namespace lets it send anything;
- a pod that the cluster ended (eviction, lost node, deletion) is an infrastructure failure (`sandbox.host`), one
  that used up its memory or disk is not (`sandbox.exhausted`);
- an exhausted quota or a cluster without free capacity makes creation wait, and then fail with `sandbox.quota`.
"""

import asyncio
import datetime as dt
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.sandboxes.kubernetes import claims, pod_manifest
from rookery.sandboxes.kubernetes.client import APIError, APIUnreachable, ExecStream, KubernetesClient
from rookery.sandboxes.kubernetes.cluster_access import find_cluster, load_yaml
from rookery.sandboxes.protocol import MachineCheck, ProviderHome
from rookery.sandboxes.remote.link import MachineGone
from rookery.sandboxes.remote.service import EXPIRY_LABEL, LABEL, QuotaExceeded, ServiceProvider

NAMESPACE_VARIABLE = "ROOKERY_KUBERNETES_NAMESPACE"
CONTEXT_VARIABLE = "ROOKERY_KUBERNETES_CONTEXT"
TEMPLATE_VARIABLE = "ROOKERY_KUBERNETES_POD"
WARM_POOL_VARIABLE = "ROOKERY_KUBERNETES_WARM_POOL"
EXEC_TRIES = 5
NOT_CONFIGURED = f"set {NAMESPACE_VARIABLE} to the namespace for the pods"


def open_kubernetes(home: ProviderHome) -> "KubernetesProvider":
    """Return the `kubernetes` provider for the cluster that the user has chosen, without contacting it."""
    return KubernetesProvider(KubernetesPods(), home)


class KubernetesProvider(ServiceProvider):
    """Creates sandboxes, each in its own pod of a cluster."""

    def diagnose(self) -> Sequence[MachineCheck]:
        if not os.environ.get(NAMESPACE_VARIABLE):
            return [MachineCheck(self.name, "info", "no cluster is chosen", NOT_CONFIGURED)]
        return super().diagnose()


class KubernetesPods:
    """The pods of a namespace, as a `SandboxService`."""

    name = "kubernetes"
    isolated = True

    def __init__(self) -> None:
        self._client: KubernetesClient | None = None
        self._template: dict[str, Any] | None = None
        self._other_policies: list[dict[str, Any]] | None = None
        """The network policies of the namespace except Rookery's, which then exists; None if not known yet."""
        self._claimed: dict[str, str] = {}
        """Names of pods by the names of their claims."""
        self._unused: set[str] = set()
        """Pods whose PID 1 still waits for the program that it becomes."""
        self._lock = asyncio.Lock()

    # ---- settings

    @property
    def _pods(self) -> str:
        return f"/api/v1/{self._namespace}/pods"

    @property
    def _claims(self) -> str:
        return f"/apis/{claims.CLAIM_GROUP}/{self._namespace}/sandboxclaims"

    @property
    def _namespace(self) -> str:
        return f"namespaces/{quote(os.environ[NAMESPACE_VARIABLE])}"

    @property
    def _warm_pool(self) -> str:
        return os.environ.get(WARM_POOL_VARIABLE, "")

    def _open(self) -> KubernetesClient:
        if not os.environ.get(NAMESPACE_VARIABLE):
            raise UsageError(f"no cluster is chosen: {NOT_CONFIGURED}")
        if self._client is None:
            self._client = KubernetesClient(find_cluster(os.environ.get(CONTEXT_VARIABLE, "")))
        return self._client

    def _load_template(self) -> dict[str, Any]:
        """Return the user's pod template; empty if there is none. Raise `UsageError` if it is invalid."""
        if self._template is None:
            name = os.environ.get(TEMPLATE_VARIABLE)
            template = load_yaml(Path(name).expanduser()) if name else {}
            for field in ("metadata", "spec"):
                if not isinstance(template.get(field) or {}, dict):
                    raise UsageError(f"{TEMPLATE_VARIABLE} names a file whose field {field} is not an object")
            self._template = {field: template[field] for field in ("metadata", "spec") if template.get(field)}
        return self._template

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        try:
            self._open()
            if self._warm_pool:
                return claims.find_spec_problems(spec)
            return pod_manifest.find_spec_problems(spec, self._load_template())
        except UsageError as error:
            return [f"The kubernetes provider cannot be used: {error}."]

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    # ---- create

    async def create(self, spec: SandboxSpec, *, labels: Mapping[str, str], lifetime: float) -> str:
        client, name = self._open(), f"rookery-{labels[LABEL]}"
        try:
            closed = spec.network != "all"
            if closed:
                await self._ensure_policy(client)
            if self._warm_pool:
                pod = await self._claim(client, name, spec, labels, lifetime)
                self._claimed[name] = pod["metadata"]["name"]
                if closed:
                    await self._wait_until_closed(client, pod)
                return name
            template = self._load_template()
            body = pod_manifest.build_pod(name, spec, labels=labels, lifetime=lifetime, template=template)
            if closed:
                self._check_policies(body["metadata"]["labels"])
            pod = await self._create_object(client, self._pods, body)
        except APIError as error:
            raise _convert(error) from error
        await self._wait_until_running(client, pod)
        self._unused.add(name)
        return name

    async def _claim(
        self, client: KubernetesClient, name: str, spec: SandboxSpec, labels: Mapping[str, str], lifetime: float
    ) -> Any:
        """Claim a pod of the warm pool and return it."""
        if await client.call("GET", f"/apis/{claims.CLAIM_GROUP}", ok=(404,)) is None:
            raise SandboxError(
                f"the cluster has no SandboxClaims: install agent-sandbox there, or unset {WARM_POOL_VARIABLE}",
                cause="sandbox.refused",
            )
        body = claims.build_claim(name, spec, labels=labels, lifetime=lifetime, warm_pool=self._warm_pool)
        claim = latest = await self._create_object(client, self._claims, body)
        try:
            async for state in client.follow(self._claims, name, version=claim["metadata"]["resourceVersion"]):
                if sandbox := claims.find_sandbox(state, name):
                    path = f"/apis/{claims.SANDBOX_GROUP}/{self._namespace}/sandboxes/{quote(sandbox)}"
                    found = await client.call("GET", path)
                    pod = (found["metadata"].get("annotations") or {}).get(claims.POD_NAME) or sandbox
                    return await client.call("GET", f"{self._pods}/{quote(pod)}")
                latest = state
        except asyncio.CancelledError as error:
            error.__cause__ = SandboxError(f"the claim {name} is not ready: {claims.find_delay(latest)}")
            raise
        raise AssertionError("unreachable")

    async def _create_object(self, client: KubernetesClient, path: str, body: Mapping[str, Any]) -> Any:
        """Create an object, or return the one that an earlier try created whose answer was lost."""
        try:
            return await client.call("POST", path, body)
        except APIError as error:
            if error.reason != "AlreadyExists":
                raise
        found = await client.call("GET", f"{path}/{quote(body['metadata']['name'])}")
        found["metadata"]["resourceVersion"] = ""
        return found

    async def _ensure_policy(self, client: KubernetesClient) -> None:
        """Create the network policy of closed pods, or correct it, once in the life of this process."""
        wanted = pod_manifest.build_policy()
        path = f"/apis/networking.k8s.io/v1/{self._namespace}/networkpolicies"
        async with self._lock:
            if self._other_policies is not None:
                return
            policies = {found["metadata"]["name"]: found for found in await client.list(path)}
            found = policies.pop(pod_manifest.POLICY, None) or await self._create_object(client, path, wanted)
            if found["spec"] != wanted["spec"]:
                wanted["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
                await client.call("PUT", f"{path}/{pod_manifest.POLICY}", wanted)
            self._other_policies = list(policies.values())

    def _check_policies(self, labels: Mapping[str, str]) -> None:
        """Raise `SandboxError` if a closed pod with these labels could send anything."""
        if names := pod_manifest.find_open_policies(self._other_policies or (), labels):
            raise SandboxError(
                f"the network policy {', '.join(names)} lets pods with the network 'none' or 'model' send: let it "
                f"select only pods without the label {pod_manifest.NETWORK_LABEL}={pod_manifest.CLOSED}",
                cause="sandbox.refused",
            )

    async def _wait_until_closed(self, client: KubernetesClient, pod: dict[str, Any]) -> None:
        """Wait until a claimed pod has the label of closed pods, which agent-sandbox adds after it is ready."""
        name = pod["metadata"]["name"]
        async for state in client.follow(self._pods, name):
            if failure := pod_manifest.find_failure(state, name):
                raise failure
            assert state is not None
            labels = state["metadata"].get("labels") or {}
            if labels.get(pod_manifest.NETWORK_LABEL) == pod_manifest.CLOSED:
                self._check_policies(labels)
                return

    async def _wait_until_running(self, client: KubernetesClient, pod: dict[str, Any]) -> None:
        """Wait until the container of a pod runs. The cause of a cancellation says what was waited for."""
        name, latest = pod["metadata"]["name"], pod
        try:
            async for state in client.follow(self._pods, name, version=pod["metadata"]["resourceVersion"]):
                if failure := pod_manifest.find_failure(state, name):
                    if failure.code == "sandbox.create":
                        await self.delete(name)  # the next try uses the same name
                    raise failure
                assert state is not None
                if pod_manifest.is_running(state):
                    return
                latest = state
        except asyncio.CancelledError as error:
            text, full = pod_manifest.find_delay(latest)
            kind = QuotaExceeded if full else SandboxError
            error.__cause__ = kind(f"the pod {name} has not started: {text}")
            raise

    # ---- the other operations

    async def exec(self, machine: str, argv: Sequence[str]) -> ExecStream:
        client, wait = self._open(), 0.5
        path = f"{self._pods}/{quote(self._claimed.get(machine, machine))}"
        pod = await client.call("GET", path, ok=(404,))
        if failure := pod_manifest.find_failure(pod, machine):
            raise MachineGone(str(failure), cause=failure.code)
        if machine not in self._unused:
            command = ["env", f"ROOKERY_HOST_DIR={pod_manifest.HOST_DIR}", *argv]
            return await client.exec(path, command, pod_manifest.find_container(pod)["name"])
        # The first program becomes PID 1. A node may not know yet that the container runs.
        command = ["python3", "-I", "-S", "-c", pod_manifest.RELAY, *argv]
        for _ in range(EXEC_TRIES):
            try:
                stream = await client.exec(path, command, pod_manifest.CONTAINER)
            except (APIError, APIUnreachable) as error:
                if isinstance(error, APIError) and error.status in (401, 403):
                    raise _convert(error) from error
                problem = error
            else:
                self._unused.discard(machine)
                return stream
            await asyncio.sleep(wait)
            wait *= 2
        raise problem

    async def delete(self, machine: str) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 1}
        if self._warm_pool:
            await self._open().call("DELETE", f"{self._claims}/{quote(machine)}", ok=(404,))
        await self._open().call("DELETE", f"{self._pods}/{quote(machine)}", body, ok=(404,))
        self._unused.discard(machine)
        self._claimed.pop(machine, None)

    async def list(self, label: str) -> Mapping[str, Mapping[str, str]]:
        if not os.environ.get(NAMESPACE_VARIABLE):
            return {}
        found = {}
        objects = await self._open().list(self._pods, label=label)
        if self._warm_pool:
            objects += await self._open().list(self._claims, label=label)
        for one in objects:
            metadata = one["metadata"]
            expiry = (metadata.get("annotations") or {}).get(pod_manifest.EXPIRES, "")
            found[metadata["name"]] = {**metadata["labels"], EXPIRY_LABEL: _parse_time(expiry)}
        return found

    async def extend(self, machine: str, *, lifetime: float) -> None:
        path, body = f"{self._pods}/{quote(machine)}", pod_manifest.build_lease(lifetime)
        if machine in self._claimed:
            path, body = f"{self._claims}/{quote(machine)}", claims.build_lease(lifetime)
        await self._open().call("PATCH", path, body, content_type="application/merge-patch+json")


def _convert(error: APIError) -> SandboxError:
    """Return the error for a pod that the server refused to create."""
    text = str(error)
    if error.status == 403 and "exceeded quota" in text:
        return QuotaExceeded(text)
    # A conflict of two requests that use the same quota goes away.
    retry = error.status in (408, 409, 429) or error.status >= 500
    return SandboxError(text, cause="sandbox.create" if retry else "sandbox.refused")


def _parse_time(text: str) -> str:
    """Return a time of Kubernetes as the digits of a Unix time; empty if it is invalid."""
    try:
        return str(int(dt.datetime.fromisoformat(text).timestamp()))
    except ValueError:
        return ""
