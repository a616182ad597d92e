"""The plain bytes of a layer that may be compressed. Stand-alone, as the program is that unpacks.

Promises:
- gzip (any number of members), xz and bzip2 are opened by what they begin with; what is none of these is plain;
- it is opened in pieces, and read only so far ahead: a bomb fills no memory, and ends at a bound;
- every byte that is handed on was digested.
"""

from __future__ import annotations

import _thread
import os
import sys
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.images.tars import BadArchiveError
else:
    from tars import BadArchiveError
try:
    from _hashlib import openssl_sha256 as sha256  # its module takes as long to import as a small layer to unpack
except ImportError:
    from hashlib import sha256

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CHUNK = 1 << 20
AHEAD = 8
"""Chunks that are read before they are needed."""


class Feed:
    """A layer's plain bytes: read, opened and digested by a thread, which needs little of the interpreter."""

    def __init__(self, fd: int, length: int, most: int, beat: Callable[[int], None]) -> None:
        self._fd = fd
        self._left = length
        self._most = most
        self._beat = beat
        self.digest = sha256()
        self.plain = 0
        self._chunks: list[bytes] = []
        self._error = ""
        self._room = _thread.allocate_lock()
        self._ready = _thread.allocate_lock()
        self._gate = _thread.allocate_lock()
        self._ready.acquire()
        self._done = False
        _thread.start_new_thread(self._work, ())

    # ---- the thread

    def _work(self) -> None:
        try:
            first = self._read()
            open_ = _opener(first)
            if open_ is None:
                self._put(first)
                while block := self._read():
                    self._put(block)
            else:
                open_(first, self._read, self._put)
        except BadArchiveError as error:
            self._error = str(error)
        except zlib.error as error:
            self._error = f"its compression is broken: {error}"
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            with self._gate:
                self._done = True
            if self._ready.locked():
                self._ready.release()

    def _read(self) -> bytes:
        block = os.read(self._fd, min(CHUNK, self._left)) if self._left else b""
        self._left -= len(block)
        if block:
            self._beat(len(block))
        return block

    def _put(self, block: bytes) -> None:
        if not block:
            return
        self.plain += len(block)
        if self.plain > self._most:
            raise BadArchiveError(f"it is larger than the {self._most:,} bytes that it may be")
        self.digest.update(block)
        while True:
            with self._gate:
                if len(self._chunks) < AHEAD:
                    self._chunks.append(block)
                    if self._ready.locked():
                        self._ready.release()
                    return
                self._room.acquire(blocking=False)
            self._room.acquire()
            self._room.release()

    # ---- the reader

    def more(self) -> bytes:
        while True:
            with self._gate:
                if self._chunks:
                    chunk = self._chunks.pop(0)
                    if self._room.locked():
                        self._room.release()
                    return chunk
                if self._done:
                    if self._error:
                        raise BadArchiveError(self._error)
                    return b""
                self._ready.acquire(blocking=False)
            self._ready.acquire()
            self._ready.release()


def _opener(first: bytes) -> Callable[[bytes, Callable[[], bytes], Callable[[bytes], None]], None] | None:
    if first[:2] == b"\x1f\x8b":
        return _gunzip
    if first[:6] == b"\xfd7zXZ\0":
        import lzma

        return _squeezed(lzma.LZMADecompressor)
    if first[:3] == b"BZh":
        import bz2

        return _squeezed(bz2.BZ2Decompressor)
    return None


def _gunzip(block: bytes, read: Callable[[], bytes], put: Callable[[bytes], None]) -> None:
    """Any number of members, one after the other; in pieces, so that a bomb fills no memory."""
    while block:
        unzip = zlib.decompressobj(31)
        while not unzip.eof:
            if not block:
                raise BadArchiveError("it ends in the middle")
            put(unzip.decompress(block, CHUNK))
            block = unzip.unconsumed_tail or unzip.unused_data or (b"" if unzip.eof else read())
        block = unzip.unused_data or read()
        if block and block[:2] != b"\x1f\x8b":
            if block.strip(b"\0"):
                raise BadArchiveError("something that is not compressed follows what is")
            block = b""


def _squeezed(kind: Any) -> Callable[[bytes, Callable[[], bytes], Callable[[bytes], None]], None]:
    def unsqueeze(block: bytes, read: Callable[[], bytes], put: Callable[[bytes], None]) -> None:
        one = kind()
        try:
            while not one.eof:
                if one.needs_input and not block:
                    block = read()
                    if not block:
                        raise BadArchiveError("it ends in the middle")
                put(one.decompress(block, CHUNK))
                block = b""
        except (OSError, ValueError, EOFError) as error:
            raise BadArchiveError(f"its compression is broken: {error}") from error
        except Exception as error:
            if type(error).__name__ != "LZMAError":
                raise
            raise BadArchiveError(f"its compression is broken: {error}") from error

    return unsqueeze
