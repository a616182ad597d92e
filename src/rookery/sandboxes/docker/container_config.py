"""Translate a `SandboxSpec` into the body of a container creation request. Pure: no I/O.

Guarantees:
- a container has no network unless the `SandboxSpec` asks for it, only the capabilities that PID 1 needs, no new
  privileges, no restart policy, and none of the image's environment variables, entry point, health check or init
  process;
- a limit that the container engine cannot enforce is reported before anything starts; it is never dropped
  silently.
"""

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from rookery.core import SandboxSpec
from rookery.core.sandboxes import check_mounts
from rookery.sandboxes.docker import portable_python
from rookery.sandboxes.guarded_sandbox import DEFAULT_PATH
from rookery.sandboxes.networked_sandbox import PORT, USER, WORK

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_PTRACE")
"""Capabilities of PID 1, the guard. It drops CHOWN, DAC_OVERRIDE and SETPCAP once it has created the working
directory and changed its user. The programs of the sandbox have none of them."""
HOSTNAME = "sandbox"
MIN_MEMORY = 24 << 20
"""Smallest memory limit of a container in bytes. Its PID 1 alone uses ten megabytes."""
DEFAULT_TMPFS_BYTES = 1 << 30
"""Size in bytes of the tmpfs of each writable directory in a read-only container whose spec has no disk limit."""
_QUOTA_DRIVERS = ("btrfs", "zfs", "devicemapper")


def choose_user(spec: SandboxSpec, image: Mapping[str, Any]) -> int | str:
    """Return the user that commands run as: a user ID, or a user name that PID 1 looks up in the container."""
    requested = spec.user or "user"
    if requested == "image":
        named = str((image.get("Config") or {}).get("User") or "").partition(":")[0]
        if named not in ("", "root") and not named.isdecimal():
            return named
        requested = named or "user"
    if requested in ("user", "root"):
        return USER if requested == "user" else 0
    return int(requested) if _is_user_id(requested) else USER


def choose_workdir(spec: SandboxSpec, image: Mapping[str, Any]) -> str:
    """Return the working directory of commands: that of `spec`, else that of the image, else a default."""
    image_workdir = str((image.get("Config") or {}).get("WorkingDir") or "")
    return posixpath.normpath(posixpath.join(WORK, spec.workdir if spec.workdir is not None else image_workdir))


def find_spec_problems(spec: SandboxSpec) -> list[str]:
    """Return one sentence for each problem of a spec that makes it unusable with any container engine."""
    problems = []
    if not spec.image:
        problems.append(
            "The docker provider needs an image: name one that the container engine has (--image NAME)."
        )
    if spec.user is not None and spec.user not in ("user", "root", "image") and not _is_user_id(spec.user):
        problems.append(
            "The docker provider runs programs as user, root, image or a number up to 65534, "
            f"not as {spec.user!r}."
        )
    if spec.workdir is not None and ".." in spec.workdir.split("/"):
        problems.append(f"The working directory {spec.workdir!r} must not contain '..'.")
    if spec.memory is not None and 0 < spec.memory < MIN_MEMORY:
        problems.append(
            f"A container needs at least {MIN_MEMORY >> 20} MB of memory, but the sandbox's memory limit is "
            f"{spec.memory} bytes: raise memory."
        )
    if reserved := sorted(name for name in spec.labels if name.startswith("rookery.")):
        problems.append(f"The label {reserved[0]!r} is reserved for Rookery: use another name.")
    problems += check_mounts(spec.mounts)
    if spec.gpus is not None and spec.gpus < 0:
        problems.append(f"The number of GPUs must not be negative, but is {spec.gpus}.")
    if spec.network == "allow" or spec.allow:
        from rookery.sandboxes.egress.rules import find_rule_problems  # slow to import, rarely needed

        problems += find_rule_problems(spec)
    return problems


def _is_user_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 65535


