"""Decompress a layer in a thread while another thread writes its files. Runs in the process that unpacks it.

Guarantees:
- gzip (any number of members), xz and bzip2 are recognised by their magic bytes; other data is passed through;
- the digest covers every byte that `read_chunk` returned.

Decompression is incremental and at most `READ_AHEAD_CHUNKS` chunks ahead of the consumer.
"""

from __future__ import annotations

import _thread
import os
import zlib

from .tar_stream import BadArchiveError

try:
    from _hashlib import openssl_sha256 as sha256  # importing `hashlib` takes as long as unpacking a small layer
except ImportError:
    from hashlib import sha256

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    Decompress: TypeAlias = Callable[[bytes, Callable[[], bytes], Callable[[bytes], None]], None]

CHUNK_BYTES = 1 << 20
READ_AHEAD_CHUNKS = 8


class DecompressedStream:
    """Reads and decompresses the content of a file descriptor.

    A thread reads, decompresses and hashes, all without the interpreter lock. Locks serve as events here, because
    importing `threading` would dominate the run time for small layers.
    """

    def __init__(self, fd: int, length: int, max_bytes: int, on_read: Callable[[int], None]) -> None:
        """Read `length` bytes of `fd`, whose decompressed size must not exceed `max_bytes`.

        `on_read` is called in the reader thread with the size of each compressed chunk.
        """
        self._fd = fd
        self._remaining = length
        self._max_bytes = max_bytes
        self._on_read = on_read
        self.digest = sha256()
        self._total = 0
        self._chunks: list[bytes] = []
        self._error = ""
        self._done = False
        self._mutex = _thread.allocate_lock()
        self._not_full = _thread.allocate_lock()
        self._not_empty = _thread.allocate_lock()
        self._not_empty.acquire()
        _thread.start_new_thread(self._run, ())

    # ---- reader thread

    def _run(self) -> None:
        try:
            first = self._read()
            decompress = select_decompressor(first)
            if decompress is None:
                self._put(first)
                while block := self._read():
                    self._put(block)
            else:
                decompress(first, self._read, self._put)
        except BadArchiveError as error:
            self._error = str(error)
        except zlib.error as error:
            self._error = f"the layer's compressed data is corrupt: {error}"
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            with self._mutex:
                self._done = True
            if self._not_empty.locked():
                self._not_empty.release()

    def _read(self) -> bytes:
        block = os.read(self._fd, min(CHUNK_BYTES, self._remaining)) if self._remaining else b""
        self._remaining -= len(block)
        if block:
            self._on_read(len(block))
        return block

    def _put(self, block: bytes) -> None:
        if not block:
            return
        self._total += len(block)
        if self._total > self._max_bytes:
            raise BadArchiveError(f"the layer is larger than the limit of {self._max_bytes:,} bytes")
        self.digest.update(block)
        while True:
            with self._mutex:
                if len(self._chunks) < READ_AHEAD_CHUNKS:
                    self._chunks.append(block)
                    if self._not_empty.locked():
                        self._not_empty.release()
                    return
                self._not_full.acquire(blocking=False)
            self._not_full.acquire()
            self._not_full.release()

    # ---- consumer

    def read_chunk(self) -> bytes:
        """Return the next decompressed chunk, or b"" at the end. Raise `BadArchiveError` for invalid data."""
        while True:
            with self._mutex:
                if self._chunks:
                    chunk = self._chunks.pop(0)
                    if self._not_full.locked():
                        self._not_full.release()
                    return chunk
                if self._done:
                    if self._error:
                        raise BadArchiveError(self._error)
                    return b""
                self._not_empty.acquire(blocking=False)
            self._not_empty.acquire()
            self._not_empty.release()


def select_decompressor(first: bytes) -> Decompress | None:
    """Return the decompressor for data that begins with `first`; None if it is not compressed."""
    if first[:2] == b"\x1f\x8b":
        return _gunzip
    if first[:6] == b"\xfd7zXZ\0":
        import lzma

        return _decompressor(lzma.LZMADecompressor)
    if first[:3] == b"BZh":
        import bz2

        return _decompressor(bz2.BZ2Decompressor)
    return None


def _gunzip(block: bytes, read: Callable[[], bytes], put: Callable[[bytes], None]) -> None:
    while block:
        member = zlib.decompressobj(31)
        while not member.eof:
            if not block:
                raise BadArchiveError("the layer's compressed data is truncated")
            put(member.decompress(block, CHUNK_BYTES))
            block = member.unconsumed_tail or member.unused_data or (b"" if member.eof else read())
        block = member.unused_data or read()
        if block and block[:2] != b"\x1f\x8b":
            if block.strip(b"\0"):
                raise BadArchiveError("the layer's compressed data is followed by other data")
            block = b""


def _decompressor(kind: Any) -> Decompress:
    def decompress(block: bytes, read: Callable[[], bytes], put: Callable[[bytes], None]) -> None:
        state = kind()
        try:
            while not state.eof:
                if state.needs_input and not block:
                    block = read()
                    if not block:
                        raise BadArchiveError("the layer's compressed data is truncated")
                put(state.decompress(block, CHUNK_BYTES))
                block = b""
        except (OSError, ValueError, EOFError) as error:
            raise BadArchiveError(f"the layer's compressed data is corrupt: {error}") from error
        except Exception as error:
            if type(error).__name__ != "LZMAError":
                raise
            raise BadArchiveError(f"the layer's compressed data is corrupt: {error}") from error

    return decompress
