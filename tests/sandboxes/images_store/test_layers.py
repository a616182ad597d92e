"""Unpacking of layers for overlayfs, including malicious ones."""

import bz2
import copy
import gzip
import hashlib
import io
import json
import lzma
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rookery.sandboxes.images.overlay import finalize_layer
from rookery.sandboxes.images.unpacker import UNPACK_COMMAND, tar_stream
from rookery.sandboxes.images.unpacker import layer as program
from rookery.sandboxes.images.unpacker.decompression import DecompressedStream
from tests.sandboxes.images_store.image_builder import Member, build_tar, directory, member, sha256_digest, symlink

ROOT = os.geteuid() == 0


def run_unpacker(data: bytes, target: Path, *, diff_id: str = "", max_bytes: int = 1 << 30) -> dict[str, Any]:
    """Run the unpacking process as `ImageInstaller` does."""
    target.mkdir()
    command = [
        *UNPACK_COMMAND,
        str(target),
        str(len(data)),
        diff_id,
        str(int(ROOT)),
        "1",
        str(max_bytes),
    ]
    blob = target.with_suffix(".tar")
    blob.write_bytes(data)
    with blob.open("rb") as source:
        done = subprocess.run(command, stdin=source, capture_output=True, timeout=60, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def list_tree(top: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for here, folders, files in os.walk(os.fsencode(top)):
        for name in (*folders, *files):
            path = os.path.join(here, name)
            info = os.lstat(path)
            data: object = None
            if stat.S_ISREG(info.st_mode):
                with open(path, "rb") as file:
                    data = file.read()
            elif stat.S_ISLNK(info.st_mode):
                data = os.readlink(path)
            mode = 0 if stat.S_ISLNK(info.st_mode) else info.st_mode & 0o1777
            owner = (info.st_uid, info.st_gid) if ROOT else ()
            shown = os.fsdecode(os.path.relpath(path, os.fsencode(top)))
            links = info.st_nlink if stat.S_ISREG(info.st_mode) else 0
            found[shown] = (stat.S_IFMT(info.st_mode), mode, owner, int(info.st_mtime), data, links)
    return found


NAMES = st.sampled_from(["a", "b", "a/b", "b/a", "a/b/c", "x" * 90 + "/" + "y" * 90, "ü/n", "n" * 200])
MEMBERS = st.lists(
    st.one_of(
        st.builds(
            member,
            NAMES.map(lambda name: f"{name}.f"),
            st.binary(max_size=3000),
            mode=st.integers(0, 0o1777).map(lambda mode: mode | 0o600),
            owner=st.tuples(st.integers(0, 65534), st.integers(0, 3_000_000).map(lambda gid: gid % 65534)),
            mtime=st.integers(0, 1 << 31),
        ),
        st.builds(directory, NAMES, st.sampled_from([0o755, 0o700, 0o1777])),
        st.builds(symlink, NAMES.map(lambda name: f"{name}.l"), st.sampled_from(["a", "../../x", "/etc/passwd"])),
    ),
    max_size=12,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(members=MEMBERS, form=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), compress=st.booleans())
def test_unpacking_matches_tar(
    members: list[Member], form: int, compress: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("differential")
    data = build_tar(*members, form=form)
    result = run_unpacker(gzip.compress(data) if compress else data, tmp_path / "ours")
    assert "error" not in result, result
    assert result["diff_id"] == sha256_digest(data)
    (tmp_path / "theirs").mkdir()
    # With -P, tar creates all links at once; without it, it would delay some and overwrite later entries.
    command = ["tar", "-xpPf", "-", "-C", str(tmp_path / "theirs"), "--delay-directory-restore", "--warning=none"]
    subprocess.run(command, input=data, check=True)
    for path in result["implied_directories"]:  # their metadata comes from lower layers, and there are none
        for top in ("ours", "theirs"):
            os.chmod(tmp_path / top / path, 0o755)
            os.utime(tmp_path / top / path, (0, 0))
    assert list_tree(tmp_path / "ours") == list_tree(tmp_path / "theirs")


@pytest.mark.long
def test_all_sparse_formats_are_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        for at in range(40):
            file.seek(at * 3_000_000)
            file.write(b"x" * (at + 1))
        file.truncate(200_000_000)
    for form in (["gnu"], ["posix", "--sparse-version=0.0"], ["posix", "--sparse-version=0.1"], ["posix"]):
        data = subprocess.run(
            ["tar", "-C", str(source), "-cSf", "-", f"--format={form[0]}", *form[1:], "sparse"],
            capture_output=True,
            check=True,
        ).stdout
        target = tmp_path / "-".join(form).replace("=", "")
        assert "error" not in (result := run_unpacker(data, target)), result
        made = target / "sparse"
        assert made.stat().st_blocks < 2000
        with made.open("rb") as new, (source / "sparse").open("rb") as old:
            assert new.read(130_000_000) == old.read(130_000_000)
        assert made.stat().st_size == 200_000_000


@pytest.mark.parametrize("length", [0, 1, 511, 512, 700, 1536])
def test_truncated_stream_is_detected(tmp_path: Path, length: int) -> None:
    data = build_tar(member("a", b"x" * 1000), member("b", b"y"))
    result = run_unpacker(data[:length], tmp_path / "out", diff_id=sha256_digest(data))
    assert result["fault"] == "image"


HOSTILE: dict[str, list[Member]] = {
    "dots": [member("../out", b"x")],
    "dots inside": [member("a/../../out", b"x")],
    "absolute": [member("/out", b"x")],
    "through a link": [symlink("l", "OUTSIDE"), member("l/out", b"x")],
    "through a link in a folder": [directory("d"), symlink("d/l", "OUTSIDE"), member("d/l/out", b"x")],
    "over a link": [symlink("l", "OUTSIDE/out"), member("l", b"x")],
    "hard link to the outside": [member("l", b"", tarfile.LNKTYPE, "../secret"), member("l", b"x")],
    "hard link through a link": [symlink("d", "OUTSIDE"), member("l", b"", tarfile.LNKTYPE, "d/secret")],
    "hard link to a link": [
        symlink("s", "OUTSIDE/secret"),
        member("l", b"", tarfile.LNKTYPE, "s"),
        member("l/x", b"x"),
    ],
    "folder over a link": [symlink("d", "OUTSIDE"), directory("d", 0o777), member("d/out", b"x")],
    "link over a folder": [directory("d"), symlink("d", "OUTSIDE"), member("d/out", b"x")],
    "folder that was a folder": [
        directory("d"),
        member("d/f", b"x"),
        symlink("d", "OUTSIDE"),
        member("d/out", b"x"),
    ],
    "removed through a link": [symlink("d", "OUTSIDE"), member("d/.wh.secret")],
    "opaque through a link": [symlink("d", "OUTSIDE"), member("d/.wh..wh..opq")],
    "removed dots": [member(".wh..."), member("a/.wh...")],
    "removed nothing": [member(".wh.")],
    "device": [member("d", b"", tarfile.CHRTYPE), member("b", b"", tarfile.BLKTYPE)],
    "names that are no text": [member(os.fsdecode(b"\xff\xfe/\xe9"), b"x")],
    "a long name": [member("/".join(["n" * 200] * 18), b"x")],
    "longer names": [member("/".join(["n" * 255] * 17), b"x")],
    "a very long part": [member("n" * 300, b"x")],
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("enclosed", [True, False])
def test_nothing_is_written_outside_the_target(
    name: str, enclosed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tested with a changed root, as in production, and with the checks of names alone."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    for where in (outside / "secret", tmp_path / "secret"):
        where.write_text("secret")
    members = [info for info, _ in copy.deepcopy(HOSTILE[name])]
    for info in members:
        info.linkname = info.linkname.replace("OUTSIDE", str(outside))
    data = build_tar(
        *((info, data) for info, (_, data) in zip(members, HOSTILE[name], strict=True)), member("z", b"z")
    )
    target = tmp_path / "target"
    if enclosed:
        result = run_unpacker(data, target)
    else:
        target.mkdir()
        result = _unpack_in_process(data, target, monkeypatch)
    assert result.get("fault", "image") == "image", result
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside.stat().st_mode & 0o777, (outside / "secret").read_text()) == (0o700, "secret")
    assert (tmp_path / "secret").read_text() == "secret"
    assert {path.name for path in tmp_path.iterdir()} <= {"outside", "secret", "target", "target.tar"}
    for info in list_tree(target).values():
        assert info[0] not in (stat.S_IFCHR, stat.S_IFBLK) or "removed" in name


def _unpack_in_process(data: bytes, target: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(target)
    layer = program.LayerWriter(owners=ROOT, layered=True, max_bytes=1 << 30)
    chunks = [data, b""]
    reader = tar_stream.TarReader(lambda: chunks.pop(0) if chunks else b"")
    try:
        for entry in reader.entries():
            layer.add(entry, reader)
        layer.finish()
    except tar_stream.BadArchiveError as error:
        return {"error": str(error), "fault": "image"}
    except OSError as error:
        return {"error": str(error), "fault": "image"}
    return {}


@pytest.mark.parametrize(
    "compress",
    [
        lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
        lzma.compress,
        bz2.compress,
        lambda data: data,
    ],
    ids=["gzip", "xz", "bzip2", "none"],
)
def test_compression_is_recognised_and_the_digest_covers_all_data(compress: Any, tmp_path: Path) -> None:
    data = os.urandom(3000) * 1000
    (tmp_path / "layer").write_bytes(compress(data))
    read: list[int] = []
    with (tmp_path / "layer").open("rb") as file:
        stream = DecompressedStream(file.fileno(), os.fstat(file.fileno()).st_size, 1 << 30, read.append)
        chunks = list(iter(stream.read_chunk, b""))
    assert b"".join(chunks) == data
    assert stream.digest.hexdigest() == hashlib.sha256(data).hexdigest()
    assert sum(read) == (tmp_path / "layer").stat().st_size


def test_decompression_bombs_are_stopped(tmp_path: Path) -> None:
    zeroes = io.BytesIO()
    with gzip.GzipFile(fileobj=zeroes, mode="wb", compresslevel=9) as file:
        info = tarfile.TarInfo("zeroes")
        info.size = 1 << 40
        file.write(info.tobuf())
        for _ in range(40):
            file.write(bytes(1 << 20))
    result = run_unpacker(zeroes.getvalue(), tmp_path / "zeroes", max_bytes=16 << 20)
    assert result["fault"] == "image"
    assert sum(path.stat().st_blocks for path in (tmp_path / "zeroes").iterdir()) < 100_000
    giant = tarfile.TarInfo("giant")
    giant.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "giant",
        "GNU.sparse.realsize": str(1 << 60),
    }
    result = run_unpacker(build_tar((giant, b"")), tmp_path / "giant")
    assert result["fault"] == "image"
    pax = tarfile.TarInfo("x" * (2 << 20))
    assert run_unpacker(build_tar((pax, b"")), tmp_path / "names")["fault"] == "image"


def test_number_of_entries_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MAX_ENTRIES", 50)
    (tmp_path / "out").mkdir()
    data = build_tar(*(member(f"f{at}") for at in range(51)))
    assert " 50 " in _unpack_in_process(data, tmp_path / "out", monkeypatch)["error"]


def test_setuid_bits_and_attributes_are_dropped(tmp_path: Path) -> None:
    evil, data = member("evil", b"x", mode=0o6755)
    evil.pax_headers = {"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.security.capability": "x"}
    group = directory("d", 0o2755)
    group[0].pax_headers = {"SCHILY.xattr.user.overlay.opaque": "y"}
    assert "error" not in run_unpacker(build_tar((evil, data), group), tmp_path / "out")
    for name in ("evil", "d"):
        assert (tmp_path / "out" / name).stat().st_mode & 0o7777 == 0o755
        assert os.listxattr(tmp_path / "out" / name) == []


def test_whiteouts_are_converted_for_overlayfs(tmp_path: Path) -> None:
    data = build_tar(
        directory("kept/"),
        member("kept/.wh.file"),
        member("kept/.wh..wh.plnk"),
        member("gone/.wh..wh..opq"),
        member("again/.wh.folder"),
        member("again/folder/new", b"n"),
        directory("both/"),
        directory("both/d/"),
        member("both/.wh.d"),
        member("both/f", b"f"),
        member("both/.wh.f"),
        member("none/.wh.x"),
    )
    result = run_unpacker(data, tmp_path / "out")
    assert sorted(result["whiteouts"]) == ["kept/file", "none/x"]
    top = tmp_path / "out"
    assert stat.S_ISCHR((top / "kept/file").lstat().st_mode)
    assert (top / "kept/file").lstat().st_rdev == 0
    opaque = [
        path
        for path in list_tree(top)
        if program.OPAQUE_ATTRIBUTE in os.listxattr(top / path, follow_symlinks=False)
    ]
    assert sorted(opaque) == ["again/folder", "both/d", "gone"]
    assert (top / "both/f").read_bytes() == b"f"
    # Whiteouts of missing files are dropped, and implied directories get the metadata of lower layers.
    below = tmp_path / "below"
    (below / "kept").mkdir(parents=True)
    (below / "kept/file").write_text("x")
    (below / "again").mkdir()
    (below / "again").chmod(0o711)
    (below / "none").symlink_to("kept")
    finalize_layer(top, [below], result["implied_directories"], result["whiteouts"], owners=ROOT)
    assert (top / "kept/file").lstat().st_rdev == 0
    assert list((top / "none").iterdir()) == []
    assert (top / "again").stat().st_mode & 0o777 == 0o711
    assert (top / "again/folder").stat().st_mode & 0o777 == 0o755


def test_diff_id_is_verified(tmp_path: Path) -> None:
    data = build_tar(member("a", b"a"))
    assert "error" not in run_unpacker(data, tmp_path / "right", diff_id=sha256_digest(data))
    wrong = run_unpacker(data + b"more", tmp_path / "more", diff_id=sha256_digest(data))
    assert (wrong["fault"], sha256_digest(data) in wrong["error"]) == ("image", True)
