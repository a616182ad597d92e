"""A provider for any service that rents machines, made of five operations. Runs in the owner's process.

A service that can create a machine, start a program in it, delete it, list machines by label and extend their
lifetime is a complete provider: `ServiceProvider` starts Rookery's own program in each machine (`remote.host`) and
uses the machine as one sandbox. Commands, background processes, shells and files work as in other sandboxes.

Guarantees:
- a failed or cancelled creation deletes the machine, also if the service's answer with its ID was lost;
- while the service is unavailable or its quota is exhausted, `create` waits, up to its deadline, and tries again;
- the owner extends the lifetime of its machines while they are in use, so that those of a killed owner end; the
  reaper finds them by label before that;
- a machine without `sh` or Python 3.11 fails the creation, with the cause `task.image` if the spec names an image,
  else `sandbox.refused`;
- a connection that breaks, or on which nothing arrives for 30 seconds, is opened again. Calls raise `HostLost` at
  once if `exec` raises `MachineGone`, with its cause (`sandbox.lost` by default), and otherwise after 30 seconds.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from rookery.core import SandboxError, SandboxSpec
from rookery.core.errors import describe
from rookery.core.lifetimes import detached_context
from rookery.sandboxes import leases
from rookery.sandboxes.protocol import Lease, MachineCheck, ProviderHome
from rookery.sandboxes.remote import bootstrap
from rookery.sandboxes.remote.client import RemoteHost, RemoteSandbox
from rookery.sandboxes.remote.link import Connection, HostLost

_log = logging.getLogger("rookery.sandboxes")
T = TypeVar("T")

LIFETIME_SECONDS = 900.0
"""Lifetime that is requested for a machine. It is extended when a third of it has passed."""
MAX_CREATING = 32
"""Number of machines that are created at the same time."""
MIN_WAIT = 0.5
"""Delay before a failed operation of the service is repeated. It doubles after each failure, up to `MAX_WAIT`."""
MAX_WAIT = 10.0
DELETE_SECONDS = 60.0
LABEL = "rookery"
"""Label of every machine. Its value is unique for each machine."""
OWNER_LABEL, HOME_LABEL, RUN_LABEL = "rookery-owner", "rookery-home", "rookery-run"
EXPIRY_LABEL = "rookery-expiry"
"""Unix time at which the lifetime of a machine ends, in the labels that `SandboxService.list` returns. The reaper
deletes a machine whose lifetime is over, on whichever computer its owner ran. Only for services that do not delete
such machines by themselves."""


class QuotaExceeded(SandboxError):  # noqa: N818  (a state of the service)
    """The service has reached its limit of machines. Raised by `SandboxService.create`; the provider waits."""

    cause = "sandbox.quota"


class SandboxService(Protocol):
    """The operations of a service that rents machines. Every operation may raise any exception if it fails.

    A machine needs `sh` and Python 3.11 or newer as `python3`. If its version or architecture differs from that of
    this process, the library msgspec must be installed there.
    """

    name: str
    """Name of the provider."""
    isolated: bool
    """True if programs in a machine reach nothing outside of it except what the spec's network allows."""

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        """Return one sentence for each part of `spec` that the service does not support."""
        ...

    async def create(self, spec: SandboxSpec, *, labels: Mapping[str, str], lifetime: float) -> str:
        """Create a machine with the image, CPUs, memory and network of `spec`, and return its ID.

        A machine with the network `none` or `model` must reach no network. The service deletes it by itself after
        `lifetime` seconds. Raise `QuotaExceeded` if the limit is reached. If this call is cancelled, the
        `__cause__` of the `CancelledError` can say what it was waiting for.
        """
        ...

    async def exec(self, machine: str, argv: Sequence[str]) -> Connection:
        """Start a program in a machine and return a connection to its standard input and output.

        It is called again if a connection breaks. Raise `MachineGone` if the machine does not exist any more.
        """
        ...

    async def delete(self, machine: str) -> None:
        """Delete a machine. Do nothing if it does not exist."""
        ...

    async def list(self, label: str) -> Mapping[str, Mapping[str, str]]:
        """Return the labels of all machines that have the label `label`, by their IDs."""
        ...

    async def extend(self, machine: str, *, lifetime: float) -> None:
        """Let a machine live for `lifetime` seconds from now."""
        ...

    async def close(self) -> None:
        """Close connections to the service. It can be used again, also on another event loop."""
        ...


