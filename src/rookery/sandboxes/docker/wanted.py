"""What a container is asked to be, and what of a spec an engine cannot give. Pure: plain data in and out.

Promises:
- no network, no capability but those that pid 1 gives up or keeps from programs, no new privileges, no restart, no
  variable of the image's in pid 1, no entry point, health check or init of the image's or the engine's;
- a limit that an engine does not hold is said in words before anything starts, never left out in silence.
"""

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from rookery.core import SandboxSpec
from rookery.core.sandboxes import mount_problems
from rookery.sandboxes.docker import bundle
from rookery.sandboxes.guarded import PATH
from rookery.sandboxes.local.provider import PORT, USER, WORK

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_PTRACE")
"""Until pid 1 has made the working folder and is a user of its own: then CHOWN, DAC_OVERRIDE and SETPCAP go."""
HOSTNAME = "sandbox"
LEAST_MEMORY = 24 << 20
"""Pid 1 takes ten megabytes of it."""
DISK = 1 << 30
"""Of memory, for the folders of a read-only container whose spec names no size."""
_QUOTAS = ("btrfs", "zfs", "devicemapper")


def user_of(spec: SandboxSpec, image: Mapping[str, Any]) -> int | str:
    """Whom commands run as: a number, or a name of the image's that only pid 1 can look up."""
    asked = spec.user or "user"
    if asked == "image":
        named = str((image.get("Config") or {}).get("User") or "").partition(":")[0]
        if named not in ("", "root") and not named.isdecimal():
            return named
        asked = named or "user"
    if asked in ("user", "root"):
        return USER if asked == "user" else 0
    return int(asked) if _is_user(asked) else USER


def work_of(spec: SandboxSpec, image: Mapping[str, Any]) -> str:
    """Where commands start."""
    wanted = spec.workdir if spec.workdir is not None else str((image.get("Config") or {}).get("WorkingDir") or "")
    return posixpath.normpath(posixpath.join(WORK, wanted))


def refused(spec: SandboxSpec) -> list[str]:
    """What no engine could give."""
    said = []
    if not spec.image:
        said.append("The docker provider needs an image: name one that the engine has (--image NAME).")
    if spec.user is not None and spec.user not in ("user", "root", "image") and not _is_user(spec.user):
        said.append(
            "The docker provider runs programs as user, root, image or a number up to 65534, "
            f"not as {spec.user!r}."
        )
    if spec.workdir is not None and ".." in spec.workdir.split("/"):
        said.append(f"The working folder {spec.workdir!r} must not contain '..'.")
    if spec.memory is not None and 0 < spec.memory < LEAST_MEMORY:
        said.append(
            f"A container needs at least {LEAST_MEMORY >> 20} MB of memory; the spec says {spec.memory} bytes."
        )
    if reserved := sorted(name for name in spec.labels if name.startswith("rookery.")):
        said.append(f"The label {reserved[0]!r} is one of rookery's own: use another name.")
    said += mount_problems(spec.mounts)
    if spec.gpus is not None and spec.gpus < 0:
        said.append("The number of GPUs must not be negative.")
    if spec.network == "allow" or spec.allow:
        from rookery.sandboxes import egress_rules  # slow to import, and few sandboxes name any

        said += egress_rules.problems(spec)
    return said


