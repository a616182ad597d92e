"""Local sandboxes from a directory or an archive of a root file system."""

import asyncio
import io
import os
import shutil
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from rookery.core import SandboxError, SandboxSpec
from rookery.sandbox_runtime import root_filesystem
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.keeper import layer_store
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.hostile.inspection import get_keeper_pid
from tests.sandboxes.owner_process import SPEC
from tests.sandboxes.root_filesystems import build_root_filesystem, pack_root_filesystem


@pytest.fixture
async def local(home: ProviderHome) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(home)
    yield provider
    await provider.close()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_root_filesystem(tmp_path_factory.mktemp("image") / "root")


def spec_for(image: Path, **more: object) -> SandboxSpec:
    return replace(SPEC, image=str(image), **more)


async def sh(sandbox: LocalSandbox, script: str) -> str:
    result = await sandbox.exec(Command(argv=("sh", "-c", script)))
    return (result.stdout + result.stderr).decode()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["folder", "tar", "tar.gz", "tar.xz"])
async def test_sandbox_has_only_the_files_of_its_image(
    local: LocalProvider, image: Path, kind: str, tmp_path: Path
) -> None:
    if kind != "folder":
        mode = {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}[kind]
        image = pack_root_filesystem(image, tmp_path / f"image.{kind}", mode)
    sandbox = await local.create(spec_for(image), attempt="a")
    assert await sh(sandbox, "cat /etc/of-the-image; id -un; pwd") == "image\nuser\n/work\n"
    listed = (await sh(sandbox, "ls /")).split()
    assert {"bin", "dev", "etc", "proc", "srv", "tmp", "var", "work"} <= set(listed)
    assert await sh(sandbox, "ls /root/.pyenv /usr/share /opt 2>/dev/null") == ""
    assert await sh(sandbox, "cat /srv/data/link; readlink /srv/data/link; stat -c '%a' /srv/data/file") == (
        "data\nfile\n640\n" if os.geteuid() == 0 else "data\nfile\n600\n"
    )
    assert await sh(sandbox, "echo x > /work/x; echo y > /tmp/y; cat /work/x /tmp/y; echo > /dev/null") == "x\ny\n"
    mounts = (await sh(sandbox, "cat /proc/mounts")).splitlines()
    assert {line.split()[1] for line in mounts} == {
        "/",
        "/dev",
        "/dev/shm",
        "/dev/pts",
        "/proc",
        *root_filesystem.MASKED,
        *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")),
    }


async def test_image_is_never_modified(local: LocalProvider, image: Path) -> None:
    sandbox = await local.create(spec_for(image, user="root"), attempt="a")
    before = (image / "etc/passwd").stat()
    await sh(sandbox, "echo changed > /etc/passwd; rm /etc/of-the-image; touch /bin/new")
    assert await sh(sandbox, "cat /etc/passwd; ls /etc") == "changed\ngroup\nhostname\nhosts\npasswd\n"
    assert (image / "etc/passwd").stat() == before
    assert (image / "etc/of-the-image").exists()
    assert not (image / "bin/new").exists()
    other = await local.create(spec_for(image, user="root"), attempt="a")
    assert await sh(other, "cat /etc/of-the-image; ls /bin/new 2>/dev/null") == "image\n"


