"""Translate a `SandboxSpec` into a pod, and the state of a pod into an error. Pure: no I/O.

Guarantees:
- a pod has no service account token and is never restarted, and with the networks `none` and `model` it has the
  label that the network policy selects (a *closed* pod);
- unless the user's pod template says otherwise, it runs as user 1000 without capabilities;
- a failure that a program in the pod can cause (its memory, its disk) has another cause than one of the cluster.
"""

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rookery.core import SandboxError, SandboxSpec

CONTAINER = "sandbox"
USER = 1000
HOST_DIR = "/tmp/.rookery"  # noqa: S108  (the pod's)
"""Directory in a pod for the files of Rookery's program."""
HOST_MEMORY = 96 << 20
"""Memory in bytes that a pod has for Rookery's own program, in addition to the memory of the spec."""
MAX_SECONDS = 24 * 3600
"""Default of the pod's `activeDeadlineSeconds`: no pod lives longer, whatever happens to its owner."""
EXPIRES = "rookery-expires"
"""Annotation with the time at which the lease of a pod ends. The reaper deletes pods whose lease has ended."""
NETWORK_LABEL, CLOSED = "sandbox.users.io/rookery-network", "closed"
"""Label that the network policy selects. agent-sandbox lets claims add only labels with this prefix by default."""
POLICY = "rookery-closed"
"""Name of the network policy that denies all traffic of the pods with the network `none` or `model`."""
PID1_SOCKET = "rookery-pid1"
PID1_PROGRAM = f"""
import json,os,signal,socket,sys
for number in (signal.SIGTERM,signal.SIGALRM):signal.signal(number,lambda *_:os._exit(0))
signal.alarm(int(sys.argv[1]))
server=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)
server.bind("\\0{PID1_SOCKET}")
server.listen(1)
connection,_=server.accept()
data,files,_,_=socket.recv_fds(connection,1<<20,3)
signal.alarm(0)
for number,file in enumerate(files):os.dup2(file,number)
os.set_inheritable(connection.fileno(),True)
argv=json.loads(data)
os.execvp(argv[0],argv)
"""
"""Python program that PID 1 of a pod runs at first. It waits for the first `RELAY` and then executes the program
that `RELAY` names, which programs of the sandbox cannot kill, because it is PID 1. It exits if no `RELAY` comes
before the lease ends."""
RELAY = f"""
import json,os,socket,sys,time
end=time.monotonic()+30
while 1:
 relay=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)
 try:relay.connect("\\0{PID1_SOCKET}");break
 except OSError:
  if time.monotonic()>end:raise
  time.sleep(.02)
socket.send_fds(relay,[json.dumps(sys.argv[1:]).encode()],[0,1,2])
relay.recv(1)
"""
"""Program that hands its standard input, output and error to PID 1 (`PID1_PROGRAM`), with the arguments of the
program to run, and waits until that program ends. It is run with `pods/exec`, because what PID 1 of a pod
writes to its own standard output is stored in a log file of the node."""

_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_NAME = re.compile(r"(?:[a-z0-9.-]{1,200}/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_MISSING_IMAGE = re.compile(
    "not found|manifest unknown|does not exist|no such image|denied|unauthorized|invalid reference|not present",
    re.IGNORECASE,
)
_OWN_LIMIT = re.compile("exceed.*limit", re.IGNORECASE)
"""Found in the message of an eviction because of the pod's own disk use, not of a full node."""