def find_engine_problems(spec: SandboxSpec, info: Mapping[str, Any], networks: Sequence[str]) -> list[str]:
    """Return one sentence for each part of a spec that this container engine (Docker, Podman) does not support.

    `info` is the container engine's `info` response, `networks` the names of its networks.
    """
    problems = []
    if info.get("OSType", "linux") != "linux":
        problems.append(f"The container engine runs {info['OSType']} containers; the docker provider needs Linux.")
    for limit, key, resource in (
        (spec.memory, "MemoryLimit", "memory"),
        (spec.pids, "PidsLimit", "the number of processes"),
        (spec.cpus, "CpuCfsQuota", "processors"),
    ):
        if limit and not enforces_limit(info, key):
            problems.append(
                f"The container engine cannot limit {resource} on this machine's kernel: remove "
                "that limit from the sandbox's settings."
            )
    if spec.gpus and is_podman(info):
        problems.append(
            "Podman's Docker-compatible API ignores requests for GPUs: remove gpus from the sandbox's settings, "
            "or use Docker."
        )
    elif spec.gpus and not has_gpus(info):
        problems.append(
            f"The sandbox requests {spec.gpus} GPU{'s' * (spec.gpus > 1)}, but the container engine "
            "reports neither an nvidia runtime nor CDI devices: install the NVIDIA container toolkit, or remove "
            "gpus from the sandbox's settings."
        )
    if spec.network == "all" and "bridge" not in networks:
        problems.append("The container engine has no network 'bridge', which the network 'all' needs.")
    return problems


def enforces_limit(info: Mapping[str, Any], key: str) -> bool:
    """Return whether the container engine enforces the limit that `key` of its `info` response describes.

    Rootless Podman with cgroups v1 reports support and ignores every limit.
    """
    ignored = is_podman(info) and info.get("Rootless") is True and str(info.get("CgroupVersion", "1")) == "1"
    return info.get(key) is not False and not ignored


def has_gpus(info: Mapping[str, Any]) -> bool:
    devices = info.get("DiscoveredDevices") or ()
    reported = "nvidia" in (info.get("Runtimes") or {}) or any("gpu" in str(one.get("ID", "")) for one in devices)
    return reported and not is_podman(info)


def is_podman(info: Mapping[str, Any]) -> bool:
    """Return whether the container engine is Podman.

    All differences from Docker are handled in this module, except status codes: see `client.normalize_status`.
    """
    return "BuildahVersion" in info


def may_support_quota(info: Mapping[str, Any]) -> bool:
    """Return whether a request for a disk quota may succeed with the storage of this container engine.

    False is certain. If the result is True, the container engine may still refuse the quota.
    """
    status = {str(pair[0]): str(pair[1]) for pair in info.get("DriverStatus") or () if len(pair) == 2}
    return info.get("Driver") in _QUOTA_DRIVERS or status.get("Backing Filesystem") == "xfs"


