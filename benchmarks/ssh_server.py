"""A real OpenSSH server on loopback, for tests and benchmarks. `make ssh-server` installs its programs."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from rookery.sandbox_runtime import processes

ROOT = Path(__file__).parents[1] / ".peers" / "ssh" / "root"
SETUP = """
set -e
mount -t tmpfs none /run
mkdir -p /run/sshd /run/state
mkdir -m 777 /run/state-plain
cp "$1/keys" /run/keys
chmod 755 /run
chmod 644 /run/keys
mount --bind "$1/passwd" /etc/passwd
exec "$2" -D -e -f "$1/config"
"""

PLAIN_USER = 23456
"""User ID of `plain`, a user without privileges who can log in."""
START_SECONDS = 60.0


class SshServer:
    """SSH server in its own mount namespace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
                check=True,
            )
        (folder / "keys").write_bytes((folder / "user.pub").read_bytes())
        (folder / "passwd").write_text(
            f"root:x:0:0:root:/root:/bin/sh\nplain:x:{PLAIN_USER}:{PLAIN_USER}::/tmp:/bin/sh\nsshd:x:101:65534::/run/sshd:/usr/sbin/nologin\n"
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (folder / "config").write_text(
            f"""ListenAddress 127.0.0.1
Port {self.port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/keys
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
AcceptEnv ROOKERY_*
MaxStartups 200
MaxSessions 200
Match User plain
    AuthorizedKeysFile /run/keys
"""
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server; return when it accepts connections."""
        libraries = ROOT / "usr/lib" / f"{os.uname().machine}-linux-gnu"
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", SETUP, "sh", self.folder, ROOT / "usr/sbin/sshd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
            )

        end = time.monotonic() + START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the SSH server did not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the server and all its connections."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                for pid in list_descendants(self.process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.process.kill()
            self.process.wait()

    @property
    def options(self) -> tuple[str, ...]:
        """Options with which `ssh` logs in to this server."""
        settings = ("StrictHostKeyChecking=no", f"UserKnownHostsFile={self.folder}/known", "LogLevel=DEBUG1")
        options = [word for setting in settings for word in ("-o", setting)]
        key = ("-F", "none", "-i", f"{self.folder}/user", "-o", "IdentitiesOnly=yes", "-p", str(self.port))
        return (*key, *options)

    def write_config(self) -> Path:
        """Write a configuration file for `ssh -F` in which this server is the hosts here*; return its path."""
        plain = ["Match user plain", "SetEnv ROOKERY_HOST_DIR=/run/state-plain"]
        lines = ["Host here*", "HostName 127.0.0.1", f"Port {self.port}", "User root", "IdentitiesOnly yes"]
        lines += [f"IdentityFile {self.folder}/user", "StrictHostKeyChecking no", "LogLevel ERROR"]
        lines += [f"UserKnownHostsFile {self.folder}/known", "SetEnv ROOKERY_HOST_DIR=/run/state"]
        path = self.folder / "client_config"
        path.write_text("\n    ".join(plain) + "\n" + "\n    ".join(lines) + "\n")
        return path


def list_descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on."""
    found = []
    for child in processes.list_children(pid):
        found += [child, *list_descendants(child)]
    return found