def find_spec_problems(spec: SandboxSpec, template: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each part of a spec that a pod cannot have."""
    problems = []
    if not (spec.image or find_container(template).get("image")):
        problems.append("The kubernetes provider needs an image with Python: name one (--image NAME).")
    for name, value in spec.labels.items():
        if not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value) or name.startswith("rookery"):
            problems.append(f"The label {name!r} with the value {value!r} is not valid for Kubernetes.")
    if spec.gpus is not None and spec.gpus < 0:
        problems.append(f"The number of GPUs must not be negative, but is {spec.gpus}.")
    return problems


def find_container(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the container of a pod or pod template that runs the sandbox: the first one; empty if it has none."""
    containers = (template.get("spec") or {}).get("containers") or [{}]
    return containers[0] if isinstance(containers[0], dict) else {}


def build_pod(
    name: str, spec: SandboxSpec, *, labels: Mapping[str, str], lifetime: float, template: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of a pod for a sandbox. `template` is a pod whose fields it gets, too."""
    defaults = {
        "spec": {
            "activeDeadlineSeconds": MAX_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
    }
    own_container = merge(
        {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}},
        find_container(template),
    )
    required_container = {
        "name": CONTAINER,
        "command": ["python3", "-I", "-S", "-c", PID1_PROGRAM, str(int(lifetime))],
        "args": [],
        "env": [*(own_container.get("env") or ()), {"name": "ROOKERY_HOST_DIR", "value": HOST_DIR}],
        "resources": {"limits": _make_limits(spec)},
        **({"image": spec.image} if spec.image else {}),
    }
    others = list((template.get("spec") or {}).get("containers") or ())[1:]
    required: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": make_labels(spec, labels),
            **build_lease(lifetime)["metadata"],
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [merge(own_container, required_container), *others],
        },
    }
    if spec.network != "all":
        # Programs must not learn the cluster's name server.
        required["spec"] |= {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
    return merge(merge(defaults, template), required)


def build_lease(lifetime: float) -> dict[str, Any]:
    """Return the fields of a pod that say that its lease ends in `lifetime` seconds."""
    return {"metadata": {"annotations": {EXPIRES: format_time(lifetime)}}}


def make_labels(spec: SandboxSpec, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a pod. Characters that Kubernetes does not allow are replaced."""
    made = {"app.kubernetes.io/managed-by": "rookery", **spec.labels}
    made |= {name: re.sub(r"[^A-Za-z0-9_.-]", "-", value)[:63].strip("-_.") for name, value in labels.items()}
    return {**made, NETWORK_LABEL: "open" if spec.network == "all" else CLOSED}


def _make_limits(spec: SandboxSpec) -> dict[str, str]:
    limits = {
        "memory": str(spec.memory + HOST_MEMORY) if spec.memory else "",
        "cpu": f"{round(spec.cpus * 1000)}m" if spec.cpus else "",
        "ephemeral-storage": str(spec.disk) if spec.disk else "",
        "nvidia.com/gpu": str(spec.gpus) if spec.gpus else "",
    }
    return {name: value for name, value in limits.items() if value}


def build_policy() -> dict[str, Any]:
    """Return the network policy that denies all traffic of pods with a closed network."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY, "labels": {"app.kubernetes.io/managed-by": "rookery"}},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK_LABEL: CLOSED}},
            "policyTypes": ["Ingress", "Egress"],
        },
    }


def find_open_policies(policies: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> list[str]:
    """Return the names of the network policies that let a pod with these labels send anything.

    Kubernetes allows what any policy of a pod allows, so such a policy opens a closed pod.
    """
    return [
        policy["metadata"]["name"]
        for policy in policies
        if policy["spec"].get("egress") and _selects(policy["spec"].get("podSelector") or {}, labels)
    ]


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects an object with these labels."""
    if not (selector.get("matchLabels") or {}).items() <= labels.items():
        return False
    for rule in selector.get("matchExpressions") or ():
        found, operator = labels.get(rule["key"]), rule["operator"]
        matches = found is not None and (operator not in ("In", "NotIn") or found in rule["values"])
        if matches != (operator in ("In", "Exists")):
            return False
    return True


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two objects merged: objects in both are merged, of everything else the value of `above` is used."""
    merged = dict(below)
    for name, value in above.items():
        found = merged.get(name)
        merged[name] = merge(found, value) if isinstance(found, dict) and isinstance(value, dict) else value
    return merged


def format_time(seconds: float) -> str:
    """Return the time in `seconds` seconds, as Kubernetes writes it."""
    end = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)
    return end.strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- the state of a pod


def is_running(pod: Mapping[str, Any]) -> bool:
    """Return whether a program can be started in the container of a pod."""
    state = _find_status(pod).get("state") or {}
    return pod["status"].get("phase") == "Running" and "running" in state


def find_failure(pod: Mapping[str, Any] | None, name: str) -> SandboxError | None:
    """Return why a pod has failed or can never start; None if it runs or may still start.

    `pod` is None for a deleted pod. The cause of the error is `sandbox.host` if the cluster ended the pod,
    `sandbox.exhausted` or `sandbox.lost` if a program in it may have done so, `task.image` if the image cannot be
    used, `sandbox.refused` if the settings are wrong, and `sandbox.create` if another try may succeed.
    """
    if pod is None:
        return SandboxError(f"the pod {name} was deleted", cause="sandbox.host")
    status = pod.get("status") or {}
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")[:300]
    container = _find_status(pod)
    state = container.get("state") or {}
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    if reason.startswith("OutOf") or reason in ("NodeAffinity", "UnexpectedAdmissionError"):
        return SandboxError(f"the node did not start the pod {name}: {reason}: {message}", cause="sandbox.create")
    if reason:  # Evicted, NodeLost, NodeShutdown, Preempting, DeadlineExceeded, ...
        own = reason == "Evicted" and _OWN_LIMIT.search(message)
        return SandboxError(
            f"the cluster ended the pod {name}: {reason}: {message}",
            cause="sandbox.exhausted" if own else "sandbox.host",
        )
    if ended.get("reason") == "OOMKilled":
        return SandboxError(f"the pod {name} used all of its memory", cause="sandbox.exhausted")
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        text = str(ended.get("message") or "")[:300]
        return SandboxError(f"the image of the pod {name} cannot run python3: {text}", cause="task.image")
    if pod["metadata"].get("deletionTimestamp"):
        return SandboxError(f"the pod {name} was deleted", cause="sandbox.host")
    if ended or status.get("phase") in ("Failed", "Succeeded"):
        text = f"{ended.get('reason', '')} {ended.get('exitCode', '')}".strip()
        return SandboxError(f"the container of the pod {name} ended: {text}", cause="sandbox.lost")
    return _find_start_failure(str(waiting.get("reason") or ""), str(waiting.get("message") or "")[:300], name)


def _find_start_failure(reason: str, message: str, name: str) -> SandboxError | None:
    if reason in ("InvalidImageName", "ErrImageNeverPull") or (
        reason in ("ErrImagePull", "ImagePullBackOff") and _MISSING_IMAGE.search(message)
    ):
        return SandboxError(
            f"the image of the pod {name} cannot be pulled: {reason}: {message}", cause="task.image"
        )
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return SandboxError(f"the pod {name} cannot start: {reason}: {message}", cause="sandbox.refused")
    return None


def find_delay(pod: Mapping[str, Any]) -> tuple[str, bool]:
    """Return why a pod has not started yet, and whether it is because no node has enough free resources."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            text = f"{condition.get('reason', '')}: {condition.get('message', '')}"[:300]
            return text, condition.get("reason") == "Unschedulable"
    waiting = (_find_status(pod).get("state") or {}).get("waiting") or {}
    return f"{waiting.get('reason', status.get('phase', ''))} {waiting.get('message', '')}".strip()[:300], False


def _find_status(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses: Sequence[Mapping[str, Any]] = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((one for one in statuses if one.get("name") == find_container(pod).get("name")), {})
