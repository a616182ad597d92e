"""Tests of `rookery.journal.tokens`."""

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_kit import Mount, remount_read_only, turns

from rookery.core import Extent, JournalError
from rookery.journal import TokenReader, TokenWriter, decode_turn, encode_turn
from rookery.journal.tokens import FILE_HEADER, OVERHEAD
from tests.processes import list_open_files


def write(folder: Path, *payloads: bytes, writer: str = "w") -> list[Extent]:
    with TokenWriter(folder, writer) as tokens:
        return [tokens.append(payload) for payload in payloads]


def test_append_is_buffered_and_flush_makes_extents_readable(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, "r1") as tokens, TokenReader(tmp_path) as reader:
        extents = [tokens.append(payload) for payload in (b"one", b"", b"three" * 1000)]
        assert os.listdir(tmp_path) == []
        assert not reader.exists(extents[0])
        tokens.flush()
        assert [reader.read(extent) for extent in extents] == [b"one", b"", b"three" * 1000]
        assert all(reader.exists(extent) for extent in extents)
        assert tokens.pending == 0


def test_turn_reads_back_exactly(tmp_path: Path) -> None:
    wanted = turns("0.0")
    extents = write(tmp_path, *(encode_turn(turn) for turn in wanted))
    with TokenReader(tmp_path) as reader:
        assert [decode_turn(reader.read(extent)) for extent in extents] == wanted


def test_files_rotate_at_their_maximum_size(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, "r", max_bytes=200) as tokens:
        extents = [tokens.append(bytes([n]) * 50) for n in range(20)]
        big = tokens.append(b"b" * 1000)
    with TokenReader(tmp_path, open_files=2) as reader:
        assert [reader.read(extent) for extent in extents] == [bytes([n]) * 50 for n in range(20)]
        assert reader.read(big) == b"b" * 1000
        assert len(reader.files()) == 8
        assert len(list_open_files(tmp_path)) <= 2
    sizes = {name: (tmp_path / name).stat().st_size for name in os.listdir(tmp_path)}
    assert all(size <= 200 for name, size in sizes.items() if name != big.file)


def test_writer_of_the_same_name_starts_a_new_file(tmp_path: Path) -> None:
    first = write(tmp_path, b"before")
    second = write(tmp_path, b"after")
    assert first[0].file != second[0].file
    with TokenReader(tmp_path) as reader:
        assert reader.read(first[0]) == b"before"
        assert reader.read(second[0]) == b"after"


def test_concurrent_writers_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = TokenWriter(tmp_path, "w"), TokenWriter(tmp_path, "w")
    one.append(b"1")
    two.append(b"2")
    one.close()
    with pytest.raises(JournalError, match="'w'"):
        two.close()


def test_closed_writer_refuses_to_append(tmp_path: Path) -> None:
    tokens = TokenWriter(tmp_path, "w")
    tokens.close()
    tokens.close()
    with pytest.raises(JournalError, match="'w'"):
        tokens.append(b"x")


@pytest.mark.parametrize("at", range(len(FILE_HEADER), len(FILE_HEADER) + 2 * OVERHEAD + 10))
def test_flipped_bit_is_detected_and_located(tmp_path: Path, at: int) -> None:
    extents = write(tmp_path, b"hello", b"world")
    path = tmp_path / extents[0].file
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with TokenReader(tmp_path) as reader:
        bad, good = extents if at < extents[1].offset else extents[::-1]
        assert reader.read(good) in (b"hello", b"world")
        with pytest.raises(JournalError, match=rf"{path.name}\b.*\b{bad.offset}\b"):
            reader.read(bad)


@pytest.mark.parametrize("cut", range(1, OVERHEAD + 5))
def test_torn_tail_ends_a_scan_without_error(tmp_path: Path, cut: int) -> None:
    extents = write(tmp_path, b"hello", b"world")
    path = tmp_path / extents[0].file
    os.truncate(path, path.stat().st_size - cut)
    with TokenReader(tmp_path) as reader:
        assert list(reader.scan(path.name)) == [(extents[0], b"hello")]
        assert reader.exists(extents[0])
        assert not reader.exists(extents[1])
        with pytest.raises(JournalError, match=rf"{path.name}\b.*\b{extents[1].offset}\b"):
            reader.read(extents[1])


def test_file_of_a_writer_killed_before_its_first_write_is_empty(tmp_path: Path) -> None:
    (tmp_path / "w-0.rtk").touch()
    with TokenReader(tmp_path) as reader:
        assert list(reader.scan("w-0.rtk")) == []
        assert not reader.exists(Extent("w-0.rtk", 8, 1, 0))
    assert write(tmp_path, b"x")[0].file == "w-1.rtk"


def test_zeros_after_a_power_loss_end_a_scan(tmp_path: Path) -> None:
    extents = write(tmp_path, b"hello")
    path = tmp_path / extents[0].file
    os.truncate(path, path.stat().st_size + 4096)
    with TokenReader(tmp_path) as reader:
        assert [payload for _, payload in reader.scan(path.name)] == [b"hello"]


def test_scan_stops_at_a_damaged_frame(tmp_path: Path) -> None:
    extents = write(tmp_path, b"hello", b"world")
    path = tmp_path / extents[0].file
    data = bytearray(path.read_bytes())
    data[extents[0].offset + OVERHEAD] ^= 1
    path.write_bytes(data)
    with (
        TokenReader(tmp_path) as reader,
        pytest.raises(JournalError, match=rf"{path.name}\b.*\b{extents[0].offset}\b"),
    ):
        list(reader.scan(path.name))


