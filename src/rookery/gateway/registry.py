"""The sessions of a gateway shard, stored on disk so that they survive a restart of the shard. Runs in gateway
shards.

Guarantees:
- a registered session survives a restart of its shard, with every recorded turn;
- a turn is written before the client receives the end of its reply, so that a SIGKILL of the shard loses no reply
  that a client has received completely;
- a session's secret gives access to that session only, and the gateway stores only a digest of the secret;
- an ended session accepts no calls, and its recorded turns stay until the session is deleted;
- reading a session's turns never changes them;
- an idle session is unloaded from memory, and read from disk again when it is used;
- a file of turns that this process has written is removed when the last of its sessions is deleted, unless the
  file is still being written.
"""

import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeAlias
from zlib import crc32

import msgspec

from rookery.core import (
    Extent,
    Message,
    RookeryError,
    StageClock,
    TruncatedReason,
    Turn,
    UsageError,
)
from rookery.gateway.registration import Registration, RoleOptions, SessionOpened, validate_registration
from rookery.gateway.session import ModelRole, Session
from rookery.gateway.session_entry import Ending, SessionEntry
from rookery.journal.tokens import MAX_BYTES, TokenReader, TokenWriter, decode_turn, encode_turn
from rookery.trajectories import Recorder, get_continued_response

MAX_SESSIONS: Final = 200_000
MAX_DELETED: Final = 200_000
"""Number of deleted sessions that are remembered. Requests for earlier ones are answered as for unknown
sessions."""


class SessionEnded(msgspec.Struct, frozen=True, tag="ended"):
    """Event that is stored on disk when a session is cancelled or deleted. `at` is the Unix time."""

    id: str
    reason: Ending
    at: float


class SessionTruncated(msgspec.Struct, frozen=True, tag="stopped"):
    """Event that is stored on disk when a budget of a session is exhausted."""

    id: str
    reason: TruncatedReason


SessionEvent: TypeAlias = SessionOpened | SessionEnded | SessionTruncated
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SessionEvent).decode


class _TurnHeader(msgspec.Struct, frozen=True, gc=False):
    """The fields of a stored turn that identify it: the session's ID (`attempt`) and the index.

    The other fields are not decoded, which saves time.
    """

    attempt: str
    index: int


_decode_header = msgspec.msgpack.Decoder(_TurnHeader).decode


class SessionConflictError(RookeryError):
    """A session cannot be registered because its ID is in use or belonged to a deleted session."""

    cause = "upstream.rejected"


