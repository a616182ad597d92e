"""A sandbox on the host's network (`network="all"`) must not reach everything of the host."""

import msgspec
import pytest

from rookery.sandboxes import Command
from rookery.sandboxes.local.provider import LocalProvider
from tests.sandboxes.hostile.conftest import Bait
from tests.sandboxes.hostile.test_hostile import SPEC

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONNECT = """
import errno, os, socket
one = socket.socket(socket.AF_UNIX)
try:
    one.connect("\\0" + os.environ["HOST_SOCKET"])
    print("connected")
except OSError as error:
    print(errno.errorcode[error.errno])
own = socket.socket(socket.AF_UNIX)
own.bind("\\0of-the-sandbox")
own.listen()
socket.socket(socket.AF_UNIX).connect("\\0of-the-sandbox")
print("own")
"""


def landlock_version() -> int:
    import ctypes

    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(444), None, ctypes.c_size_t(0), 1))


async def test_host_network_does_not_reach_abstract_sockets(provider: LocalProvider, bait: Bait) -> None:
    if landlock_version() < 6:
        pytest.skip("[probed] this kernel cannot scope abstract sockets (Landlock ABI 6, Linux 6.12)")
    sandbox = await provider.create(msgspec.structs.replace(SPEC, network="all"), attempt="hostile")
    try:
        result = await sandbox.exec(Command(argv=("python3", "-c", CONNECT), env=bait.env))
        assert result.stdout.split() == [b"EPERM", b"own"], result
        assert not bait.was_contacted()
    finally:
        await sandbox.close()
