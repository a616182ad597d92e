"""A private Podman service for tests.

All its files are below one directory and its processes in one cgroup, with their own PID, mount and cgroup
namespaces: it ends, with all its containers, when it is stopped or killed or when the tests end. Settings, images
and containers of an installed Podman are neither read nor changed.
"""

import json
import os
import shlex
import signal
from pathlib import Path

from rookery.sandbox_runtime import processes
from tests.sandboxes.docker.engine import PrivateEngine

ROOT = Path(__file__).resolve().parents[3] / ".peers" / "podman" / "root"
"""Directory into which `make podman` unpacks Podman."""
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CONF = """
[containers]
cgroups = "enabled"
seccomp_profile = {seccomp}
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
conmon_path = [{conmon}]
conmon_env_vars = [{path}, {libraries}]
helper_binaries_dir = [{helpers}]
image_copy_tmp_dir = {temporary}
[engine.runtimes]
crun = [{runtime}]
[network]
network_backend = "netavark"
network_config_dir = {networks}
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = {data}
runroot = {run}
"""
_REGISTRIES = """
unqualified-search-registries = []
[[registry]]
location = "127.0.0.1"
insecure = true
"""
_JOIN_CGROUP = """
for top in {tops}; do
    mkdir -p $top/{group}
    for name in cpuset.cpus cpuset.mems; do [ ! -e $top/$name ] || cat $top/$name > $top/{group}/$name; done
    echo $$ > $top/{group}/cgroup.procs
done
exec unshare --cgroup sh -c {then} "$0" "$@"
"""
"""Joins the cgroup, which then is the root of the cgroup namespace."""
_LEAVE_CGROUP = """
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p /sys/fs/cgroup/{group}/service && echo $$ > /sys/fs/cgroup/{group}/service/cgroup.procs
fi
exec unshare --mount --pid --fork --kill-child=KILL --mount-proc sh -c {then} "$0" "$@"
"""
"""In cgroup v2, a cgroup whose children have controllers must not have processes."""
_OVERRIDE_AND_SERVE = """
for top in {tops}; do mount --bind $top/{group} $top || exit 1; done
mount -t tmpfs -o mode=755 own "$0/own" && mkdir "$0/own/etc" "$0/own/work" &&
mount -t overlay -o "lowerdir=/etc,upperdir=$0/own/etc,workdir=$0/own/work" own /etc &&
mount -t tmpfs -o mode=755 own /run && rm -rf /etc/containers && cp -r "$0/conf" /etc/containers || exit 1
trap 'exit 0' TERM
cd "$0"
while :; do
    rm -f "$0/docker.sock"
    "$@" &
    wait $!
    sleep 0.1
done
"""
"""Overrides directories with settings that no variable can change. Restarts the service when it dies; containers
survive that."""


class PrivatePodman(PrivateEngine):
    """A service that can be stopped, killed and started again."""

    suffix = "-podman"

    def kill_service(self) -> None:
        """Kill the service without its containers. It is restarted."""
        assert self._program is not None
        (first,) = processes.list_children(self._program.pid)
        for pid in processes.list_children(first):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "podman":
                os.kill(pid, signal.SIGKILL)

    def _command(self) -> tuple[list[str], dict[str, str]]:
        folder = self._folder
        (folder / "docker.sock").unlink(missing_ok=True)
        for name in ("conf", "own", "run", "tmp"):
            (folder / name).mkdir(exist_ok=True)
        path = f"{ROOT}/usr/sbin:{ROOT}/usr/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        libraries = f"{ROOT}/usr/lib/{os.uname().machine}-linux-gnu"
        # Podman starts crun without variables, so it would not find its libraries.
        runtime = folder / "crun"
        runtime.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {ROOT}/usr/bin/crun "$@"\n')
        runtime.chmod(0o755)
        values = {
            "seccomp": ROOT / "usr/share/containers/seccomp.json",
            "conmon": ROOT / "usr/bin/conmon",
            "path": f"PATH={path}",
            "libraries": f"LD_LIBRARY_PATH={libraries}",
            "helpers": ROOT / "usr/lib/podman",
            "temporary": folder / "tmp",
            "runtime": runtime,
            "networks": folder / "conf/networks",
            "data": folder / "data",
            "run": folder / "run",
        }
        quoted = {name: json.dumps(str(value)) for name, value in values.items()}
        (folder / "conf/containers.conf").write_text(_CONF.format(**quoted))
        (folder / "conf/storage.conf").write_text(_STORAGE.format(**quoted))
        (folder / "conf/registries.conf").write_text(_REGISTRIES)
        (folder / "conf/policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        program = [str(ROOT / "usr/bin/podman"), "system", "service", "--time=0", f"unix://{self.socket}"]
        env = {
            "PATH": path,
            "LD_LIBRARY_PATH": libraries,
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "CONTAINERS_CONF": str(folder / "conf/containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "conf/storage.conf"),
            # Only registries on this machine are reachable: nothing listens at this proxy.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
            "NO_PROXY": "127.0.0.1,localhost",
        }
        return ["setpriv", "--pdeathsig", "KILL", "sh", "-c", self._script(), str(folder), *program], env

    def _script(self) -> str:
        if (_CGROUP_ROOT / "cgroup.controllers").exists():
            tops = [_CGROUP_ROOT]
        else:
            tops = [top for top in _CGROUP_ROOT.iterdir() if (top / "cgroup.procs").exists()]
        names = {"tops": " ".join(map(str, tops)), "group": self._cgroup}
        script = _OVERRIDE_AND_SERVE.format(**names)
        for outer in (_LEAVE_CGROUP, _JOIN_CGROUP):
            script = outer.format(**names, then=shlex.quote(script))
        return script