def _is_user(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 65535


def missing(spec: SandboxSpec, info: Mapping[str, Any], networks: Sequence[str]) -> list[str]:
    """What this engine cannot give, as it says of itself."""
    said = []
    if info.get("OSType", "linux") != "linux":
        said.append(f"The engine runs containers of {info['OSType']}; the docker provider needs Linux.")
    for asked, key, what in (
        (spec.memory, "MemoryLimit", "memory"),
        (spec.pids, "PidsLimit", "the number of processes"),
        (spec.cpus, "CpuCfsQuota", "processors"),
    ):
        if asked and not holds(info, key):
            said.append(
                f"The engine cannot limit {what} on this machine's kernel; leave that limit out of the spec."
            )
    if spec.gpus and is_podman(info):
        said.append(
            "Podman's service takes a request for GPUs and gives none: leave gpus out, or use Docker's engine."
        )
    elif spec.gpus and not has_gpus(info):
        said.append(
            f"The spec asks for {spec.gpus} GPU{'s' * (spec.gpus > 1)}, and the engine has none: it names neither "
            "an nvidia runtime nor CDI devices (install the NVIDIA container toolkit, or leave gpus out)."
        )
    if spec.network == "all" and "bridge" not in networks:
        said.append("The engine has no network 'bridge', so a container cannot have the network 'all'.")
    return said


def holds(info: Mapping[str, Any], key: str) -> bool:
    """Whether an engine holds a limit, which `key` of its words about itself is about. One of podman's that is not
    root's leaves all of them out on version 1 of control groups, and does not say so."""
    ignored = is_podman(info) and info.get("Rootless") is True and str(info.get("CgroupVersion", "1")) == "1"
    return info.get(key) is not False and not ignored


def has_gpus(info: Mapping[str, Any]) -> bool:
    devices = info.get("DiscoveredDevices") or ()
    names = "nvidia" in (info.get("Runtimes") or {}) or any("gpu" in str(one.get("ID", "")) for one in devices)
    return names and not is_podman(info)


def is_podman(info: Mapping[str, Any]) -> bool:
    """Whether it is podman's service. What follows from it is said in this module; what its answers mean, where
    Docker's engine would have answered otherwise, in `asking.status_of`."""
    return "BuildahVersion" in info


def may_have_quota(info: Mapping[str, Any]) -> bool:
    """Whether trying is worth it: the engine says no where its storage cannot."""
    status = {str(pair[0]): str(pair[1]) for pair in info.get("DriverStatus") or () if len(pair) == 2}
    return info.get("Driver") in _QUOTAS or status.get("Backing Filesystem") == "xfs"


def container(
    spec: SandboxSpec,
    *,
    image: Mapping[str, Any],
    folder: str,
    line: str,
    word: str,
    labels: Mapping[str, str],
    quota: bool,
    sixth: bool = False,
    podman: bool = False,
) -> dict[str, Any]:
    """The body of the call that creates it. `folder`: the bundle; `line`: where the owner's socket is; `word`:
    what pid 1 says there; `sixth`: whether the kernel has the sixth version of the internet protocol; `podman`:
    whether that is who makes it."""
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
        "CgroupnsMode": "private",  # its path says what else runs on the machine
        "ExtraHosts": [f"{HOSTNAME}:127.0.0.1"],
        "LogConfig": {"Type": "none"},
        "Mounts": [
            _bind(folder, bundle.TOP),
            _bind(line, f"{bundle.TOP}/{bundle.LINE}"),
            *(_bind(mount.source, mount.target) for mount in spec.mounts),
        ],
    }
    if spec.network != "all":
        # Nobody is to be asked, and the machine's name server is not for programs to know.
        host |= {"Dns": ["127.0.0.1"], "DnsSearch": ["."]}
        if sixth:
            host["Sysctls"] = {"net.ipv6.conf.lo.disable_ipv6": "0"}
        if podman:
            # It would show the machine's own list of hosts, and the image's name servers.
            mounted = {mount.target for mount in spec.mounts}
            host["Mounts"] += [
                _bind(f"{folder}/{name}", f"/etc/{name}")
                for name in bundle.ETC
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
        size = spec.disk or DISK
        places = {WORK: 755, "/tmp": 1777, "/run": 755}  # noqa: S108  (the container's)
        # Pid 1 gives them their owner: not every engine can.
        host["Tmpfs"] = {place: f"rw,exec,nosuid,nodev,size={size},mode={mode}" for place, mode in places.items()}
    return {
        "Image": image["Id"],
        "Hostname": HOSTNAME,
        "User": "0:0",
        "WorkingDir": "/",
        "Entrypoint": bundle.words(),
        "Cmd": [],
        # A name without a value takes the image's variable away: what it wants to load into pid 1 is not loaded.
        # To podman it means the service's own variable: it can only be told to make the image's empty.
        "Env": [
            *(f"{name}=" if podman else name for name in variables(image) if name != "PATH"),
            "LC_ALL=C",
            f"PATH={PATH}",
            f"ROOKERY_WORD={word}",
        ],
        **({"Healthcheck": {"Test": ["NONE"]}} if (image.get("Config") or {}).get("Healthcheck") else {}),
        "AttachStdin": False,
        "OpenStdin": False,
        "Tty": False,
        "Labels": {**spec.labels, **labels},
        "HostConfig": host,
    }


def _bind(source: str, target: str) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True}


def variables(image: Mapping[str, Any]) -> dict[str, str]:
    """Those that an image sets."""
    pairs = ((image.get("Config") or {}).get("Env")) or ()
    return {name: value for name, _, value in (str(pair).partition("=") for pair in pairs) if name}


def settings(spec: SandboxSpec, image: Mapping[str, Any], *, watched: bool) -> dict[str, Any]:
    """What pid 1 is told."""
    user = user_of(spec, image)
    return {
        "uid": user if isinstance(user, int) else USER,
        "user": user if isinstance(user, str) else "",
        "work": work_of(spec, image),
        "listen": PORT if spec.network in ("model", "allow") else 0,
        "space": spec.read_only,
        "file": spec.disk if watched and spec.disk else 0,
    }
