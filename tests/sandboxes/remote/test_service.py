"""Faults of a service that rents machines: at creation, in the middle and at deletion."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.conformance import networks
from rookery.sandboxes.remote import ProcessConnection, QuotaExceeded, ServiceProvider, bootstrap, service
from tests.docs.test_docs import ROOT
from tests.processes import cmdline, descendants, send_signal

SPEC = SandboxSpec(untrusted_ok=True, wall=30.0)
OWNER = """
import asyncio, sys
from pathlib import Path
from rookery.core import SandboxSpec
from rookery.sandboxes import ProviderHome
from tests.docs.test_docs import ROOT, blocks

names = {"__name__": "example"}
exec(blocks(ROOT / "docs/guides/remote-sandboxes.md", "python")[0], names)
names["FOLDER"] = Path(sys.argv[1])

async def main():
    provider = names["open_folders"](ProviderHome(folder=Path(sys.argv[2]), run="killed"))
    await provider.create(SandboxSpec(untrusted_ok=True), attempt="a")
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MIN_WAIT", 0.01)


@pytest.fixture
def folders(example: dict[str, Any], provider: ServiceProvider) -> Any:
    """The example's service, whose methods a test can replace."""
    return provider.service


def fail_first(folders: Any, name: str, error: Exception, times: int) -> list[str]:
    """Let the first calls of an operation fail; return a list to which each call is added."""
    calls: list[str] = []
    works = getattr(folders, name)

    async def operation(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) <= times:
            raise error
        return await works(*args, **options)

    setattr(folders, name, operation)
    return calls


async def test_isolated_machine_has_a_model_network_and_its_whole_file_system(
    example: dict[str, Any], home: ProviderHome, tmp_path: Path
) -> None:
    example["Folders"].isolated = True  # as if the folders were machines
    example["Folders"].check = lambda self, spec: []
    provider: ServiceProvider = example["open_folders"](home)
    try:
        work = tmp_path / "elsewhere"
        spec = SandboxSpec(network="model", workdir=str(work), wall=30.0)
        sandbox = await provider.create(spec, attempt="a")
        await sandbox.write("x", b"1")
        assert (work / "x").read_bytes() == await sandbox.read(str(work / "x"))
        fetch = Command(argv=("python3", "-c", networks.FETCH, sandbox.inside_url))
        assert not (await sandbox.exec(fetch)).ok
        async with await asyncio.start_server(networks.serve_hello, sock=sandbox.listener()):
            assert (await sandbox.exec(fetch)).stdout == b"hello"
        sandbox.refuse_connections()
        assert not (await sandbox.exec(fetch)).ok
        await sandbox.close()
    finally:
        await provider.close()