class ServiceProvider:
    """Creates sandboxes, each in its own machine of a service."""

    poolable = True
    own_loopback = True
    remote = True

    def __init__(self, service: SandboxService, home: ProviderHome) -> None:
        self.name = service.name
        self.isolated = service.isolated
        self.service = service
        """The service whose machines the sandboxes run in."""
        self._home = home
        self._hosts: set[RemoteHost] = set()
        self._creating = asyncio.Semaphore(MAX_CREATING)
        self._slot_freed = asyncio.Event()
        """Set when a machine is deleted."""

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        problems = []
        if spec.network == "allow" or spec.allow:
            problems.append(f"The {self.name} provider has no network with an allow-list.")
        if spec.mounts or spec.read_only or spec.user is not None:
            problems.append(f"The {self.name} provider supports no mounts, users and read-only file systems.")
        return [*problems, *self.service.check(spec)]

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> RemoteSandbox:
        if problems := self.check(spec):
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        identity = secrets.token_hex(8)
        try:
            async with asyncio.timeout(timeout), self._creating:
                machine = await self._create_machine(spec, identity, timeout)
                return await self._open(machine, spec, attempt, timeout)
        except BaseException as error:
            cleanup = asyncio.get_running_loop().create_task(
                self._delete_by_label(identity), context=detached_context()
            )
            await asyncio.shield(cleanup)
            if isinstance(error, TimeoutError):
                reason = error.__cause__.__cause__ if error.__cause__ is not None else None
                raise SandboxError(
                    f"{self.name} did not create a sandbox within {timeout:g} s{f': {reason}' if reason else ''}",
                    cause="sandbox.quota" if isinstance(reason, QuotaExceeded) else "sandbox.create",
                ) from error
            raise

    async def _create_machine(self, spec: SandboxSpec, identity: str, timeout: float) -> str:
        labels = {
            LABEL: identity,
            OWNER_LABEL: f"{_machine_hash()}.{os.getpid()}.{leases.read_start_ticks(os.getpid())}",
            HOME_LABEL: _home_hash(self._home.folder),
            RUN_LABEL: self._home.run[:60],
        }
        end, wait = time.monotonic() + timeout, MIN_WAIT
        problem: Exception | None = None
        while True:
            try:
                return await self.service.create(spec, labels=labels, lifetime=LIFETIME_SECONDS)
            except asyncio.CancelledError as error:
                error.__cause__ = error.__cause__ or problem
                raise
            except Exception as error:
                problem = error
                full = isinstance(error, QuotaExceeded)
                if isinstance(error, SandboxError) and error.code not in ("sandbox.create", "sandbox.quota"):
                    raise
                if time.monotonic() + wait > end:
                    raise SandboxError(
                        f"{self.name} could not create a sandbox: {describe(error)}",
                        cause="sandbox.quota" if full else "sandbox.create",
                    ) from error
                _log.info("%s could not create a sandbox and is asked again: %s", self.name, describe(error))
            self._slot_freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._slot_freed.wait()
            wait = min(MAX_WAIT, 2 * wait)

    async def _open(self, machine: str, spec: SandboxSpec, attempt: str, timeout: float) -> RemoteSandbox:
        """Start the program in a machine and return the machine as a sandbox."""
        name = f"{self.name} {machine}"

        async def open_program(arguments: Sequence[str]) -> Connection:
            work = self.service.exec(machine, ["sh", "-c", bootstrap.FIND_PYTHON, "sh", *arguments])
            return await _convert_errors(work, f"{name} cannot run programs")

        # The files of a machine that is not isolated are also those of others.
        provider = "machine" if self.isolated else "subprocess"
        settings = {"provider": provider, "run": self._home.run, "capacity": 0, "eof_ends": False}
        try:
            connection = await bootstrap.start_host(open_program, settings, name)
        except bootstrap.UnsuitableMachine as error:
            if spec.image is None:
                raise
            raise SandboxError(f"the image {spec.image} cannot be used: {error}", cause="task.image") from error
        # A program of the sandbox may have ended the host, which runs beside it.
        host = RemoteHost(connection, name, self.name, cause="sandbox.lost")
        self._hosts.add(host)
        keeping = asyncio.get_running_loop().create_task(self._keep(machine), context=detached_context())

        async def on_closed() -> None:
            keeping.cancel()
            self._hosts.discard(host)
            try:
                await host.link.close()
            finally:
                await self._delete(machine)

        try:
            await host.greet()
            # The service itself applies the other settings to the machine.
            network = "model" if spec.network == "model" else "none"
            inside = msgspec.structs.replace(
                spec, image=None, cpus=None, gpus=None, network=network, labels={}, provider="", untrusted_ok=True
            )
            sandbox = await host.create(inside, attempt=attempt, timeout=timeout)
        except BaseException:
            await on_closed()
            raise
        sandbox.spec = spec
        sandbox.on_closed = on_closed
        return sandbox

    async def _keep(self, machine: str) -> None:
        """Extend the lifetime of a machine again and again."""
        while True:
            await asyncio.sleep(LIFETIME_SECONDS / 3)
            try:
                await self.service.extend(machine, lifetime=LIFETIME_SECONDS)
            except Exception as error:  # noqa: BLE001  (tried again; the loss of the machine is noticed elsewhere)
                _log.warning("%s did not extend the lifetime of %s: %s", self.name, machine, describe(error))

    async def _delete(self, machine: str) -> None:
        """Delete a machine. If the service is unavailable for too long, the machine's lifetime ends it."""
        end, wait = time.monotonic() + DELETE_SECONDS, MIN_WAIT
        while True:
            try:
                await self.service.delete(machine)
            except Exception as error:  # noqa: BLE001  (the sandbox is closed in any case)
                if time.monotonic() + wait > end:
                    _log.warning("%s did not delete %s, which ends later: %s", self.name, machine, describe(error))
                    return
            else:
                self._slot_freed.set()
                return
            await asyncio.sleep(wait)
            wait = min(MAX_WAIT, 2 * wait)

    async def _delete_by_label(self, identity: str) -> None:
        """Delete the machine that was being created for a sandbox, if it exists."""
        try:
            for machine, labels in (await self.service.list(LABEL)).items():
                if labels.get(LABEL) == identity:
                    await self._delete(machine)
        except Exception as error:  # noqa: BLE001  (the cause of the failed creation is raised)
            _log.warning("%s did not list its machines, and one may remain: %s", self.name, describe(error))

    async def close(self) -> None:
        try:
            await asyncio.gather(*(host.close() for host in list(self._hosts)))
        finally:
            await self.service.close()

    def _run_apart(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` to its end on an event loop of its own, in a thread, because the caller may have one."""

        async def use_once() -> T:
            try:
                async with asyncio.timeout(DELETE_SECONDS):
                    return await work()
            finally:
                await self.service.close()

        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(asyncio.run, use_once()).result()

    # ---- doctor and reaper

    def diagnose(self) -> Sequence[MachineCheck]:
        try:
            machines = self._run_apart(self.list_machines)
        except Exception as error:  # noqa: BLE001  (a finding)
            return [MachineCheck(self.name, "info", f"the service cannot be used: {describe(error)}")]
        return [MachineCheck(self.name, "ok", f"the service answers; {len(machines)} sandboxes exist")]

    async def list_machines(self) -> Mapping[str, Mapping[str, str]]:
        return await self.service.list(LABEL)

    def reap_home(self, *, force: bool) -> list[str]:
        home = _home_hash(self._home.folder)
        return self._reap(lambda labels: labels.get(HOME_LABEL) == home and (force or _is_orphan(labels)))

    def reap_machine(self) -> list[str]:
        return self._reap(_is_orphan)

    def destroy_leased(self, lease: Lease, *, owner_alive: bool) -> bool:  # noqa: ARG002  (it has no lease files)
        return True

    def _reap(self, wanted: Callable[[Mapping[str, str]], bool]) -> list[str]:
        async def reap() -> list[str]:
            found = await self.service.list(LABEL)
            chosen = [machine for machine, labels in found.items() if wanted(labels)]
            await asyncio.gather(*(self.service.delete(machine) for machine in chosen))
            return chosen

        try:
            return self._run_apart(reap)
        except Exception as error:  # noqa: BLE001  (an unavailable service must not prevent a run)
            _log.warning("%s could not remove the sandboxes of dead processes: %s", self.name, describe(error))
            return []


async def _convert_errors(work: Coroutine[Any, Any, Connection], what: str) -> Connection:
    try:
        return await work
    except SandboxError:
        raise
    except Exception as error:
        raise HostLost(f"{what}: {describe(error)}") from error


def _is_orphan(labels: Mapping[str, str]) -> bool:
    """Return whether a machine's lifetime is over, or its owner was a process of this computer and is dead."""
    expiry = labels.get(EXPIRY_LABEL, "")
    if expiry.isdecimal() and int(expiry) < time.time():
        return True
    computer, _, process = labels.get(OWNER_LABEL, "").partition(".")
    pid, _, started = process.partition(".")
    if computer != _machine_hash() or not pid.isdecimal() or not started.isdecimal():
        return False
    return not leases.is_owner_alive(int(pid), int(started))


def _machine_hash() -> str:
    """Return an ID of this computer since its last start. PIDs of other computers say nothing here."""
    return _short_hash(Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def _home_hash(folder: Path) -> str:
    return _short_hash(f"{_machine_hash()} {folder.resolve()}")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
