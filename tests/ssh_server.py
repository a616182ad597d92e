"""A real OpenSSH server on loopback. `make ssh-server` installs its programs."""

import pytest

from benchmarks.ssh_server import SshServer

__all__ = ["SshServer", "needs_ssh"]

needs_ssh = pytest.mark.needs("ssh")
