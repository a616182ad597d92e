"""Claims of prewarmed pods (`SandboxClaim` of the project agent-sandbox, `agents.x-k8s.io`). Pure: no I/O.

A claim takes a pod from a warm pool. Its `shutdownTime` is the lease of the pod; the cluster itself enforces it.
"""

from collections.abc import Mapping
from typing import Any

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes.kubernetes.pod_manifest import NETWORK_LABEL, format_time, make_labels

CLAIM_GROUP = "extensions.agents.x-k8s.io/v1beta1"
SANDBOX_GROUP = "agents.x-k8s.io/v1beta1"
POD_NAME = "agents.x-k8s.io/pod-name"
"""Annotation of a `Sandbox` with the name of its pod, if that differs from its own."""
_FINAL_REASONS = {
    "ClaimExpired",
    "EnvVarsInjectionRejected",
    "InvalidMetadata",
    "SandboxExpired",
    "TemplateNotFound",
    "VolumeClaimTemplatesError",
    "WarmPoolNotFound",
}
"""Reasons for which waiting for a claim is in vain: the settings must be changed."""


def find_spec_problems(spec: SandboxSpec) -> list[str]:
    """Return one sentence for each part of a spec that a prewarmed pod cannot have."""
    if spec.image or spec.cpus or spec.gpus or spec.disk:
        return [
            "The pods of a warm pool have the image and the limits of its template: remove them from the settings."
        ]
    return []


def build_claim(
    name: str, spec: SandboxSpec, *, labels: Mapping[str, str], lifetime: float, warm_pool: str
) -> dict[str, Any]:
    """Return the manifest of a claim."""
    own = make_labels(spec, labels)
    return {
        "apiVersion": CLAIM_GROUP,
        "kind": "SandboxClaim",
        "metadata": {"name": name, "labels": own},
        "spec": {
            "warmPoolRef": {"name": warm_pool},
            **build_lease(lifetime)["spec"],
            # agent-sandbox adds it to the pod that the claim gets, a moment later.
            "additionalPodMetadata": {"labels": {NETWORK_LABEL: own[NETWORK_LABEL]}},
        },
    }


def build_lease(lifetime: float) -> dict[str, Any]:
    """Return the fields of a claim that let the cluster delete it, with its pod, after `lifetime` seconds."""
    return {"spec": {"lifecycle": {"shutdownTime": format_time(lifetime), "shutdownPolicy": "Delete"}}}


def find_sandbox(claim: Mapping[str, Any] | None, name: str) -> str:
    """Return the name of the `Sandbox` object of a claim; empty while it is not ready.

    `claim` is None for a deleted claim. Raise `SandboxError` if the claim has failed.
    """
    if claim is None:
        raise SandboxError(f"the claim {name} was deleted", cause="sandbox.create")
    status = claim.get("status") or {}
    ready = _find_ready(claim)
    if ready.get("status") == "False" and ready.get("reason") in _FINAL_REASONS:
        raise SandboxError(f"the claim {name} was refused: {ready.get('message', '')}", cause="sandbox.refused")
    return str((status.get("sandbox") or {}).get("name") or "") if ready.get("status") == "True" else ""


def find_delay(claim: Mapping[str, Any]) -> str:
    """Return why a claim is not ready yet."""
    ready = _find_ready(claim)
    return f"{ready.get('reason', 'Pending')} {ready.get('message', '')}".strip()[:300]


def _find_ready(claim: Mapping[str, Any]) -> Mapping[str, Any]:
    conditions = (claim.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == "Ready"), {})
