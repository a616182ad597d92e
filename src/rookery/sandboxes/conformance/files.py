"""Conformance checks of file transfers: read, write, upload and download."""

# The files here are small and local.
# ruff: noqa: ASYNC240

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Awaitable
from pathlib import Path

from rookery.core import SandboxError
from rookery.sandboxes.conformance.tools import Check, open_sandbox, sh
from rookery.sandboxes.protocol import Provider


def temporary_directory() -> "tempfile.TemporaryDirectory[str]":
    """Create a temporary directory on the host."""
    return tempfile.TemporaryDirectory(prefix="rookery-conformance-")


async def assert_refused(call: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(20):
            got = await call
    except TimeoutError as error:
        raise AssertionError("the file transfer did not return in time; it must be refused at once") from error
    except (OSError, SandboxError):
        return
    raise AssertionError(f"the file transfer must be refused, but returned {got!r}")


async def files_are_transferred(provider: Provider) -> None:
    data = os.urandom(3 << 20)
    async with open_sandbox(provider) as sandbox:
        await sandbox.write("deep/down/file", data)
        assert await sandbox.read("deep/down/file") == data
        await sandbox.write("deep/down/file", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert (await sh(sandbox, "deep/down/file")).stdout == b"ran\n"
        where = (await sh(sandbox, "pwd")).stdout.decode().strip()
        assert await sandbox.read(f"{where}/deep/down/file") == b"#!/bin/sh\necho ran\n"
        await assert_refused(sandbox.read("missing"))
        await assert_refused(sandbox.read("deep"))
        await assert_refused(sandbox.read("deep/down/file", limit=5))


async def directories_are_transferred_with_their_modes(provider: Provider) -> None:
    with temporary_directory() as name:
        host = Path(name)
        source = host / "source"
        (source / "sub").mkdir(parents=True)
        (source / "run").write_text("#!/bin/sh\necho ran\n")
        (source / "run").chmod(0o750)
        (source / "sub" / "secret").write_bytes(b"s")
        (source / "sub" / "secret").chmod(0o600)
        (source / "link").symlink_to("run")
        async with open_sandbox(provider) as sandbox:
            await sandbox.upload(source, "a/b")
            result = await sh(sandbox, "cd a/b && ./run && ./link && stat -c %a run sub/secret")
            assert result.stdout == b"ran\nran\n750\n600\n", result
            await sandbox.upload(source / "run", "single")
            assert (await sh(sandbox, "./single")).ok
            await sandbox.download("a/b", host / "back")
            await sandbox.download("single", host / "one")
        assert (host / "back" / "run").stat().st_mode & 0o7777 == 0o750
        assert (host / "back" / "sub" / "secret").stat().st_mode & 0o7777 == 0o600
        assert (host / "one").read_bytes() == (source / "run").read_bytes()
        assert not [path for path in host.iterdir() if "half" in path.name]


async def no_symbolic_link_of_the_sandbox_is_followed(provider: Provider) -> None:
    with temporary_directory() as name:
        host = Path(name)
        (host / "secret").write_text("hunter2")
        async with open_sandbox(provider) as sandbox:
            made = await sh(
                sandbox, f"mkdir t; ln -s {host}/secret t/file; ln -s {host} t/folder; ln -s ../.. t/up"
            )
            assert made.ok
            for path in ("t/file", "t/folder/secret", "t/up/x"):
                await assert_refused(sandbox.read(path))
            await assert_refused(sandbox.write("t/folder/new", b"x"))
            await assert_refused(sandbox.download("t/file", host / "got"))
            await assert_refused(sandbox.download("t/folder", host / "got"))
            await sandbox.write("t/file", b"mine")
            assert await sandbox.read("t/file") == b"mine"
            await sandbox.download("t", host / "tree")
        assert (host / "secret").read_text() == "hunter2"
        assert sorted(path.name for path in (host / "tree").iterdir()) == ["file"]
        assert sorted(path.name for path in host.iterdir()) == ["secret", "tree"]


async def no_symbolic_link_of_the_host_is_followed(provider: Provider) -> None:
    """Symbolic links are uploaded as links, and their targets are not read."""
    with temporary_directory() as name:
        host = Path(name)
        (host / "secret").mkdir()
        (host / "secret" / "key").write_text("hunter2")
        source = host / "source"
        source.mkdir()
        (source / "plain").write_text("mine")
        os.link(source / "plain", source / "second")
        (source / "inside").symlink_to("plain")
        (source / "file").symlink_to("../secret/key")
        (source / "folder").symlink_to("../secret")
        async with open_sandbox(provider) as sandbox:
            for link in ("file", "folder", "inside"):
                await assert_refused(sandbox.upload(source / link, "stolen"))
            await assert_refused(sandbox.upload(host / "missing", "stolen"))
            await assert_refused(sandbox.upload(source / "folder" / "key", "stolen", inside=source))
            await assert_refused(sandbox.upload(source / ".." / "secret" / "key", "stolen", inside=source))
            await assert_refused(sandbox.upload(host / "secret" / "key", "stolen", inside=source))
            await sandbox.upload(source / "plain", "one", inside=host)
            await sandbox.upload(source, "t")
            result = await sh(
                sandbox, "cat one; cd t; cat second inside; readlink file folder inside; ls -d ../stolen"
            )
            assert result.stdout == b"mineminemine../secret/key\n../secret\nplain\n", result
            assert b"hunter2" not in (await sh(sandbox, "cat t/* 2>/dev/null")).stdout
            # A hard link becomes a separate file.
            await sandbox.download("t", host / "back")
        assert sorted(path.name for path in (host / "back").iterdir()) == ["plain", "second"]
        assert (host / "back" / "second").read_text() == "mine"


async def special_files_are_refused_or_skipped(provider: Provider) -> None:
    with temporary_directory() as name:
        host = Path(name)
        async with open_sandbox(provider) as sandbox:
            assert (await sh(sandbox, "mkdir t; mkfifo t/fifo; echo x > t/plain; chmod u+s t/plain")).ok
            await assert_refused(sandbox.read("t/fifo"))
            await assert_refused(sandbox.download("t/fifo", host / "got"))
            await sandbox.download("t", host / "tree")
            await sandbox.write("t/fifo", b"now a file")
            assert await sandbox.read("t/fifo") == b"now a file"
        assert [path.name for path in (host / "tree").iterdir()] == ["plain"]
        assert (host / "tree" / "plain").stat().st_mode & 0o7000 == 0


async def paths_stay_inside(provider: Provider) -> None:
    with temporary_directory() as name:
        async with open_sandbox(provider) as sandbox:
            (Path(name) / "secret").write_text("the host's")
            for path in ("../x", "a/../../x"):
                await assert_refused(sandbox.write(path, b"x"))
            for path in ("../x", "a/../../x", f"{name}/x", f"{name}/secret"):
                await assert_refused(sandbox.read(path))
                await assert_refused(sandbox.download(path, Path(name) / "got"))
            # The sandbox may have a file at this path; the host's stays unchanged.
            with contextlib.suppress(OSError, SandboxError):
                await sandbox.write(f"{name}/secret", b"x")
            assert (Path(name) / "secret").read_text() == "the host's"
        assert [path.name for path in Path(name).iterdir()] == ["secret"]


async def a_download_is_bounded_and_atomic(provider: Provider) -> None:
    with temporary_directory() as name:
        host = Path(name)
        async with open_sandbox(provider) as sandbox:
            assert (await sh(sandbox, "mkdir t; for i in 1 2 3 4; do head -c 100000 /dev/zero > t/$i; done")).ok
            await assert_refused(sandbox.download("t", host / "got", limit=250_000))
            assert not any(host.iterdir())
            await sandbox.download("t", host / "got", limit=400_000)
            assert len(list((host / "got").iterdir())) == 4


CHECKS: tuple[Check, ...] = (
    files_are_transferred,
    directories_are_transferred_with_their_modes,
    no_symbolic_link_of_the_sandbox_is_followed,
    no_symbolic_link_of_the_host_is_followed,
    special_files_are_refused_or_skipped,
    paths_stay_inside,
    a_download_is_bounded_and_atomic,
)
