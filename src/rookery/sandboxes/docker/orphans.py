"""Find and remove containers whose owner (the process that created them) is dead.

A container's labels repeat the lease of its sandbox (owner, run, deadline), so that the owner can be found even if
the directory with the lease is gone. This module is blocking and is used by the provider (in a thread), the reaper
and `rookery reap`.

Guarantees:
- a container of a live owner is not touched before its deadline, nor is one whose owner is not visible from here
  (on another machine or in another PID namespace);
- containers without Rookery's labels are never touched;
- it works after a SIGKILL of the owner;
- if the container engine does not answer, the leases stay until their containers are gone.

It also works after a reboot: then no owner is alive.
"""

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rookery.core import SandboxError
from rookery.sandbox_runtime import processes
from rookery.sandboxes import leases
from rookery.sandboxes.docker.client import (
    SLOW_CALL_SECONDS,
    BlockingEngineClient,
    EngineAPIError,
    api_path,
    label_filter,
)
from rookery.sandboxes.protocol import Lease

SANDBOX, RUN, ATTEMPT = "rookery.sandbox", "rookery.run", "rookery.attempt"
OWNER, DEADLINE, MACHINE, BOOT = "rookery.owner", "rookery.deadline", "rookery.machine", "rookery.boot"
SOCKET_FILE = "engine"
"""Name of a file in a sandbox's directory. It contains the socket path of the container engine that runs its
container."""
REMOVE_SECONDS = 15.0
PARALLEL_REMOVALS = 8
"""Number of containers that are removed at the same time. A removal takes up to a second, in which the container
engine mostly waits."""
_MAX_PATH_BYTES = 1 << 12


def container_name(sandbox_id: str) -> str:
    """Return the name of a sandbox's container, which is derived from the sandbox's ID."""
    return f"rookery-{sandbox_id}"


def make_labels(lease: Lease) -> dict[str, str]:
    """Return a lease as container labels."""
    return {
        SANDBOX: lease.id,
        RUN: lease.run,
        ATTEMPT: lease.attempt,
        OWNER: f"{lease.owner_pid}.{lease.owner_started}",
        DEADLINE: f"{lease.deadline:.0f}",
        MACHINE: _machine_id(),
        BOOT: read_boot_label(),
    }


def is_orphan(labels: Mapping[str, str], *, now: float) -> bool:
    """Return whether the owner that these labels name is certainly dead, or the deadline has passed."""
    if not labels.get(SANDBOX):
        return False
    with contextlib.suppress(ValueError):
        if now >= float(labels.get(DEADLINE, "inf")):
            return True
    if labels.get(MACHINE) != _machine_id():
        return False
    if labels.get(BOOT, "").partition("/")[0] != read_boot_label().partition("/")[0]:
        return True  # the machine was rebooted since
    if labels.get(BOOT) != read_boot_label():
        return False  # the owner is in another PID namespace
    try:
        pid, started = map(int, labels.get(OWNER, "").split("."))
    except ValueError:
        return False
    return not leases.is_owner_alive(pid, started)


def reap(client: BlockingEngineClient, *, now: float | None = None) -> list[str]:
    """Remove the containers and snapshot images of dead owners from a container engine; return the sandbox IDs."""
    moment = time.time() if now is None else now
    path = api_path("containers", "json", all="1", filters=label_filter(SANDBOX))
    containers: list[dict[str, Any]] = client.call("GET", path, timeout=SLOW_CALL_SECONDS)
    orphaned = [container for container in containers if is_orphan(container.get("Labels") or {}, now=moment)]
    with ThreadPoolExecutor(PARALLEL_REMOVALS) as pool:
        removed = list(pool.map(lambda container: _try_remove(client, container["Id"]), orphaned))
    _reap_images(client, moment)
    return [
        str(container["Labels"][SANDBOX]) for container, success in zip(orphaned, removed, strict=True) if success
    ]


def _try_remove(client: BlockingEngineClient, container: str) -> bool:
    try:
        remove_container(client, container)
    except EngineAPIError:  # another process is removing it
        return False
    return True


def _reap_images(client: BlockingEngineClient, now: float) -> None:
    path = api_path("images", "json", filters=label_filter(SANDBOX))
    for image in client.call("GET", path, timeout=SLOW_CALL_SECONDS):
        if is_orphan(image.get("Labels") or {}, now=now):
            client.call("DELETE", api_path("images", image["Id"], force="1"), ok=(404, 409), timeout=30.0)


def remove_container(client: BlockingEngineClient, container: str) -> None:
    """Remove a container and wait until the container engine no longer lists it.

    Raise `SandboxError` if that takes longer than `REMOVE_SECONDS`.
    """
    began = time.monotonic()
    while True:
        try:
            path = api_path("containers", container, force="1", v="1")
            client.call("DELETE", path, ok=(404,), timeout=REMOVE_SECONDS)
        except EngineAPIError as error:
            if error.status < 500 and error.status != 409:  # 409: it is being removed already
                raise
        details = client.call("GET", api_path("containers", container, "json"), ok=(404,), timeout=REMOVE_SECONDS)
        if details is None:
            return
        taken = time.monotonic() - began
        if taken > 1.0:
            remove_upper_directory(details)
        if taken > REMOVE_SECONDS:
            raise SandboxError(
                f"the container engine did not remove the container {container} in {REMOVE_SECONDS:g} s"
            )
        time.sleep(0.05)  # the container engine sends no notification


def remove_upper_directory(details: Mapping[str, Any] | None) -> bool:
    """Delete the files that a container wrote, so that the container engine can remove the container.

    A container engine opens a file descriptor for every level of a directory tree that it removes. A program can
    create a tree that is deeper than the container engine's descriptor limit, and such a container would never be
    removed. `details` is the container engine's description of the container. Return whether the files were
    deleted; this needs root and an overlay storage driver.
    """
    driver = (details or {}).get("GraphDriver") or {}
    upper = Path(str((driver.get("Data") or {}).get("UpperDir") or ""))
    if upper.name != "diff" or not str(driver.get("Name", "")).startswith("overlay") or os.geteuid() != 0:
        return False
    for _ in range(10):
        try:
            processes.remove_tree(str(upper))
        except FileNotFoundError:
            continue  # the container engine removes files at the same time
        except OSError:
            return False  # the container engine reports the error
        return True
    return False


def destroy_leased(home: Path, lease: Lease) -> bool:
    """Remove the container of a lease below `home`, then its files and the lease.

    False if the container engine did not remove the container; files and lease then stay.
    """
    directory = home / lease.id
    try:
        with (directory / SOCKET_FILE).open("rb") as file:
            socket_path = os.fsdecode(file.read(_MAX_PATH_BYTES)).strip()
    except OSError:
        socket_path = ""  # the owner died before it requested a container
    if socket_path:
        try:
            remove_container(BlockingEngineClient(socket_path), container_name(lease.id))
        except SandboxError:
            return False
    leases.remove_sandbox(home, lease.id)
    return True


def _machine_id() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            text = Path(path).read_text().strip()
            if text:
                return text[:12]
    return socket.gethostname()


def read_boot_label() -> str:
    """Return an ID of the machine's current boot and of this process's PID namespace; empty if one is unknown."""
    boot = leases.read_boot_id()
    if not boot:
        return ""
    with contextlib.suppress(OSError):
        return f"{boot}/{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"  # noqa: PTH115
    return ""
