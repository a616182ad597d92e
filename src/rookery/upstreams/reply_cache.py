"""Cache of model replies on disk, for evaluations that are repeated. Runs in runners and gateway shards.

- A reply is found only for an equal call: the kind, addresses and model of the upstream, the files of local
  weights, the policy version, the messages or prompt tokens, the tools, all sampling parameters, and the call's
  seed. The seed is derived from the run's seed, the task's position, the rollout's number in its group and the
  number of the call, so that the k rollouts of a task have k different replies.
- Only complete replies are stored. A call without a seed is not cached.
- The cache is an SQLite database. A reply is stored in one transaction, with a checksum, so that no reader sees a
  part of it. Any number of runs may use a cache at the same time.
- The size is limited: the oldest replies are removed first.
- A failure of the disk during a run is logged once; the call is then answered by the model.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import msgspec

import rookery
from rookery.core import Extra, Finish, Message, Span, UsageError
from rookery.core.turns import REPLY_CACHE
from rookery.upstreams.hang_detector import Examinable, UpstreamEvidence
from rookery.upstreams.protocol import (
    CallDelta,
    Delta,
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    PauseMode,
    TopLogprobs,
    Upstream,
    UpstreamConfig,
    UpstreamInfo,
)
from rookery.upstreams.urls import redact

FILE: Final = "replies.sqlite"
MAX_BYTES: Final = 4 << 30
"""Default limit of the size of all replies in a cache."""
_BUSY_SECONDS: Final = 10.0
_WRITES_PER_CHECK: Final = 64
_COMPLETE: Final = ("stop", "tool_calls", "length")
_FORMAT: Final = 1
log = logging.getLogger("rookery.upstreams")


class _StoredReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a `ModelReply` that are stored."""

    message: Message
    finish: Finish
    prompt: bytes = b""
    sampled: bytes = b""
    logprobs: bytes = b""
    version: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    extras: dict[str, Extra] = {}
    spans: tuple[Span, ...] = ()
    tops: TopLogprobs = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_StoredReply).decode
_key_encoder = msgspec.json.Encoder(order="deterministic")


