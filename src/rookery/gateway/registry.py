"""The sessions of a shard: registered, kept on disk, found again after a restart, ended once.

Promises:
- a session that was registered survives a restart of its shard, with every turn that was recorded;
- a turn is written before its client is told its end: a SIGKILL takes back nothing that was told;
- a secret opens its own session and nothing else, and lies nowhere but with the client: a digest of it is kept;
- an ended session is past for good: it takes no more calls, and its record stays until it is deleted;
- fetching a record never changes it;
- a session that rests holds no memory but its place: it goes on from the disk;
- what was deleted is freed on disk, file by file.
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
"""SessionEnded sessions that are remembered: those before them are not told from ones that never were."""


class SessionEnded(msgspec.Struct, frozen=True, tag="ended"):
    """On disk: a session is past."""

    id: str
    why: Ending
    at: float


class SessionTruncated(msgspec.Struct, frozen=True, tag="stopped"):
    """On disk: a budget of a session is spent."""

    id: str
    reason: TruncatedReason


SessionEvent: TypeAlias = SessionOpened | SessionEnded | SessionTruncated
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SessionEvent).decode


class _TurnHeader(msgspec.Struct, frozen=True, gc=False):
    """Of a turn, only whose it is and which."""

    attempt: str
    index: int


_decode_header = msgspec.msgpack.Decoder(_TurnHeader).decode


class SessionConflictError(RookeryError):
    """There is a session of that id already."""

    cause = "upstream.rejected"


class Registry:
    """The sessions that one shard owns."""

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
        """SessionEnded and deleted: the digests of their secrets."""
        self._is_local = is_local
        for part in ("sessions", "tokens"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._tokens = folder / "tokens"
        self._events = TokenWriter(folder / "sessions", writer)
        self._turns = TokenWriter(folder / "tokens", writer, max_bytes=max_bytes)
        self._live_turns: Counter[str] = Counter()
        """Turns of sessions that are not deleted, by the files that this process wrote."""
        self._restore(folder)

    # ---- what was there before

    def _restore(self, folder: Path) -> None:
        with TokenReader(folder / "sessions") as lines:
            found = [_decode(payload) for file in _sort_files(lines.files()) for _, payload in lines.scan(file)]
        opened = [
            line for line in found if isinstance(line, SessionOpened) and self._is_local(line.registration.id)
        ]
        paused_seconds = self._paused_seconds()
        for line in sorted(opened, key=lambda one: one.at):
            self._add_entry(line, paused_seconds)
        for line in found:
            if isinstance(line, SessionEnded) and (entry := self.entries.get(line.id)) is not None:
                entry.ended = line.why
                if line.why == "deleted":
                    self._delete(entry)
            elif isinstance(line, SessionTruncated) and (entry := self.entries.get(line.id)) is not None:
                entry.truncated = line.reason
        turns: dict[str, dict[int, Extent]] = {session: {} for session in self.entries}
        with TokenReader(self._tokens) as reader:
            for file in _sort_files(reader.files()):
                for extent, payload in reader.scan(file):
                    whose = _decode_header(payload)
                    if whose.attempt in turns:
                        # Of two the later: the earlier could not be written when it was recorded, and was refused.
                        # With another number of shards, a session's turns are in files of several.
                        turns[whose.attempt][whose.index] = extent
        for session, extents in turns.items():
            self.entries[session].extents = [extents[index] for index in sorted(extents)]

    def _add_entry(self, opened: SessionOpened, paused_seconds: float) -> SessionEntry:
        budget = opened.registration.budgets.deadline
        now = time.monotonic()
        gone = max(0.0, time.time() - opened.at - max(0.0, paused_seconds - opened.paused_seconds))
        entry = SessionEntry(opened, StageClock(now - gone, budget if budget is not None else float("inf")))
        if self._paused:
            entry.hold()
        self.entries[entry.id] = entry
        return entry

    def hold(self) -> None:
        """A pause: the clock of every session stops, also of those to come."""
        if not self._paused:
            self._paused = True
            for entry in self.entries.values():
                entry.hold()

    def release(self) -> None:
        if self._paused:
            self._paused = False
            for entry in self.entries.values():
                entry.release()

    # ---- sessions

    def register(self, registration: Registration) -> tuple[SessionEntry, str]:
        """A new session and its secret, which nobody can be told again."""
        if not registration.id:
            registration = msgspec.structs.replace(registration, id=secrets.token_hex(12))
        if registration.id in self.entries or registration.id in self.deleted:
            raise SessionConflictError(f"the session {registration.id!r} already exists: use another ID")
        if len(self.entries) >= MAX_SESSIONS:
            raise UsageError(f"the limit of {MAX_SESSIONS} open sessions is reached: delete those that have ended")
        validate_registration(registration, self.roles)
        secret = f"rk-{secrets.token_urlsafe(24)}"
        paused_seconds = self._paused_seconds()
        opened = SessionOpened(registration, sha256(secret.encode()).digest(), time.time(), paused_seconds)
        try:
            self._write_event(opened)
        except OverflowError:
            raise UsageError("a number in the registration does not fit into 64 bits") from None
        return self._add_entry(opened, paused_seconds), secret

    def load_session(self, entry: SessionEntry) -> Session:
        """The session of a entry, with what was recorded before."""
        entry.last_used = time.monotonic()
        if entry.session is None:
            turns = self.read_turns(entry)
            recorder = Recorder.restore(entry.id, turns, self._make_sink(entry))
            made = Session(
                entry.id,
                {name: _configure_role(role, entry.registration) for name, role in self.roles.items()},
                entry.registration.budgets.limits(),
                recorder,
                entry,
                entry.registration.seed,
            )
            for turn in turns:
                made.count(turn)
                made.next_seed()  # the next one is not the first one's again
                entry.add_turn(turn)
            made.truncated = entry.truncated
            entry.session = made
            entry.take_new_counts(made)  # what was counted before is no news
        return entry.session

    def unload_idle(self, seconds: float) -> None:
        """Sessions that were not used for so long, and those that are over, let go of their memory."""
        before = time.monotonic() - seconds
        for entry in self.entries.values():
            session = entry.session
            idle = session is not None and not session.in_flight and not entry.pending
            if idle and (entry.ended is not None or entry.last_used < before):
                entry.unload()

    def read_turns(self, entry: SessionEntry) -> list[Turn]:
        """What was recorded, read back from the disk."""
        return self.read_extents(entry.extents)

    def read_extents(self, extents: Iterable[Extent]) -> list[Turn]:
        """Turns from the disk, with files of its own: also from a thread."""
        with TokenReader(self._tokens) as reader:
            return [decode_turn(reader.read(extent)) for extent in extents]

    def read_prompt(self, entry: SessionEntry, turn: Turn) -> bytes:
        """All ids that went into a turn; it stores only those that its parent does not have."""
        parts = [turn.prompt]
        if turn.prefix:
            turns = {one.index: one for one in self.read_turns(entry)}
            while turn.prefix and turn.parent is not None:
                parent = turns[turn.parent]
                # Of a partial turn, the next one may extend less than was sampled.
                extended = turn.prefix - parent.prefix - len(parent.prompt) // 4
                parts += (parent.sampled[: 4 * extended], parent.prompt)
                turn = parent
        return b"".join(reversed(parts))

    def read_turn(self, entry: SessionEntry, index: int) -> Turn:
        """One turn of a session, by its number."""
        (turn,) = self.read_extents([entry.extents[index]])
        return turn

    def read_history(self, entry: SessionEntry, index: int) -> list[Message]:
        """All messages up to and with a turn's answer."""
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
        """A budget is spent: known also after a restart."""
        if entry.truncated is None:
            entry.truncated = reason
            self._write_event(SessionTruncated(entry.id, reason))

    def end(self, entry: SessionEntry, why: Ending) -> None:
        """The session takes no more calls; those under way are cancelled. Ending twice is fine."""
        if entry.session is not None:
            entry.session.close()
        if entry.ended is None or (why == "deleted" and entry.ended != "deleted"):
            entry.ended = why
            self._write_event(SessionEnded(entry.id, why, time.time()))
        if why == "deleted":
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
        return hmac.compare_digest(digest, sha256(secret.encode("utf-8", "replace")).digest())

    # ---- the disk

    def _make_sink(self, entry: SessionEntry) -> Callable[[Turn], None]:
        def sink(turn: Turn) -> None:
            if entry.ended is not None:
                raise RookeryError(f"session {entry.id} has ended: no more turns are recorded")
            extent = _write(self._turns, encode_turn(turn))
            self._live_turns[extent.file] += 1
            entry.extents.append(extent)
            entry.add_turn(turn)

        return sink

    def _write_event(self, line: SessionEvent) -> None:
        _write(self._events, _encode(line))

    def close(self) -> None:
        for entry in self.entries.values():
            if entry.session is not None:
                entry.session.close()
        try:
            self._events.close()
        finally:
            self._turns.close()


def _write(writer: TokenWriter, payload: bytes) -> Extent:
    """Where it lies on the disk. What could not be written before goes first: a disk may be full for a while."""
    if writer.pending:
        writer.flush()
    extent = writer.append(payload)
    writer.flush()
    return extent


def _sort_files(files: Iterable[str]) -> list[str]:
    """As they were written: the tenth file of a writer comes after its second."""
    return sorted(files, key=lambda name: (name.rpartition("-")[0], len(name), name))


def owning_shard(session: str, shards: int) -> int:
    """The shard that a session belongs to, the same in every process."""
    return crc32(session.encode("utf-8", "replace")) % shards


def _configure_role(role: ModelRole, registration: Registration) -> ModelRole:
    model = registration.roles.get(role.name, RoleOptions()).model
    if role.name == "policy":
        model = model or registration.model
    return msgspec.structs.replace(role, model=model) if model else role
