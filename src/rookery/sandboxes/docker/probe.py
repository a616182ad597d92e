"""What `rookery doctor` says about containers.

Promises:
- it asks the engine and changes nothing: no container is made;
- no engine is no fault of a machine: it is said with what would add one.
"""

from rookery.core import SandboxError, UsageError
from rookery.sandboxes.docker import asking, wanted
from rookery.sandboxes.local.machine import Check

_FIX = "start an engine (Debian: apt install docker.io) and let this user write to its socket; or set DOCKER_HOST"


def check() -> Check:
    """One line."""
    try:
        place = asking.socket_path()
        info = asking.ask(place, "GET", asking.path("info"), timeout=asking.SLOW_SECONDS)
    except UsageError as error:
        return Check("docker", "info", str(error), "unset DOCKER_HOST, or set it to unix:///path")
    except SandboxError as error:
        why = error.__cause__ or error
        return Check("docker", "info", f"no engine answers at {place}: {why}", _FIX)
    kind = "podman" if wanted.is_podman(info) else "engine"
    said = [f"{kind} {info.get('ServerVersion', '?')} at {place}", f"storage {info.get('Driver', '?')}"]
    said.append(f"cgroups v{info.get('CgroupVersion', '1')}")
    if not wanted.may_have_quota(info):
        said.append("disk is watched, not limited")
    if not wanted.has_gpus(info):
        said.append("no GPUs")
    held = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "processors"}
    weaker = [what for key, what in held.items() if not wanted.holds(info, key)]
    if weaker:
        return Check(
            "docker", "weaker", f"{', '.join(said)}; it cannot limit {', '.join(weaker)}", "see docker info"
        )
    return Check("docker", "ok", ", ".join(said))
