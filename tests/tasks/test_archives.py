"""Archives: nothing is written outside, unsafe entries are refused, sizes are bounded."""

import gzip
import io
import os
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rookery.core import UsageError
from rookery.tasks import load_tasks
from rookery.tasks.archives import unpack
from rookery.tasks.swe import get_swe_task
from tests.tasks import kit


def entry(name, data=b"", kind=tarfile.REGTYPE, link="", mode=0o644):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    return info, data


def archive(path, *entries, how="w:gz"):
    with tarfile.open(path, how, format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return path


def refused(path, tmp_path, *named, **bounds):
    target = tmp_path / "into"
    target.mkdir(exist_ok=True)
    with pytest.raises(UsageError) as caught:
        unpack(path, target, **bounds)
    for name in (path.name, *named):
        assert name in str(caught.value)


@pytest.mark.parametrize("how", ["w", "w:gz", "w:xz", "w:bz2"])
def test_archive_of_task_directories_is_loaded(tmp_path, own_cache, how):
    made = kit.open_instruct(tmp_path / "made" / "one")
    os.chmod(made / "tests/test.sh", 0o4755)
    name = f"task-data.tar{how[1:].replace(':', '.')}"
    with tarfile.open(tmp_path / name, how) as tar:
        tar.add(made, "./task-data/one")
    (task,) = load_tasks(tmp_path / name)
    found = get_swe_task(task)
    assert (task.id, found.format) == ("one", "open-instruct")
    assert found.folder.startswith(str(own_cache / "content"))
    assert os.stat(f"{found.folder}/tests/test.sh").st_mode & 0o7777 == 0o755
    assert load_tasks(tmp_path / name).name == "task-data"


def test_changed_archive_is_unpacked_again(tmp_path, own_cache):
    for text in ("first", "second!"):
        archive(tmp_path / "t.tar.gz", entry("a/instruction.md", text.encode()), entry("a/tests/test.sh", b"x"))
        assert load_tasks(tmp_path / "t.tar.gz")[0].text == text


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ([entry("../out", b"x")], "'../out'"),
        ([entry("a/../../out", b"x")], "'a/../../out'"),
        ([entry("/abs", b"x")], "'/abs'"),
        ([entry("a", kind=tarfile.SYMTYPE, link="/etc/passwd")], "'/etc/passwd'"),
        ([entry("a", kind=tarfile.SYMTYPE, link="../x")], "'../x'"),
        ([entry("d/a", kind=tarfile.SYMTYPE, link="../../x")], "'../../x'"),
        (
            [entry("a", kind=tarfile.SYMTYPE, link="."), entry("b", kind=tarfile.SYMTYPE, link="a/../..")],
            "'a/../..'",
        ),
        ([entry("a", kind=tarfile.SYMTYPE, link="d"), entry("a/x", b"x")], "'a'"),
        ([entry("a", kind=tarfile.SYMTYPE, link="/etc"), entry("a/x", b"x")], "'a'"),
        ([entry("a", kind=tarfile.LNKTYPE, link="/etc/passwd")], "'/etc/passwd'"),
        ([entry("a", kind=tarfile.LNKTYPE, link="../x")], "'../x'"),
        ([entry("a", kind=tarfile.LNKTYPE, link="later"), entry("later", b"x")], "'later'"),
        ([entry("s", kind=tarfile.SYMTYPE, link="x"), entry("a", kind=tarfile.LNKTYPE, link="s")], "'s'"),
        ([entry("a", kind=tarfile.CHRTYPE)], "'a'"),
        ([entry("a", kind=tarfile.BLKTYPE)], "'a'"),
        ([entry("a", kind=tarfile.FIFOTYPE)], "'a'"),
        ([entry("a", b"x"), entry("a", b"y")], "'a'"),
        ([entry("a", b"x"), entry("./a", b"y")], "'a'"),
        ([entry("a", b"x"), entry("a/b", b"y")], "'a'"),
        ([entry("a/b", b"x"), entry("a", b"y")], "'a'"),
        ([entry("d/" * 101 + "x", b"x")], "'d/d/"),
        ([entry("n" * 300, b"x")], "'nnn"),
    ],
)
def test_unsafe_entries_are_refused(tmp_path, entries, named):
    refused(archive(tmp_path / "bad.tar.gz", *entries), tmp_path, named)
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(UsageError, match=r"bad\.tar\.gz"):
        load_tasks(tmp_path / "bad.tar.gz")