async def test_file_owners_of_an_image_are_mapped(local: LocalProvider, image: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("probed: not root, so there is one user only")
    sandbox = await local.create(spec_for(image, user="root"), attempt="a")
    assert await sh(sandbox, "stat -c '%u %g' /srv/data/file /etc/passwd /") == "1000 1000\n0 0\n0 0\n"
    assert await sh(sandbox, "chmod 600 /etc/passwd; stat -c '%a %u' /etc/passwd") == "600 0\n"
    # On the host, root of the sandbox is an unprivileged user.
    await sh(sandbox, "echo mine > /srv/mine; touch /root/x")
    assert (await sandbox.read("/srv/mine")) == b"mine\n"


async def test_snapshot_of_a_sandbox_with_an_image(local: LocalProvider, image: Path) -> None:
    sandbox = await local.create(spec_for(image, user="root"), attempt="a")
    await sh(sandbox, "echo a > /etc/group; rm -r /root; ln -s x /srv/l")
    name = await sandbox.snapshot()
    await sh(sandbox, "rm /srv/l; echo b > /etc/group; touch /bin/cat; chmod 700 /bin/ls; echo 1 > /etc/n")
    found = await sandbox.diff(name)
    assert found == {"/srv/l": "removed", "/etc/group": "changed", "/bin/ls": "changed", "/etc/n": "added"}
    fork = await sandbox.fork(name)
    assert await sh(fork, "cat /etc/group; ls -d /root 2>&1; readlink /srv/l; id -u; cat /proc/1/comm") == (
        "a\nls: cannot access '/root': No such file or directory\nx\n0\nsandbox\n"
    )


@pytest.mark.long
async def test_archive_is_unpacked_once_for_many_sandboxes(
    local: LocalProvider, image: Path, tmp_path: Path
) -> None:
    archive = pack_root_filesystem(image, tmp_path / "image.tar.gz")
    sandboxes = await asyncio.gather(*(local.create(spec_for(archive), attempt=str(n)) for n in range(12)))
    keeper = await get_keeper_pid(local)
    assert len(list(Path(f"/proc/{keeper}/cwd/images").iterdir())) == 1
    for sandbox in sandboxes:
        assert await sh(sandbox, "cat /etc/of-the-image") == "image\n"
    # A rewritten archive is another image.
    (image / "etc/more").write_text("more\n")
    try:
        pack_root_filesystem(image, tmp_path / "other.tar.gz").replace(archive)
    finally:
        (image / "etc/more").unlink()
    assert await sh(await local.create(spec_for(archive), attempt="b"), "cat /etc/more") == "more\n"


@pytest.mark.long
@pytest.mark.parametrize("content", [b"", b"no archive", b"\0" * 20000])
async def test_invalid_archive_is_a_task_fault_and_leaves_nothing(
    local: LocalProvider, tmp_path: Path, content: bytes
) -> None:
    archive = tmp_path / "image.tar"
    archive.write_bytes(content)
    for _ in range(2):
        with pytest.raises(SandboxError) as raised:
            await local.create(spec_for(archive), attempt="a")
        assert raised.value.code == "task.image"
        assert str(archive) in str(raised.value)
    keeper = await get_keeper_pid(local)
    assert (await local.create(SPEC, attempt="b")).id
    assert list(Path(f"/proc/{keeper}/cwd/images").glob("*[0-9]")) == []


async def test_missing_image_is_a_task_fault(local: LocalProvider, tmp_path: Path) -> None:
    with pytest.raises(SandboxError) as raised:
        await local.create(spec_for(tmp_path / "nowhere"), attempt="a")
    assert raised.value.code == "task.image"


async def test_symbolic_links_of_an_image_are_not_followed_to_the_host(
    local: LocalProvider, tmp_path: Path, image: Path
) -> None:
    """In this image, the directories that we mount on and write to are links to a directory of the host."""
    hostile = tmp_path / "hostile"
    shutil.copytree(image, hostile, symlinks=True)
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o777)
    shutil.rmtree(hostile / "etc")
    for name in ("etc", "dev", "proc", "tmp", "work", "run", "var"):
        (hostile / name).symlink_to(victim)
    sandbox = await local.create(spec_for(hostile, user="root"), attempt="a")
    assert (
        await sh(sandbox, "echo here > /work/x; cat /work/x; echo t > /tmp/t; ls -d /proc/1") == "here\n/proc/1\n"
    )
    assert list(victim.iterdir()) == []


Member = tuple[tarfile.TarInfo, bytes]


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"", mode: int = 0o644
) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data), mode
    return info, data


def build_tar(target: Path, *members: Member) -> Path:
    with tarfile.open(target, "w") as file:
        for info, data in members:
            file.addfile(info, io.BytesIO(data))
    return target


