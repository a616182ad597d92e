"""The `ssh` provider: local sandboxes of other machines, reached with OpenSSH. Runs in the owner's process.

The environment variable ROOKERY_SSH_HOSTS names the machines. Each needs Python 3.11 or newer, and what local
sandboxes need (`rookery doctor` says which machine lacks what). The code is copied there over the same connection.

Guarantees:
- one ssh process per machine and owner carries all sandboxes; it ends with the owner, and the sandboxes shortly
  after it;
- an ssh process that ends is started again, and its sandboxes and running commands continue;
- a machine that does not answer is avoided, and its lost sandboxes are infrastructure failures (`sandbox.host`);
- a sandbox with the network `model` reaches the address that its owner serves, through the same connection, and
  nothing else. The owner needs no port that the machine can reach.
"""

import asyncio
import os
import re
import shlex
import shutil
from collections.abc import Sequence

import msgspec

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.core.sandboxes import check_mounts
from rookery.sandboxes.local.provider import LocalProvider
from rookery.sandboxes.protocol import MachineCheck, ProviderHome
from rookery.sandboxes.remote import bootstrap
from rookery.sandboxes.remote.client import RemoteHost, RemoteSandbox
from rookery.sandboxes.remote.host_pool import HostPool, PooledHost
from rookery.sandboxes.remote.link import Connection, HostLost
from rookery.sandboxes.remote.process_connection import ProcessConnection

HOSTS_VARIABLE = "ROOKERY_SSH_HOSTS"
OPTIONS_VARIABLE = "ROOKERY_SSH_OPTIONS"
PYTHON_VARIABLE = "ROOKERY_SSH_PYTHON"
CONNECT_SECONDS = 30.0
DIAGNOSE_SECONDS = 40.0
_DESTINATION = re.compile(r"[A-Za-z0-9_.@:\[\]%+-]+")
_OPTIONS = (
    "BatchMode=yes",
    "ServerAliveInterval=10",
    "ServerAliveCountMax=3",
    f"ConnectTimeout={CONNECT_SECONDS:g}",
)


def parse_hosts(text: str) -> list[PooledHost]:
    """Return the hosts that a text names: SSH destinations, each optionally with `=CAPACITY`, separated by commas.

    Raise `UsageError` if one of them is invalid.
    """
    hosts: dict[str, PooledHost] = {}
    for word in text.replace(",", " ").split():
        destination, equals, capacity = word.partition("=")
        check_destination(destination)
        if equals and not (capacity.isascii() and capacity.isdecimal() and 0 < int(capacity) <= 100_000):
            raise UsageError(
                f"{HOSTS_VARIABLE} gives the host {destination} the capacity {capacity!r}; use a positive number"
            )
        hosts[destination] = PooledHost(name=destination, capacity=int(capacity or 0))
    return list(hosts.values())


def check_destination(destination: str) -> None:
    """Raise `UsageError` unless a text is an SSH destination, such as USER@HOST."""
    if not _DESTINATION.fullmatch(destination) or destination.startswith("-"):
        raise UsageError(
            f"{destination!r:.100} is not an SSH destination; use USER@HOST or a host of ~/.ssh/config"
        )