def test_names_with_invalid_utf8_or_nul_are_refused(tmp_path):
    with tarfile.open(tmp_path / "raw.tar", "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        tar.addfile(tarfile.TarInfo("\udcff"))
    refused(tmp_path / "raw.tar", tmp_path, "UTF-8")
    info = tarfile.TarInfo("x")
    info.pax_headers = {"path": "a\0b"}
    with tarfile.open(tmp_path / "nul.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    refused(tmp_path / "nul.tar", tmp_path, "NUL")


def test_inner_symlinks_and_hard_links_are_unpacked(tmp_path):
    path = archive(
        tmp_path / "fine.tar.gz",
        entry("t/a", b"x"),
        entry("t/b", kind=tarfile.SYMTYPE, link="a"),
        entry("t/d/up", kind=tarfile.SYMTYPE, link="../a"),
        entry("t/c", kind=tarfile.LNKTYPE, link="t/a"),
    )
    target = tmp_path / "into"
    target.mkdir()
    unpack(path, target)
    assert (os.readlink(target / "t/b"), (target / "t/d/up").read_text(), (target / "t/c").read_text()) == (
        "a",
        "x",
        "x",
    )


def test_decompression_bombs_stop_at_the_limit(tmp_path):
    zeroes = archive(tmp_path / "zeroes.tar.gz", entry("x", bytes(8 << 20)))
    assert zeroes.stat().st_size < 1 << 15
    refused(zeroes, tmp_path, "1,048,576", most=1 << 20)
    many = archive(tmp_path / "many.tar.gz", *(entry(f"f{n}") for n in range(50)))
    refused(many, tmp_path, " 20 ", entries=20)
    endless = tmp_path / "endless.tar.gz"  # a header with a small size, and an endless stream
    endless.write_bytes(gzip.compress(tarfile.TarInfo("x").tobuf() + b"\1" * (16 << 20)))
    refused(endless, tmp_path, most=1 << 20, entries=10)


@pytest.mark.parametrize(
    "data",
    # A time in the test ID would give the test another name in each worker process.
    [b"", b"no archive at all" * 100, gzip.compress(b"x" * 2000, mtime=0), gzip.compress(b"", mtime=0)],
    ids=["empty", "text", "packed text", "packed nothing"],
)
def test_file_that_is_not_an_archive_is_refused(tmp_path, data):
    (tmp_path / "x.tar.gz").write_bytes(data)
    with pytest.raises(UsageError, match=r"\bx\.tar\.gz|content"):
        load_tasks(tmp_path / "x.tar.gz")


def test_truncated_archive_is_refused_and_leaves_nothing(tmp_path, own_cache):
    whole = archive(tmp_path / "t.tar.gz", *(entry(f"a/{n}", os.urandom(2000)) for n in range(20)))
    data = whole.read_bytes()
    for cut in (10, len(data) // 2, len(data) - 9):
        whole.write_bytes(data[:cut])
        with pytest.raises(UsageError, match=r"t\.tar\.gz"):
            load_tasks(whole)
        assert not list((own_cache / "content").iterdir())
        assert not list((own_cache / "work").iterdir())


pieces = st.sampled_from(["a", "b", "..", ".", "", "/", "x/y", "\n", "$(id)"])
kinds = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.lists(
        st.tuples(
            st.lists(pieces, min_size=1, max_size=4).map("/".join),
            kinds,
            st.lists(pieces, max_size=4).map("/".join),
        ),
        max_size=6,
    )
)
def test_no_archive_writes_outside_its_target(tmp_path, entries):
    import shutil

    location = tmp_path / "deep" / "er" / "into"
    shutil.rmtree(tmp_path / "deep", ignore_errors=True)
    location.mkdir(parents=True)
    made = archive(
        tmp_path / "any.tar",
        *(
            entry(name, b"evil" if kind == tarfile.REGTYPE else b"", kind, link)
            for name, kind, link in entries
            if name
        ),
        how="w",
    )
    refusal = None
    try:
        unpack(made, location)
    except UsageError as error:
        refusal = error
    assert sorted(os.listdir(tmp_path)) == ["any.tar", "deep"]
    assert os.listdir(tmp_path / "deep") == ["er"]
    assert os.listdir(tmp_path / "deep" / "er") == ["into"]
    if refusal is None:
        for here, folders, files in os.walk(location):
            for name in folders + files:
                assert os.path.realpath(os.path.join(here, name)).startswith(str(location.resolve()))
