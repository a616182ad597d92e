"""The process of an SSH tunnel: `python -m rookery.gateway.tunnel_process DESTINATION PORT REMOTE_PORT`.

It starts Rookery's host program on the machine DESTINATION. That program listens on a loopback port there and
forwards its connections to PORT of this machine. It prints a line with its port when it listens. REMOTE_PORT 0
stands for any port.

Guarantees:
- connections and what is under way in them survive a broken SSH connection, which is opened again;
- the machine reaches only PORT of this machine, with at most `MAX_CONNECTIONS` connections at the same time;
- on a machine that cannot run the host program, because it has no Python 3.11 or no msgspec, `ssh -R` forwards the
  port instead. A broken SSH connection then breaks the connections, too.
"""

import asyncio
import logging
import os
import resource
import signal
import sys
from typing import Any, Final

from rookery.core import SandboxError
from rookery.sandboxes.remote.bootstrap import UnsuitableMachine
from rookery.sandboxes.remote.link import Call, Link, copy_both_ways
from rookery.sandboxes.ssh_provider import connect_host, make_forward_command

LISTENING: Final = "the remote port is"
MAX_CONNECTIONS: Final = 8192


async def run(destination: str, port: int, remote_port: int) -> None:
    """Forward the port until the connection is lost, or until SIGTERM, which cancels this function."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    connections = 0

    async def connect(call: Call, method: str, _: Any) -> None:
        nonlocal connections
        if method != "connect" or connections >= MAX_CONNECTIONS:
            raise SandboxError("the call is not allowed", cause="sandbox.refused")
        connections += 1
        try:
            await copy_both_ways(call, *await asyncio.open_connection("127.0.0.1", port))
        finally:
            connections -= 1

    link = Link(await connect_host(destination, run="tunnel"), connect, odd=True, name=destination)
    try:
        found = await link.call("open_port", remote_port)
        _report(f"{LISTENING} {int(found)}")
        reason = await link.lost
        raise SandboxError(f"the connection to {destination} ended: {reason}", cause="sandbox.host")
    finally:
        await link.close()


def _report(text: str) -> None:
    """Write a line to the process that started this one."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> None:
    destination, port, remote_port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(format="%(message)s")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        asyncio.run(run(destination, port, remote_port))
    except asyncio.CancelledError:
        pass
    except UnsuitableMachine as error:
        _report(f"{error}; calls in flight break with the SSH connection")
        command = make_forward_command(destination, port, remote_port)
        os.execvp(command[0], command)  # noqa: S606  (arguments, not a shell command)
    except (SandboxError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
