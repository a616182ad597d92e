"""Podman's service as another user than root, without the set-user-id programs that give it its users.

Promises:
- it is as private as root's, and as gone when it ends;
- nobody is added to this machine's users: numbers are enough.
"""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from tests.sandboxes.podman.service import ROOT, PrivatePodman

USER = 54321
_MAP = f"0 {USER} 1\\n1 {USER + 1} 65536\\n"
_ENTER = """
mkfifo "$0/go"
mine=$$ before=$(readlink /proc/$$/ns/user)
(
    until now=$(readlink /proc/$mine/ns/user) && [ "$now" != "$before" ]; do sleep 0.01; done
    printf '{map}' > /proc/$mine/uid_map && printf '{map}' > /proc/$mine/gid_map && echo > "$0/go"
) &
exec setpriv --reuid={user} --regid={user} --clear-groups unshare --user sh -c {then} "$0" "$@"
"""
_BECOME = """
read -r _ < "$0/go"
exec setpriv --reuid=0 --regid=0 --clear-groups --pdeathsig KILL \\
    unshare --mount --pid --fork --kill-child=KILL --mount-proc sh -c {then} "$0" "$@"
"""
_OWN = """
[ ! -e /sys/fs/cgroup/unified ] || mount -t tmpfs none /sys/fs/cgroup/unified  # crun knows no mixture of versions
mount -t tmpfs -o mode=755 own "$0/own" && mkdir "$0/own/etc" "$0/own/work" &&
mount -t overlay -o "lowerdir=/etc,upperdir=$0/own/etc,workdir=$0/own/work" own /etc &&
mount -t tmpfs -o mode=755 own /run && rm -rf /etc/containers && cp -r "$0/conf" /etc/containers || exit 1
trap 'exit 0' TERM
cd "$0"
"$@" &
wait $!
"""


def can_be_had() -> bool:
    """Whether another user can reach what this one would start, and where it would work."""
    as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    words = [*as_user, "test", "-x", str(ROOT / "usr/bin/podman")]
    places = [*Path(tempfile.gettempdir()).parents, Path(tempfile.gettempdir())]
    reached = subprocess.run(words, check=False).returncode == 0
    return reached and all(place.stat().st_mode & 0o001 for place in places)


class RootlessPodman(PrivatePodman):
    """Of a user that has 65536 others."""

    suffix = "-rootless"

    def _words(self) -> tuple[list[str], dict[str, str]]:
        words, env = super()._words()
        (self._folder / "go").unlink(missing_ok=True)
        (self._folder / "home").mkdir(exist_ok=True)
        with (self._folder / "conf/storage.conf").open("a") as file:
            file.write(f'rootless_storage_path = "{self._folder}/data"\n')
        for path in (self._folder, *self._folder.rglob("*")):
            os.chown(path, USER, USER, follow_symlinks=False)
        env |= {
            "_CONTAINERS_USERNS_CONFIGURED": "done",
            "_CONTAINERS_ROOTLESS_UID": str(USER),
            "_CONTAINERS_ROOTLESS_GID": str(USER),
            "XDG_RUNTIME_DIR": str(self._folder / "home"),
        }
        return words, env

    def _script(self) -> str:
        script = _BECOME.format(then=shlex.quote(_OWN))
        return _ENTER.format(map=_MAP, user=USER, then=shlex.quote(script))