@pytest.mark.parametrize(
    "name", ["../w-0.rtk", "/etc/passwd", "", ".", "..", "a/b.rtk", ".w-0.rtk", "w-0.rtk\0", "w"]
)
def test_reader_accepts_only_token_file_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path, b"secret")
    with TokenReader(tmp_path / "in") as reader:
        assert not reader.exists(Extent(name, 8, 6, 0))
        with pytest.raises(JournalError, match=re.escape(repr(name))):
            reader.read(Extent(name, 8, 6, 0))


def test_reader_refuses_links_pipes_and_directories(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    extent = write(tmp_path, b"secret")[0]
    (inside / extent.file).symlink_to(tmp_path / extent.file)
    os.mkfifo(inside / "pipe-0.rtk")
    (inside / "folder-0.rtk").mkdir()
    (inside / "text-0.rtk").write_text("not a token file")
    with TokenReader(inside) as reader:
        for name in (extent.file, "pipe-0.rtk", "folder-0.rtk", "text-0.rtk", "absent-0.rtk"):
            with pytest.raises(JournalError):
                reader.read(Extent(name, extent.offset, extent.length, extent.crc))


def test_newer_token_format_is_refused(tmp_path: Path) -> None:
    extent = write(tmp_path, b"x")[0]
    with (tmp_path / extent.file).open("r+b") as file:
        file.seek(4)
        file.write((9).to_bytes(4, "little"))
    with TokenReader(tmp_path) as reader, pytest.raises(JournalError, match=r"\b9\b"):
        reader.read(extent)


def test_frame_that_is_not_a_turn_is_reported() -> None:
    with pytest.raises(JournalError):
        decode_turn(b"\x93\x01")


def os_code(error: BaseException) -> int | None:
    """Return the `errno` of the error that caused a `JournalError`."""
    assert isinstance(error.__cause__, OSError)
    return error.__cause__.errno


@pytest.mark.needs("mount")
def test_full_disk_keeps_earlier_frames_and_offsets(disk: Mount) -> None:
    folder = disk(64)
    tokens = TokenWriter(folder, "w")
    early = tokens.append(b"e" * 1000)
    tokens.flush()
    ballast = folder / "ballast"
    ballast.write_bytes(b"b" * 40_000)
    late = tokens.append(b"l" * 40_000)
    with pytest.raises(JournalError, match=r"w-0\.rtk.*`rookery resume") as caught:
        tokens.flush()
    assert os_code(caught.value) == errno.ENOSPC
    with pytest.raises(JournalError, match=re.escape(str(caught.value))):
        tokens.append(b"more")
    with TokenReader(folder) as reader:
        assert reader.read(early) == b"e" * 1000
        assert not reader.exists(late)
        assert [extent for extent, _ in reader.scan(early.file)] == [early]
    ballast.unlink()
    tokens.flush()
    after = tokens.append(b"after")
    tokens.close()
    with TokenReader(folder) as reader:
        assert [reader.read(extent) for extent in (early, late, after)] == [b"e" * 1000, b"l" * 40_000, b"after"]


@pytest.mark.needs("mount")
def test_close_on_a_full_disk_raises_and_closes_the_file(disk: Mount) -> None:
    folder = disk(16)
    tokens = TokenWriter(folder, "w")
    tokens.append(b"x" * 100_000)
    with pytest.raises(JournalError) as caught:
        tokens.close()
    assert os_code(caught.value) == errno.ENOSPC
    assert list_open_files(folder) == []


@pytest.mark.needs("mount")
def test_read_only_directory_is_reported(disk: Mount) -> None:
    folder = disk(64)
    remount_read_only(folder)
    tokens = TokenWriter(folder, "w")
    tokens.append(b"x")
    with pytest.raises(JournalError) as caught:
        tokens.flush()
    assert os_code(caught.value) == errno.EROFS


STEP = st.one_of(
    st.binary(max_size=80).map(lambda payload: ("append", payload)),
    st.just(("flush", b"")),
    st.just(("reopen", b"")),
    st.just(("crash", b"")),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, max_size=40), max_bytes=st.integers(1, 300))
def test_any_sequence_reads_back_like_a_list(steps: list[tuple[str, bytes]], max_bytes: int) -> None:
    """`crash`: the writer is gone without a flush; what it had not flushed was promised to nobody."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = TokenWriter(folder, "w", max_bytes=max_bytes)
        flushed: list[tuple[Extent, bytes]] = []
        pending: list[tuple[Extent, bytes]] = []
        for step, payload in steps:
            if step == "append":
                pending.append((tokens.append(payload), payload))
                continue
            if step == "crash":
                tokens._close_file()
                pending = []
            else:
                (tokens.flush if step == "flush" else tokens.close)()
                flushed += pending
                pending = []
            if step != "flush":
                tokens = TokenWriter(folder, "w", max_bytes=max_bytes)
            with TokenReader(folder, open_files=2) as reader:
                assert all(reader.read(extent) == wanted for extent, wanted in flushed)
        tokens.close()
        flushed += pending
        with TokenReader(folder) as reader:
            scanned = [frame for file in reader.files() for frame in reader.scan(file)]
        assert sorted(scanned, key=repr) == sorted(flushed, key=repr)


def test_token_writer_fails_if_its_directory_was_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "tokens"
    folder.mkdir(parents=True)
    writer = TokenWriter(folder, "w")
    writer.append(b"payload")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(JournalError, match=re.escape(str(tmp_path / "run"))):
        writer.flush()