HOSTILE = {
    "dots": [member("../out", data=b"x")],
    "dots inside": [member("a/../../out", data=b"x")],
    "absolute": [member("/out", data=b"x")],
    "through a link": [member("l", tarfile.SYMTYPE, "OUTSIDE"), member("l/out", data=b"x")],
    "over a link": [member("l", tarfile.SYMTYPE, "OUTSIDE/out"), member("l", data=b"x")],
    "hard link to the outside": [member("l", tarfile.LNKTYPE, "../secret"), member("l", data=b"x")],
    "hard link through a link": [
        member("d", tarfile.SYMTYPE, "OUTSIDE"),
        member("l", tarfile.LNKTYPE, "d/secret"),
    ],
    "hard link to a link": [
        member("s", tarfile.SYMTYPE, "OUTSIDE/secret"),
        member("l", tarfile.LNKTYPE, "s"),
        member("l/x", data=b"x"),
    ],
    "folder through a link": [
        member("d", tarfile.SYMTYPE, "OUTSIDE"),
        member("d", tarfile.DIRTYPE, mode=0o777),
        member("d/out", data=b"x"),
    ],
    "device": [member("d", tarfile.CHRTYPE)],
    "mode through a link": [member("d", tarfile.DIRTYPE), member("d", tarfile.SYMTYPE, "OUTSIDE")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_unpacked_outside_the_directory(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "secret").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    for info, _ in HOSTILE[name]:
        info.linkname = info.linkname.replace("OUTSIDE", str(outside))
    archive = build_tar(tmp_path / "a.tar", *HOSTILE[name], member("z", data=b"z"))
    (tmp_path / "images").mkdir()
    try:
        layer_store.unpack_archive(str(archive), str(tmp_path / "images/1"), owners=os.geteuid() == 0)
    except OSError:
        assert not (tmp_path / "images/1").exists()
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside.stat().st_mode & 0o777, (outside / "secret").read_text()) == (0o700, "secret")
    assert (tmp_path / "secret").read_text() == "secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "images", "outside", "secret"]


@pytest.mark.long
def test_unpacking_matches_tar(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/file").write_bytes(os.urandom(3_000_000))
    os.link(tree / "a/file", tree / "a/b/second")
    (tree / "a/b/link").symlink_to("../file")
    (tree / "set").write_text("x")
    (tree / "set").chmod(0o6755)
    (tree / "closed").mkdir(mode=0o500)
    os.mkfifo(tree / "fifo")
    with (tree / "sparse").open("wb") as file:
        file.truncate(50_000_000)
    os.utime(tree / "a", (1, 2))
    archive = pack_root_filesystem(tree, tmp_path / "a.tar.gz")
    layer_store.unpack_archive(str(archive), str(tmp_path / "out"), owners=os.geteuid() == 0)

    def list_tree(top: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for path in sorted(top.rglob("*")):
            info = path.lstat()
            small = path.is_file() and not path.is_symlink() and info.st_size < 10**7
            data = path.read_bytes() if small else info.st_size
            found[str(path.relative_to(top))] = (info.st_mode & ~0o6000, int(info.st_mtime), info.st_nlink, data)
        return found

    assert list_tree(tmp_path / "out") == list_tree(tree)
    assert (tmp_path / "out/set").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "out/sparse").stat().st_blocks < 1000


async def test_host_network_is_available_only_on_request(local: LocalProvider) -> None:
    """The only packets go to a listener of this process on the host's loopback."""
    server = await asyncio.start_server(lambda _, writer: (writer.write(b"hello"), writer.close()), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    program = f"import socket; s = socket.create_connection(('127.0.0.1', {port}), 5); print(s.recv(9).decode())"
    try:
        for network, wanted in (("all", b"hello\n"), ("none", b"")):
            sandbox = await local.create(replace(SPEC, network=network), attempt="a")
            result = await sandbox.exec(Command(argv=("python3", "-c", program)))
            assert result.stdout == wanted, result
            links = await sandbox.exec(Command(argv=("cat", "/proc/net/dev")))
            assert (len(links.stdout.splitlines()) == 3) == (network == "none")
            if network == "all" and Path("/etc/resolv.conf").exists():
                assert await sandbox.read("/etc/resolv.conf") == Path("/etc/resolv.conf").read_bytes()
    finally:
        server.close()
        await server.wait_closed()