class SshProvider:
    """Creates local sandboxes on other machines."""

    name = "ssh"
    isolated = True
    own_loopback = True
    remote = True

    def __init__(self, home: ProviderHome) -> None:
        self._home = home
        self._pool: HostPool | None = None
        self._hosts: dict[str, RemoteHost] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._slot_freed = asyncio.Event()
        """Set when a sandbox is closed."""

    @property
    def pool(self) -> HostPool:
        """The hosts, with their load and health."""
        if self._pool is None:
            self._pool = HostPool(parse_hosts(os.environ.get(HOSTS_VARIABLE, "")))
        return self._pool

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        try:
            if not parse_hosts(os.environ.get(HOSTS_VARIABLE, "")):
                return [f"The ssh provider has no hosts: set {HOSTS_VARIABLE} to USER@HOST, several with commas."]
        except UsageError as error:
            return [f"The ssh provider cannot be used: {error}."]
        if shutil.which("ssh") is None:
            return ["The ssh provider needs the program ssh: install an SSH client."]
        # Mounts and images are directories of the hosts, which check them when they create a sandbox.
        here = msgspec.structs.replace(spec, mounts=())
        return [*LocalProvider(self._home).find_unsupported(here), *check_mounts(spec.mounts)]

    def diagnose(self) -> Sequence[MachineCheck]:
        try:
            hosts = parse_hosts(os.environ.get(HOSTS_VARIABLE, ""))
        except UsageError as error:
            return [MachineCheck("ssh", "info", str(error))]
        if not hosts:
            return [MachineCheck("ssh", "info", "no hosts", f"set {HOSTS_VARIABLE} to USER@HOST")]
        return asyncio.run(self._diagnose(hosts))

    async def _diagnose(self, hosts: list[PooledHost]) -> list[MachineCheck]:
        async def examine(host: PooledHost) -> MachineCheck:
            try:
                async with asyncio.timeout(DIAGNOSE_SECONDS):
                    remote = await self._connect(host)
                    try:
                        version = await remote.greet()
                        problem = await remote.check(SandboxSpec())
                    finally:
                        await remote.close()
            except (SandboxError, OSError) as error:
                return MachineCheck(host.name, "weaker", str(error) or "it did not answer in time")
            if problem:
                return MachineCheck(host.name, "weaker", problem, f"run `rookery doctor` on {host.name}")
            limit = f"at most {host.capacity} sandboxes" if host.capacity else "no limit of sandboxes"
            return MachineCheck(host.name, "ok", f"Python {version}, {limit}")

        checks = await asyncio.gather(*map(examine, hosts))
        usable = sum(check.status == "ok" for check in checks)
        summary = MachineCheck("ssh", "ok" if usable else "info", f"{usable} of {len(hosts)} hosts can be used")
        return [summary, *checks]

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> RemoteSandbox:
        problems = self.check(spec)
        if problems:
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        pool, loop = self.pool, asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            chosen = pool.choose(loop.time())
            if not isinstance(chosen, PooledHost):
                await self._wait_for_capacity(chosen, end)
                continue
            try:
                return await self._create_on(chosen, spec, attempt, end - loop.time())
            except SandboxError as error:
                if error.code == "sandbox.quota":
                    pool.note_full(chosen, loop.time())
                elif error.code == "sandbox.host":
                    pool.note_failure(chosen, str(error), loop.time())
                else:
                    pool.note_closed(chosen)
                    raise
            except BaseException:
                pool.note_closed(chosen)
                raise

    async def _wait_for_capacity(self, until: float, end: float) -> None:
        """Wait until a host may be below its limit again. Raise `SandboxError` if that is after `end`."""
        now = asyncio.get_running_loop().time()
        if until > end or now >= end:
            reasons = "; ".join(f"{host.name}: {host.problem or 'it is full'}" for host in self.pool.hosts)
            down = all(host.failures for host in self.pool.hosts)
            raise SandboxError(
                f"no host could create a sandbox in time ({reasons})",
                cause="sandbox.host" if down else "sandbox.quota",
            )
        self._slot_freed.clear()
        try:
            async with asyncio.timeout(max(0.01, until - now)):
                await self._slot_freed.wait()
        except TimeoutError:
            pass

    async def _create_on(self, host: PooledHost, spec: SandboxSpec, attempt: str, timeout: float) -> RemoteSandbox:
        pool = self.pool
        remote = await self._open_host(host, timeout)
        wanted = msgspec.structs.replace(spec, provider="local")
        sandbox = await remote.create(wanted, attempt=attempt, timeout=timeout)
        sandbox.spec = spec
        pool.note_success(host)

        async def on_closed() -> None:
            pool.note_closed(host)
            self._slot_freed.set()

        sandbox.on_closed = on_closed
        return sandbox

    async def _open_host(self, host: PooledHost, timeout: float) -> RemoteHost:
        """Return the connection to a host; open it if there is none or the last one ended."""
        async with self._locks.setdefault(host.name, asyncio.Lock()):
            found = self._hosts.get(host.name)
            if found is not None and not found.link.lost.done():
                return found
            if found is not None:
                del self._hosts[host.name]
                await found.close()
            try:
                async with asyncio.timeout(min(timeout, CONNECT_SECONDS)):
                    remote = await self._connect(host)
                    try:
                        await remote.greet()
                    except BaseException:
                        await remote.close()
                        raise
            except TimeoutError:
                raise HostLost(f"{host.name} did not answer in time") from None
            self._hosts[host.name] = remote
            return remote

    async def _connect(self, host: PooledHost) -> RemoteHost:
        try:
            connection = await connect_host(host.name, run=self._home.run, capacity=host.capacity)
        except bootstrap.UnsuitableMachine as error:
            raise HostLost(str(error)) from error  # another host may be suitable
        return RemoteHost(connection, host.name, self.name)

    async def close(self) -> None:
        hosts, self._hosts = list(self._hosts.values()), {}
        await asyncio.gather(*(host.close() for host in hosts))


async def connect_host(destination: str, *, run: str, capacity: int = 0) -> Connection:
    """Start the program that runs sandboxes on another machine and return a connection to it that can be resumed.

    `run` is the name of the run, and `capacity` the maximum number of sandboxes, 0 for no limit. Raise
    `UnsuitableMachine` if Python or a library is missing there, and `HostLost` if starting fails otherwise.
    """
    settings = {"provider": "local", "run": run, "capacity": capacity, "eof_ends": True}
    latest: ProcessConnection | None = None

    async def open_program(arguments: Sequence[str]) -> ProcessConnection:
        nonlocal latest
        # If this process dies, ssh must still tell the host that its standard input has ended.
        latest = await ProcessConnection.open(make_command(destination, arguments), outlives_parent=True)
        return latest

    try:
        return await bootstrap.start_host(open_program, settings, destination)
    except bootstrap.UnsuitableMachine:
        raise
    except (SandboxError, OSError) as error:
        text = await latest.describe_end() if latest is not None else ""
        raise HostLost(f"{error}{': ' + text if text else ''}") from error


def ssh_options() -> list[str]:
    """Return the options of `ssh` that every connection to another machine uses."""
    own = shlex.split(os.environ.get(OPTIONS_VARIABLE, ""))
    return [*own, *(word for option in _OPTIONS for word in ("-o", option))]


def make_command(destination: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs Python with `arguments` on another machine."""
    python = os.environ.get(PYTHON_VARIABLE) or "python3"
    return ["ssh", "-T", *ssh_options(), "--", destination, shlex.join([python, *arguments])]


def make_forward_command(destination: str, port: int, remote_port: int) -> list[str]:
    """Return the command line that forwards a port of another machine and writes it to standard error."""
    forward = (
        "-v",
        "-N",
        "-T",
        "-o",
        "ExitOnForwardFailure=yes",
        "-R",
        f"127.0.0.1:{remote_port}:127.0.0.1:{port}",
    )
    return ["ssh", *forward, *ssh_options(), "--", destination]