class ReplyCache:
    """Replies by key, in the directory `folder`. Thread-safe."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        """Open the cache and create it if needed. Raise `UsageError` if that is not possible."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._writes = 0
        self._failed = False
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                self._use_write_ahead_log()
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS replies(key BLOB PRIMARY KEY, added REAL NOT NULL, "
                    "size INTEGER NOT NULL, crc INTEGER NOT NULL, reply BLOB NOT NULL)"
                )
                self._db.execute("CREATE INDEX IF NOT EXISTS replies_added ON replies(added)")
            except BaseException:
                self._db.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise UsageError(f"the cache of replies {path} cannot be opened: {error}") from error

    def _use_write_ahead_log(self) -> None:
        """Set the journal mode. SQLite does not wait for other connections here, so this tries again."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # the other bits give the reason
                if not busy or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def get(self, key: bytes) -> bytes | None:
        """Return the stored reply, or None if there is none or if it is damaged."""
        try:
            with self._lock:
                row = self._db.execute("SELECT crc, reply FROM replies WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._report(error)
            return None
        return row[1] if row is not None and crc32(row[1]) == row[0] else None

    def put(self, key: bytes, reply: bytes, *, replace: bool = False) -> None:
        """Store a reply. A reply that is stored already is kept, except with `replace`."""
        try:
            with self._lock:
                self._db.execute(
                    f"INSERT OR {'REPLACE' if replace else 'IGNORE'} INTO replies VALUES(?, ?, ?, ?, ?)",
                    (key, time.time(), len(reply), crc32(reply), reply),
                )
                self._writes += 1
                if self._writes % _WRITES_PER_CHECK == 1:
                    self._remove_oldest()
        except sqlite3.Error as error:
            self._report(error)

    def _remove_oldest(self) -> None:
        """Remove the oldest replies if the cache is larger than its limit, until a tenth of it is free."""
        total = self._db.execute("SELECT total(size) FROM replies").fetchone()[0]
        if total <= self._max_bytes:
            return
        excess = total - 0.9 * self._max_bytes
        self._db.execute(
            "DELETE FROM replies WHERE key IN (SELECT key FROM (SELECT key, "
            "sum(size) OVER (ORDER BY added, key) - size AS before FROM replies) WHERE before < ?)",
            (excess,),
        )

    def _report(self, error: sqlite3.Error) -> None:
        if not self._failed:
            self._failed = True
            log.warning("the cache of replies failed, and the model answers instead: %s", error)

    def close(self) -> None:
        with self._lock:
            self._db.close()


class CachedUpstream:
    """Upstream that answers from a `ReplyCache` if it can, and else asks the wrapped upstream."""

    def __init__(self, inner: Upstream, config: UpstreamConfig, cache: ReplyCache) -> None:
        self.inner = inner
        self.name = inner.name
        self.accepts_tokens = inner.accepts_tokens
        self.accepts_raw_json = inner.accepts_raw_json
        self.hits = 0
        self._cache = cache
        self._identity = _identify(config)

    @property
    def version(self) -> int:
        return self.inner.version

    @version.setter
    def version(self, version: int) -> None:
        self.inner.version = version

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return await self.inner.check(timeout=timeout)

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        key = self.make_key(request)
        if key is None:
            return await self.inner.complete(request, timeout=timeout, on_delta=on_delta, on_wait=on_wait)
        data = await asyncio.to_thread(self._cache.get, key)
        stored = _load(data) if data is not None else None
        if stored is not None:
            self.hits += 1
            if on_delta is not None:
                await on_delta(_make_delta(stored))
            return stored
        reply = await self.inner.complete(request, timeout=timeout, on_delta=on_delta, on_wait=on_wait)
        if reply.finish in _COMPLETE:
            await asyncio.to_thread(self._cache.put, key, _dump(reply), replace=data is not None)
        return reply

    def make_key(self, request: ModelRequest) -> bytes | None:
        """Return a digest of everything that the reply depends on, or None if the call must not be cached."""
        if request.seed is None or request.want_logprobs:  # the server's JSON of logprobs is not stored
            return None
        parts: dict[str, Any] = {
            "format": _FORMAT,
            "upstream": self._identity,
            "version": self.version,
            "model": request.model,
            "messages": request.messages,
            "tokens": request.tokens,
            "tools": request.tools.schemas,
            "raw_tools": request.tools.raw,
            "tool_choice": request.tool_choice,
            "sampling": request.sampling,
            "want_tokens": request.want_tokens,
            "top_logprobs": request.top_logprobs,
            "seed": request.seed,
            "stop_ids": request.stop_ids,
        }
        return blake2b(_key_encoder.encode(parts), digest_size=32).digest()

    async def examine(self, affinity: str) -> tuple[UpstreamEvidence, ...]:
        return await self.inner.examine(affinity) if isinstance(self.inner, Examinable) else ()

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        return await self.inner.freeze(mode, timeout=timeout)

    async def thaw(self, *, timeout: float) -> None:
        await self.inner.thaw(timeout=timeout)

    async def close(self) -> None:
        """Close the cache and the wrapped upstream."""
        await asyncio.to_thread(self._cache.close)
        await self.inner.close()


def with_cache(upstream: Upstream, config: UpstreamConfig) -> Upstream:
    """Return `upstream`, wrapped with the cache that `config` names, if it names one."""
    return CachedUpstream(upstream, config, ReplyCache(Path(config.cache))) if config.cache else upstream


def _identify(config: UpstreamConfig) -> dict[str, Any]:
    """Return what identifies the model behind an upstream, apart from its name."""
    return {
        "kind": config.kind,
        "addresses": sorted(map(redact, config.urls)),
        "files": [_fingerprint(url) for url in sorted(config.urls)],
        "seeded": config.seeded,
        "resend_reasoning": config.resend_reasoning,
    }


def _fingerprint(address: str) -> list[Any]:
    """Return the names, sizes and times of the files of local weights, such as `embedded:PATH`.

    For the weights that ship with Rookery, return its version. For a URL, return an empty list.
    """
    kind, colon, path = address.partition(":")
    if path.startswith("//"):
        return []
    if not colon or not path:
        return [kind, rookery.__version__]
    root = Path(path)
    files = sorted(root.rglob("*")) if root.is_dir() else [root]
    found = []
    for file in files:
        if file.is_file():
            status = file.stat()
            found.append([str(file.relative_to(root)), status.st_size, status.st_mtime_ns])
    return found


def _dump(reply: ModelReply) -> bytes:
    return _encode(_StoredReply(**{name: getattr(reply, name) for name in _StoredReply.__struct_fields__}))


def _load(data: bytes) -> ModelReply | None:
    """Return a stored reply, or None if another version of Rookery stored it with other fields."""
    try:
        stored = _decode(data)
    except msgspec.DecodeError:
        return None
    fields = {name: getattr(stored, name) for name in _StoredReply.__struct_fields__}
    return ModelReply(**fields, replica=REPLY_CACHE)


def _make_delta(reply: ModelReply) -> Delta:
    """Return one piece of a stream with the whole reply."""
    calls = tuple(
        CallDelta(index, call.id, call.name, call.arguments) for index, call in enumerate(reply.tool_calls)
    )
    return Delta(
        content=reply.text,
        reasoning=reply.message.reasoning or "",
        tool_calls=calls,
        sampled=reply.sampled,
        logprobs=reply.logprobs,
        prompt=reply.prompt,
        tops=reply.tops,
        version=reply.version,
    )