class SessionRegistry:
    """The sessions of one shard, in memory and on disk.

    `writer` names the files that this shard writes in `folder`. `is_local` tells whether this shard owns a session
    ID.
    """

    def __init__(
        self,
        folder: Path,
        writer: str,
        roles: Mapping[str, ModelRole],
        is_local: Callable[[str], bool],
        *,
        paused: bool = False,
        paused_seconds: Callable[[], float] = lambda: 0.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.roles = roles
        self._paused = paused
        self._paused_seconds = paused_seconds
        self.entries: dict[str, SessionEntry] = {}
        self.deleted: dict[str, bytes] = {}
        """Digests of the secrets of recently deleted sessions, by session ID."""
        self._is_local = is_local
        for part in ("sessions", "tokens"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._tokens = folder / "tokens"
        self._events = TokenWriter(folder / "sessions", writer)
        self._turns = TokenWriter(folder / "tokens", writer, max_bytes=max_bytes)
        self._live_turns: Counter[str] = Counter()
        """Counts, for each file of turns that this process has written, the turns whose sessions are not
        deleted."""
        self._restore(folder)

    # ---- restoring

    def _restore(self, folder: Path) -> None:
        with TokenReader(folder / "sessions") as reader:
            events = [_decode(payload) for file in _sort_files(reader.files()) for _, payload in reader.scan(file)]
        opened = [
            event for event in events if isinstance(event, SessionOpened) and self._is_local(event.registration.id)
        ]
        paused_seconds = self._paused_seconds()
        for event in sorted(opened, key=lambda one: one.at):
            self._add_entry(event, paused_seconds)
        for event in events:
            if isinstance(event, SessionEnded) and (entry := self.entries.get(event.id)) is not None:
                entry.ended = event.reason
                if event.reason == "deleted":
                    self._delete(entry)
            elif isinstance(event, SessionTruncated) and (entry := self.entries.get(event.id)) is not None:
                entry.truncated = event.reason
        turns: dict[str, dict[int, Extent]] = {session: {} for session in self.entries}
        with TokenReader(self._tokens) as reader:
            for file in _sort_files(reader.files()):
                for extent, payload in reader.scan(file):
                    header = _decode_header(payload)
                    if header.attempt in turns:
                        # If an index occurs twice, the later one counts: the earlier write had failed on a full
                        # disk and was completed afterwards. If the number of shards has changed, the turns of
                        # a session are in the files of several shards.
                        turns[header.attempt][header.index] = extent
        for session, extents in turns.items():
            self.entries[session].extents = [extents[index] for index in sorted(extents)]

    def _add_entry(self, opened: SessionOpened, paused_seconds: float) -> SessionEntry:
        budget = opened.registration.budgets.deadline
        now = time.monotonic()
        elapsed = max(0.0, time.time() - opened.at - max(0.0, paused_seconds - opened.paused_seconds))
        entry = SessionEntry(opened, StageClock(now - elapsed, budget if budget is not None else float("inf")))
        if self._paused:
            entry.stop_clock()
        self.entries[entry.id] = entry
        return entry

    def stop_clocks(self) -> None:
        """Stop the clocks of all sessions, including those registered later, because the policy is paused."""
        if not self._paused:
            self._paused = True
            for entry in self.entries.values():
                entry.stop_clock()

    def restart_clocks(self) -> None:
        """Restart the clocks of all sessions after a pause."""
        if self._paused:
            self._paused = False
            for entry in self.entries.values():
                entry.restart_clock()

    # ---- sessions

    def register(self, registration: Registration) -> tuple[SessionEntry, str]:
        """Register a session. Returns its entry and its secret, of which only a digest is stored.

        Raises `SessionConflictError` if the ID is in use, and `UsageError` if the registration is invalid or the
        shard has too many sessions.
        """
        if not registration.id:
            registration = msgspec.structs.replace(registration, id=secrets.token_hex(12))
        if registration.id in self.entries or registration.id in self.deleted:
            raise SessionConflictError(f"the session {registration.id!r} exists or was deleted: use another ID")
        if len(self.entries) >= MAX_SESSIONS:
            raise UsageError(
                f"the gateway shard has reached its limit of {MAX_SESSIONS} sessions: delete those that have ended"
            )
        validate_registration(registration, self.roles)
        secret = f"rk-{secrets.token_urlsafe(24)}"
        paused_seconds = self._paused_seconds()
        opened = SessionOpened(registration, sha256(secret.encode()).digest(), time.time(), paused_seconds)
        try:
            self._write_event(opened)
        except OverflowError:
            raise UsageError("an integer in the registration does not fit into 64 bits") from None
        return self._add_entry(opened, paused_seconds), secret

    def load_session(self, entry: SessionEntry) -> Session:
        """Return the `Session` of an entry.

        If it is not in memory, it is restored from the recorded turns on disk.
        """
        entry.last_used = time.monotonic()
        if entry.session is None:
            turns = self.read_turns(entry)
            recorder = Recorder.restore(entry.id, turns, self._make_sink(entry))
            session = Session(
                entry.id,
                {name: _configure_role(role, entry.registration) for name, role in self.roles.items()},
                entry.registration.budgets.limits(),
                recorder,
                entry,
                entry.registration.seed,
            )
            for turn in turns:
                session.count(turn)
                session.next_seed()  # each recorded call has used a seed
                entry.add_turn(turn)
            session.truncated = entry.truncated
            entry.session = session
            entry.take_new_counts(session)  # do not report old counts again
        return entry.session

    def unload_idle(self, seconds: float) -> None:
        """Unload sessions from memory that have ended or were not used for `seconds`.

        Sessions with calls in flight stay in memory.
        """
        before = time.monotonic() - seconds
        for entry in self.entries.values():
            session = entry.session
            idle = session is not None and not session.in_flight and not entry.pending
            if idle and (entry.ended is not None or entry.last_used < before):
                entry.unload()

    def read_turns(self, entry: SessionEntry) -> list[Turn]:
        """Read all turns of a session from disk."""
        return self.read_extents(entry.extents)

    def read_extents(self, extents: Iterable[Extent]) -> list[Turn]:
        """Read the turns at these locations on disk. Opens its own files, so it can be called from any thread."""
        with TokenReader(self._tokens) as reader:
            return [decode_turn(reader.read(extent)) for extent in extents]

    def read_prompt(self, entry: SessionEntry, turn: Turn) -> bytes:
        """Return all prompt token IDs of a turn (int32).

        A turn that extends an earlier one (its parent) stores only the IDs that follow the parent's tokens. The
        others are read from the parent, and so on.
        """
        parts = [turn.prompt]
        if turn.prefix:
            turns = {one.index: one for one in self.read_turns(entry)}
            while turn.prefix and turn.parent is not None:
                parent = turns[turn.parent]
                # A turn may extend only a part of what a partial turn has sampled.
                extended = turn.prefix - parent.prefix - len(parent.prompt) // 4
                parts += (parent.sampled[: 4 * extended], parent.prompt)
                turn = parent
        return b"".join(reversed(parts))

    def read_turn(self, entry: SessionEntry, index: int) -> Turn:
        """Read one turn of a session by its index."""
        (turn,) = self.read_extents([entry.extents[index]])
        return turn

    def read_history(self, entry: SessionEntry, index: int) -> list[Message]:
        """Return all messages of the conversation up to and including the response of the turn with this index."""
        path: list[Turn] = []
        at: int | None = index
        with TokenReader(self._tokens) as reader:
            while at is not None:
                path.append(decode_turn(reader.read(entry.extents[at])))
                at = path[-1].parent
        path.reverse()
        return [
            message
            for turn, following in zip(path, (*path[1:], None), strict=True)
            for message in (*turn.messages, get_continued_response(turn, following))
        ]

    def mark_truncated(self, entry: SessionEntry, reason: TruncatedReason) -> None:
        """Record, also on disk, that a budget of the session is exhausted. Only the first reason is kept."""
        if entry.truncated is None:
            entry.truncated = reason
            self._write_event(SessionTruncated(entry.id, reason))

    def end(self, entry: SessionEntry, status: Ending) -> None:
        """End a session as `cancelled`, which keeps its turns, or as `deleted`. Cancels its calls in flight.

        Ending twice is allowed.
        """
        if entry.session is not None:
            entry.session.close()
        if entry.ended is None or (status == "deleted" and entry.ended != "deleted"):
            entry.ended = status
            self._write_event(SessionEnded(entry.id, status, time.time()))
        if status == "deleted":
            self._delete(entry)

    def _delete(self, entry: SessionEntry) -> None:
        self.entries.pop(entry.id, None)
        self.deleted[entry.id] = entry.digest
        for extent in entry.extents:
            self._live_turns[extent.file] -= 1
            if self._live_turns[extent.file] == 0 and extent.file != self._turns.name:
                (self._tokens / extent.file).unlink(missing_ok=True)
        while len(self.deleted) > MAX_DELETED:
            del self.deleted[next(iter(self.deleted))]

    def verify_secret(self, digest: bytes, secret: str) -> bool:
        """Return whether a session's secret matches its stored digest. Takes constant time."""
        return hmac.compare_digest(digest, sha256(secret.encode("utf-8", "replace")).digest())

    # ---- writing

    def _make_sink(self, entry: SessionEntry) -> Callable[[Turn], None]:
        def sink(turn: Turn) -> None:
            if entry.ended is not None:
                raise RookeryError(f"session {entry.id} has ended: no more turns are recorded")
            extent = _write(self._turns, encode_turn(turn))
            self._live_turns[extent.file] += 1
            entry.extents.append(extent)
            entry.add_turn(turn)

        return sink

    def _write_event(self, event: SessionEvent) -> None:
        _write(self._events, _encode(event))

    def close(self) -> None:
        """Close all sessions, which cancels their calls in flight, and the files. The sessions stay on disk."""
        for entry in self.entries.values():
            if entry.session is not None:
                entry.session.close()
        try:
            self._events.close()
        finally:
            self._turns.close()


def _write(writer: TokenWriter, payload: bytes) -> Extent:
    """Write a record to disk and return its location.

    Data that an earlier call could not write, for example because the disk was full, is written first.
    """
    if writer.pending:
        writer.flush()
    extent = writer.append(payload)
    writer.flush()
    return extent


def _sort_files(files: Iterable[str]) -> list[str]:
    """Sort file names by writer and then in the order of writing. The numbers in them are not zero-padded."""
    return sorted(files, key=lambda name: (name.rpartition("-")[0], len(name), name))


def owning_shard(session: str, shards: int) -> int:
    """Return the index of the shard that owns a session: a hash of the ID, so it is the same in every process."""
    return crc32(session.encode("utf-8", "replace")) % shards


def _configure_role(role: ModelRole, registration: Registration) -> ModelRole:
    model = registration.roles.get(role.name, RoleOptions()).model
    if role.name == "policy":
        model = model or registration.model
    return msgspec.structs.replace(role, model=model) if model else role
