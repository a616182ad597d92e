"""Fixtures: one provider for all hostile programs of a module, and host resources that must stay unreachable."""

import ctypes
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from rookery.sandboxes import ProviderHome
from rookery.sandboxes.local.provider import LocalProvider


@dataclass
class Bait:
    """Resources of the host that hostile programs try to reach."""

    env: dict[str, str]
    tcp: socket.socket
    unix: socket.socket

    def was_contacted(self) -> bool:
        """Return whether any program connected to a socket of the host."""
        for one in (self.tcp, self.unix):
            try:
                one.accept()[0].close()
            except BlockingIOError:
                continue
            return True
        return False


@pytest.fixture(scope="module")
def bait(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bait]:
    folder = tmp_path_factory.mktemp("host")
    secret = folder / "secret"
    secret.write_text("the secret of the host")
    secret.chmod(0o644)
    name = f"rookery-host-{os.getpid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x52000000 | os.getpid()
    shared = libc.shmget(key, ctypes.c_size_t(4096), 0o1666)
    tcp = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("\0" + name)
    unix.listen()
    try:
        for one in (tcp, unix):
            one.setblocking(False)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        env = {"SECRET_FILE": str(secret), "HOST_SOCKET": name, "HOST_KEY": str(key), "HOST_BOOT_ID": boot}
        yield Bait({**env, "HOST_PORT": str(tcp.getsockname()[1])}, tcp, unix)
        assert secret.read_text() == "the secret of the host"
    finally:
        tcp.close()
        unix.close()
        libc.shmctl(shared, 0, None)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> ProviderHome:
    return ProviderHome(folder=tmp_path_factory.mktemp("home") / "sandboxes", run=f"hostile-{os.getpid()}")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider(home: ProviderHome) -> AsyncIterator[LocalProvider]:
    """Yield a provider that must leave nothing in its home."""
    made = LocalProvider(home)
    try:
        yield made
    finally:
        await made.close()
    left = [path for path in Path(home.folder).rglob("*") if path.name != "leases"]
    assert left == []