@pytest.mark.parametrize(("image", "cause"), [("old", "task.image"), (None, "sandbox.refused")])
@pytest.mark.parametrize("version", ["none", "3.9"])
async def test_machine_without_a_suitable_python_is_refused(
    image: str | None, cause: str, version: str, folders: Any, provider: ServiceProvider, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sh").symlink_to("/bin/sh")
    if version != "none":
        own = "import sys; sys.version_info, sys.version = (3, 9), '3.9.1'; exec(sys.argv.pop(2))"
        (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{own}" "$@"\n')
        (programs / "python3").chmod(0o755)

    async def exec_elsewhere(_: str, argv: list[str]) -> ProcessConnection:
        return await ProcessConnection.open(["/usr/bin/env", f"PATH={programs}", *argv])

    folders.exec = exec_elsewhere
    folders.check = lambda _: []
    with pytest.raises(SandboxError) as caught:
        await provider.create(msgspec.structs.replace(SPEC, image=image), attempt="a")
    assert caught.value.code == cause
    assert not await folders.list("rookery")


class EndedProgram:
    """The connection to a program that has ended after its answer."""

    def __init__(self) -> None:
        self._output = [bootstrap.MARKER + b"missing Python 3.11\n"]

    async def read(self) -> bytes:
        return self._output.pop() if self._output else b""

    async def write(self, data: bytes) -> None:
        raise ConnectionResetError("Connection lost")

    async def close(self) -> None:
        pass


async def test_answer_of_a_program_that_ended_before_it_was_written_to_is_read() -> None:
    async def open_program(_: object) -> EndedProgram:
        return EndedProgram()

    with pytest.raises(bootstrap.UnsuitableMachine, match=r"Python 3\.11"):
        await bootstrap.start_host(open_program, {}, "there")


async def test_service_that_is_down_at_creation_is_asked_again(provider: ServiceProvider, folders: Any) -> None:
    calls = fail_first(folders, "create", ConnectionError("down"), 2)
    sandbox = await provider.create(SPEC, attempt="a")
    assert len(calls) == 3
    assert (await sandbox.exec(Command(argv=("true",)))).ok
    await sandbox.close()


async def test_service_that_stays_down_is_an_infrastructure_failure(
    provider: ServiceProvider, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MIN_WAIT", 1000.0)  # it would be asked again after the deadline
    fail_first(folders, "create", ConnectionError("down"), 1000)
    with pytest.raises(SandboxError) as caught:
        await provider.create(SPEC, attempt="a", timeout=60.0)
    assert (caught.value.code, caught.value.fault) == ("sandbox.create", "infra")


async def test_exhausted_quota_makes_creation_wait_for_a_closed_sandbox(
    provider: ServiceProvider, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    monkeypatch.setattr(service, "MIN_WAIT", 50.0)  # only the closed sandbox can end the wait
    calls = fail_first(folders, "create", QuotaExceeded("full"), 1)
    waiting = asyncio.ensure_future(provider.create(SPEC, attempt="b", timeout=60.0))
    while not calls:
        await asyncio.sleep(0)
    await sandbox.close()
    await (await waiting).close()
    fail_first(folders, "create", QuotaExceeded("full"), 1000)
    with pytest.raises(SandboxError) as caught:
        await provider.create(SPEC, attempt="c", timeout=40.0)
    assert caught.value.code == "sandbox.quota"


async def test_slow_creation_is_given_up_and_its_machine_deleted(
    example: dict[str, Any], provider: ServiceProvider, folders: Any
) -> None:
    works = folders.create

    async def create(*args: Any, **options: Any) -> str:
        await works(*args, **options)  # the machine exists, but the answer is lost
        await asyncio.sleep(600)
        raise AssertionError

    folders.create = create
    with pytest.raises(SandboxError) as caught:
        await provider.create(SPEC, attempt="a", timeout=0.2)
    assert caught.value.code == "sandbox.create"
    assert not await folders.list("rookery")


async def test_machine_that_disappears_is_an_infrastructure_failure(provider: ServiceProvider) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    running = asyncio.ensure_future(sandbox.exec(Command(argv=("sleep", "600"), wall=600.0)))
    hosts = [pid for pid in descendants(os.getpid()) if b"remote.host import main" in cmdline(pid)]
    assert hosts
    assert not any(b"token" in cmdline(pid) for pid in hosts)
    send_signal(hosts, signal.SIGKILL)
    with pytest.raises(SandboxError) as caught:
        await running
    assert (caught.value.code, caught.value.fault) == ("sandbox.lost", "infra")
    await sandbox.close()


async def test_service_that_is_down_at_deletion_is_asked_again(provider: ServiceProvider, folders: Any) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    calls = fail_first(folders, "delete", ConnectionError("down"), 2)
    await sandbox.close()
    assert len(calls) == 3
    assert not await folders.list("rookery")


async def test_machines_of_a_killed_owner_are_found_by_label(
    example: dict[str, Any], provider: ServiceProvider, home: ProviderHome, folders: Any, tmp_path: Path
) -> None:
    mine = await provider.create(SPEC, attempt="a")
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, str(example["FOLDER"]), str(tmp_path / "other")),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    assert len(await folders.list("rookery")) == 2
    assert await asyncio.to_thread(provider.reap_machine) == []
    owner.kill()
    await owner.wait()
    assert len(await asyncio.to_thread(provider.reap_machine)) == 1
    assert len(await folders.list("rookery")) == 1
    await mine.close()
