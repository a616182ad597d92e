"""Conformance checks of read-only mounts of host directories."""

# The files here are small and local.
# ruff: noqa: ASYNC240

from pathlib import Path

from msgspec.structs import replace

from rookery.core import Mount, SandboxError
from rookery.sandboxes.conformance.files import temporary_directory
from rookery.sandboxes.conformance.snapshots import take_snapshot
from rookery.sandboxes.conformance.tools import SPEC, Check, open_sandbox, sh
from rookery.sandboxes.protocol import Provider


async def a_mount_is_read_only_and_shared(provider: Provider) -> None:
    with temporary_directory() as name:
        Path(name).chmod(0o755)
        program = Path(name) / "bin" / "hello"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\necho hello\n")
        program.chmod(0o755)
        (Path(name) / "private").write_text("private")
        (Path(name) / "private").chmod(0o600)
        spec = replace(SPEC, mounts=(Mount(source=name, target="/opt/many/tool"),))
        if provider.check(spec):
            return
        for user in (None, "root"):
            spec = replace(spec, user=user)
            async with open_sandbox(provider, spec) as one, open_sandbox(provider, spec) as other:
                for sandbox in (one, other):
                    assert (await sh(sandbox, "/opt/many/tool/bin/hello")).stdout == b"hello\n"
                for script in (
                    "echo x > /opt/many/tool/new",
                    "rm -rf /opt/many/tool/bin",
                    "chmod 777 /opt/many/tool/bin/hello",
                    "mount -o remount,rw /opt/many/tool",
                    "umount /opt/many/tool",
                ):
                    assert not (await sh(one, script)).ok, script
                assert (await sh(other, "/opt/many/tool/bin/hello")).stdout == b"hello\n"
        assert sorted(path.name for path in Path(name).rglob("*")) == ["bin", "hello", "private"]


async def a_fork_has_the_mounts_of_its_sandbox(provider: Provider) -> None:
    with temporary_directory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "file").write_text("mounted")
        spec = replace(SPEC, mounts=(Mount(source=name, target="/opt/tool"),))
        if provider.check(spec):
            return
        async with open_sandbox(provider, spec) as sandbox:
            taken = await take_snapshot(sandbox)
            if taken is None:
                return
            fork = await sandbox.fork(taken)
            try:
                assert (await sh(fork, "cat /opt/tool/file")).stdout == b"mounted"
                assert await fork.diff(taken) == {}
            finally:
                await fork.close()


async def an_invalid_mount_is_refused_before_creation(provider: Provider) -> None:
    with temporary_directory() as name:
        for mounts in (
            (Mount(source="relative", target="/opt/tool"),),
            (Mount(source=name, target="opt/tool"),),
            (Mount(source=name, target="/opt/../etc"),),
            (Mount(source=name, target="/"),),
            (Mount(source=name, target="/a"), Mount(source=name, target="/a/")),
            tuple(Mount(source=name, target=f"/a{number}") for number in range(17)),
        ):
            spec = replace(SPEC, mounts=mounts)
            assert provider.check(spec), mounts
            try:
                await provider.create(spec, attempt="mounts")
            except SandboxError:
                continue
            raise AssertionError(f"a sandbox was created with the invalid mounts {mounts}")


CHECKS: tuple[Check, ...] = (
    a_mount_is_read_only_and_shared,
    a_fork_has_the_mounts_of_its_sandbox,
    an_invalid_mount_is_refused_before_creation,
)
