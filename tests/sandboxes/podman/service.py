"""Podman's service for the tests alone.

Promises:
- everything of it lies below one folder and in one control group, and it lives in process, mount and control group
  namespaces of its own: it is gone with all that it held when it is stopped, when it is killed, and when the tests
  are;
- no setting, image or container of a podman that is installed here is seen or touched.
"""

import json
import os
import shlex
import signal
from pathlib import Path

from rookery.sandbox_runtime import processes
from tests.sandboxes.docker.engine import PrivateEngine

ROOT = Path(__file__).resolve().parents[3] / ".peers" / "podman" / "root"
"""What `make podman` unpacks."""
_GROUPS = Path("/sys/fs/cgroup")
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
_JOIN = """
for top in {tops}; do
    mkdir -p $top/{group}
    for name in cpuset.cpus cpuset.mems; do [ ! -e $top/$name ] || cat $top/$name > $top/{group}/$name; done
    echo $$ > $top/{group}/cgroup.procs
done
exec unshare --cgroup sh -c {then} "$0" "$@"
"""
"""From here on its control group is the top of all that it sees."""
_LEAVE = """
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p /sys/fs/cgroup/{group}/service && echo $$ > /sys/fs/cgroup/{group}/service/cgroup.procs
fi
exec unshare --mount --pid --fork --kill-child=KILL --mount-proc sh -c {then} "$0" "$@"
"""
"""In the second version no process may sit in a group that has groups with limits in it."""
_OWN = """
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
"""It reads some settings from places that no variable names: it gets its own of them. Containers do not end with
the service, which is started again when it died."""


class PrivatePodman(PrivateEngine):
    """One that can be stopped, killed and started again."""

    suffix = "-podman"

    def kill_service(self) -> None:
        """Without its containers; it comes back."""
        assert self._program is not None
        (first,) = processes.list_children(self._program.pid)
        for pid in processes.list_children(first):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "podman":
                os.kill(pid, signal.SIGKILL)

    def _words(self) -> tuple[list[str], dict[str, str]]:
        spot = self._folder
        (spot / "docker.sock").unlink(missing_ok=True)
        for name in ("conf", "own", "run", "tmp"):
            (spot / name).mkdir(exist_ok=True)
        path = f"{ROOT}/usr/sbin:{ROOT}/usr/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        libraries = f"{ROOT}/usr/lib/{os.uname().machine}-linux-gnu"
        # Podman starts it without variables, so it would not find its libraries.
        runtime = spot / "crun"
        runtime.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {ROOT}/usr/bin/crun "$@"\n')
        runtime.chmod(0o755)
        words = {
            "seccomp": ROOT / "usr/share/containers/seccomp.json",
            "conmon": ROOT / "usr/bin/conmon",
            "path": f"PATH={path}",
            "libraries": f"LD_LIBRARY_PATH={libraries}",
            "helpers": ROOT / "usr/lib/podman",
            "temporary": spot / "tmp",
            "runtime": runtime,
            "networks": spot / "conf/networks",
            "data": spot / "data",
            "run": spot / "run",
        }
        quoted = {name: json.dumps(str(value)) for name, value in words.items()}
        (spot / "conf/containers.conf").write_text(_CONF.format(**quoted))
        (spot / "conf/storage.conf").write_text(_STORAGE.format(**quoted))
        (spot / "conf/registries.conf").write_text(_REGISTRIES)
        (spot / "conf/policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        program = [str(ROOT / "usr/bin/podman"), "system", "service", "--time=0", f"unix://{self.socket}"]
        env = {
            "PATH": path,
            "LD_LIBRARY_PATH": libraries,
            "HOME": str(spot),
            "TMPDIR": str(spot / "tmp"),
            "CONTAINERS_CONF": str(spot / "conf/containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(spot / "conf/storage.conf"),
            # It may ask registries of this machine alone: behind the proxy that it is told of is nobody.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
            "NO_PROXY": "127.0.0.1,localhost",
        }
        return ["setpriv", "--pdeathsig", "KILL", "sh", "-c", self._script(), str(spot), *program], env

    def _script(self) -> str:
        if (_GROUPS / "cgroup.controllers").exists():
            tops = [_GROUPS]
        else:
            tops = [top for top in _GROUPS.iterdir() if (top / "cgroup.procs").exists()]
        names = {"tops": " ".join(map(str, tops)), "group": self._group}
        script = _OWN.format(**names)
        for outer in (_LEAVE, _JOIN):
            script = outer.format(**names, then=shlex.quote(script))
        return script