def creation_request(
    spec: SandboxSpec,
    *,
    image: Mapping[str, Any],
    bundle_directory: str,
    socket_directory: str,
    token: str,
    labels: Mapping[str, str],
    quota: bool,
    ipv6: bool = False,
    podman: bool = False,
) -> dict[str, Any]:
    """Return the body of the request that creates a container.

    `image` is the container engine's description of the image. `bundle_directory` is the host directory with the
    guard program (PID 1 of the container), and `socket_directory` that with the owner's socket. The guard connects
    to the socket and sends `token`. `ipv6`: whether the kernel supports IPv6. `quota`: whether to request a disk
    quota. `podman`: whether the container engine is Podman.
    """
    host: dict[str, Any] = {
        "NetworkMode": "bridge" if spec.network == "all" else "none",
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": spec.read_only,
        "AutoRemove": True,
        "RestartPolicy": {"Name": "no"},
        "Init": False,
        "IpcMode": "private",
        "CgroupnsMode": "private",  # the cgroup path would reveal what else runs on the machine
        "ExtraHosts": [f"{HOSTNAME}:127.0.0.1"],
        "LogConfig": {"Type": "none"},
        "Mounts": [
            _read_only_bind(bundle_directory, portable_python.MOUNT_POINT),
            _read_only_bind(
                socket_directory, f"{portable_python.MOUNT_POINT}/{portable_python.CONTROL_DIRECTORY}"
            ),
            *(_read_only_bind(mount.source, mount.target) for mount in spec.mounts),
        ],
    }
    if spec.network != "all":
        # Programs must not learn the machine's name server.
        host |= {"Dns": ["127.0.0.1"], "DnsSearch": ["."]}
        if ipv6:
            host["Sysctls"] = {"net.ipv6.conf.lo.disable_ipv6": "0"}
        if podman:
            # Podman would expose the host's /etc/hosts and the image's name servers.
            mounted = {mount.target for mount in spec.mounts}
            host["Mounts"] += [
                _read_only_bind(f"{bundle_directory}/{name}", f"/etc/{name}")
                for name in portable_python.ETC
                if not mounted & {"/etc", f"/etc/{name}"}
            ]
    if spec.memory:
        host |= {"Memory": spec.memory, "MemorySwap": spec.memory}
    if spec.pids:
        host["PidsLimit"] = spec.pids
    if spec.cpus:
        host["NanoCpus"] = int(spec.cpus * 1e9)
    if spec.gpus:
        host["DeviceRequests"] = [{"Driver": "nvidia", "Count": spec.gpus, "Capabilities": [["gpu"]]}]
    if quota and spec.disk and not spec.read_only:
        host["StorageOpt"] = {"size": str(spec.disk)}
    if spec.read_only:
        size = spec.disk or DEFAULT_TMPFS_BYTES
        modes = {WORK: 755, "/tmp": 1777, "/run": 755}  # noqa: S108  (the container's)
        # PID 1 sets the owners, because not every container engine supports the uid option.
        host["Tmpfs"] = {path: f"rw,exec,nosuid,nodev,size={size},mode={mode}" for path, mode in modes.items()}
    return {
        "Image": image["Id"],
        "Hostname": HOSTNAME,
        "User": "0:0",
        "WorkingDir": "/",
        "Entrypoint": portable_python.command_line(),
        "Cmd": [],
        # A name without a value removes the image's variable, so that nothing like LD_PRELOAD reaches PID 1. For
        # Podman such an entry means the variable of the service, so there the variable is set to "".
        "Env": [
            *(f"{name}=" if podman else name for name in image_environment(image) if name != "PATH"),
            "LC_ALL=C",
            f"PATH={DEFAULT_PATH}",
            f"ROOKERY_CONTROL_TOKEN={token}",
        ],
        **({"Healthcheck": {"Test": ["NONE"]}} if (image.get("Config") or {}).get("Healthcheck") else {}),
        "AttachStdin": False,
        "OpenStdin": False,
        "Tty": False,
        "Labels": {**spec.labels, **labels},
        "HostConfig": host,
    }


def _read_only_bind(source: str, target: str) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True}


def image_environment(image: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that an image sets."""
    pairs = ((image.get("Config") or {}).get("Env")) or ()
    return {name: value for name, _, value in (str(pair).partition("=") for pair in pairs) if name}


def guard_settings(spec: SandboxSpec, image: Mapping[str, Any], *, limit_file_size: bool) -> dict[str, Any]:
    """Return the settings that the sandbox's owner sends to the guard, PID 1 of the container, at its start."""
    user = choose_user(spec, image)
    return {
        "uid": user if isinstance(user, int) else USER,
        "user": user if isinstance(user, str) else "",
        "workdir": choose_workdir(spec, image),
        "listen_port": PORT if spec.network in ("model", "allow") else 0,
        "work_tmpfs": spec.read_only,
        "max_file_size": spec.disk if limit_file_size and spec.disk else 0,
    }
