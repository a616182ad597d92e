"""Capture of output: head and tail are kept, and every other byte is counted."""

from hypothesis import given
from hypothesis import strategies as st

from rookery.sandboxes.capture import Capture


@given(st.integers(0, 40), st.lists(st.binary(max_size=30), max_size=20))
def test_every_byte_is_kept_or_counted(limit: int, chunks: list[bytes]) -> None:
    capture = Capture(limit)
    for chunk in chunks:
        capture.add(chunk)
    whole = b"".join(chunks)
    kept, dropped = capture.result()
    assert len(kept) + dropped == len(whole)
    assert len(kept) == min(limit, len(whole))
    if dropped:
        head = (limit + 1) // 2
        assert kept == whole[:head] + whole[len(whole) - (limit - head) :]
    else:
        assert kept == whole


def test_capture_memory_is_bounded() -> None:
    capture = Capture(1000)
    for _ in range(1000):
        capture.add(b"x" * 65536)
    assert capture.result() == (b"x" * 1000, 65_536_000 - 1000)
    assert len(capture._tail) < 200_000
