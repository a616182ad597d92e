"""A private Podman service of another user than root, without set-user-ID programs that map its users.

The user does not have to exist on this machine: its number is enough.
"""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from tests.sandboxes.podman.service import ROOT, PrivatePodman

USER = 54321
_MAP = f"0 {USER} 1\\n1 {USER + 1} 65536\\n"
_ENTER_USER_NAMESPACE = """
mkfifo "$0/go"
mine=$$ before=$(readlink /proc/$$/ns/user)
(
    until now=$(readlink /proc/$mine/ns/user) && [ "$now" != "$before" ]; do sleep 0.01; done
    printf '{map}' > /proc/$mine/uid_map && printf '{map}' > /proc/$mine/gid_map && echo > "$0/go"
) &
exec setpriv --reuid={user} --regid={user} --clear-groups unshare --user sh -c {then} "$0" "$@"
"""
_BECOME_ROOT = """
read -r _ < "$0/go"
exec setpriv --reuid=0 --regid=0 --clear-groups --pdeathsig KILL \\
    unshare --mount --pid --fork --kill-child=KILL --mount-proc sh -c {then} "$0" "$@"
"""
_OVERRIDE_AND_SERVE = """
[ ! -e /sys/fs/cgroup/unified ] || mount -t tmpfs none /sys/fs/cgroup/unified  # crun supports no mix
mount -t tmpfs -o mode=755 own "$0/own" && mkdir "$0/own/etc" "$0/own/work" &&
mount -t overlay -o "lowerdir=/etc,upperdir=$0/own/etc,workdir=$0/own/work" own /etc &&
mount -t tmpfs -o mode=755 own /run && rm -rf /etc/containers && cp -r "$0/conf" /etc/containers || exit 1
trap 'exit 0' TERM
cd "$0"
"$@" &
wait $!
"""


def is_available() -> bool:
    """Return whether another user can execute Podman and reach the temporary directory."""
    as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    command = [*as_user, "test", "-x", str(ROOT / "usr/bin/podman")]
    places = [*Path(tempfile.gettempdir()).parents, Path(tempfile.gettempdir())]
    reached = subprocess.run(command, check=False).returncode == 0
    return reached and all(place.stat().st_mode & 0o001 for place in places)


class RootlessPodman(PrivatePodman):
    """A service of a user that has 65536 subordinate users."""

    suffix = "-rootless"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        command, env = super()._command()
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
        return command, env

    def _script(self) -> str:
        script = _BECOME_ROOT.format(then=shlex.quote(_OVERRIDE_AND_SERVE))
        return _ENTER_USER_NAMESPACE.format(map=_MAP, user=USER, then=shlex.quote(script))
