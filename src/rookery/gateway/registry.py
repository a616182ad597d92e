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
from rookery.gateway.registration import Opened, Registration, RoleWish, check
from rookery.gateway.seat import Ending, Seat
from rookery.gateway.session import Role, Session
from rookery.journal.tokens import MAX_BYTES, TokenReader, TokenWriter, decode_turn, encode_turn
from rookery.trajectories import Recorder, get_continued_response

MAX_SESSIONS: Final = 200_000
MAX_PAST: Final = 200_000
"""Ended sessions that are remembered: those before them are not told from ones that never were."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """On disk: a session is past."""

    id: str
    why: Ending
    at: float


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """On disk: a budget of a session is spent."""

    id: str
    reason: TruncatedReason


Line: TypeAlias = Opened | Ended | Stopped
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Line).decode


class _Whose(msgspec.Struct, frozen=True, gc=False):
    """Of a turn, only whose it is and which."""

    attempt: str
    index: int


_whose = msgspec.msgpack.Decoder(_Whose).decode


class ConflictError(RookeryError):
    """There is a session of that id already."""

    cause = "upstream.rejected"


class Registry:
    """The sessions that one shard owns."""

    def __init__(
        self,
        folder: Path,
        writer: str,
        roles: Mapping[str, Role],
        mine: Callable[[str], bool],
        *,
        held: bool = False,
        stood: Callable[[], float] = lambda: 0.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.roles = roles
        self._held = held
        self._stood = stood
        self.seats: dict[str, Seat] = {}
        self.past: dict[str, bytes] = {}
        """Ended and deleted: the digests of their secrets."""
        self._mine = mine
        for part in ("sessions", "tokens"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._tokens = folder / "tokens"
        self._lines = TokenWriter(folder / "sessions", writer)
        self._turns = TokenWriter(folder / "tokens", writer, max_bytes=max_bytes)
        self._kept: Counter[str] = Counter()
        """Turns of sessions that are not deleted, by the files that this process wrote."""
        self._restore(folder)

    # ---- what was there before

    def _restore(self, folder: Path) -> None:
        with TokenReader(folder / "sessions") as lines:
            found = [_decode(payload) for file in _in_order(lines.files()) for _, payload in lines.scan(file)]
        opened = [line for line in found if isinstance(line, Opened) and self._mine(line.registration.id)]
        stood = self._stood()
        for line in sorted(opened, key=lambda one: one.at):
            self._sit(line, stood)
        for line in found:
            if isinstance(line, Ended) and (seat := self.seats.get(line.id)) is not None:
                seat.ended = line.why
                if line.why == "deleted":
                    self._forget(seat)
            elif isinstance(line, Stopped) and (seat := self.seats.get(line.id)) is not None:
                seat.truncated = line.reason
        turns: dict[str, dict[int, Extent]] = {session: {} for session in self.seats}
        with TokenReader(self._tokens) as reader:
            for file in _in_order(reader.files()):
                for extent, payload in reader.scan(file):
                    whose = _whose(payload)
                    if whose.attempt in turns:
                        # Of two the later: the earlier could not be written when it was recorded, and was refused.
                        # With another number of shards, a session's turns are in files of several.
                        turns[whose.attempt][whose.index] = extent
        for session, extents in turns.items():
            self.seats[session].extents = [extents[index] for index in sorted(extents)]

    def _sit(self, opened: Opened, stood: float) -> Seat:
        budget = opened.registration.budgets.deadline
        now = time.monotonic()
        gone = max(0.0, time.time() - opened.at - max(0.0, stood - opened.stood))
        seat = Seat(opened, StageClock(now - gone, budget if budget is not None else float("inf")))
        if self._held:
            seat.hold()
        self.seats[seat.id] = seat
        return seat

    def hold(self) -> None:
        """A pause: the clock of every session stops, also of those to come."""
        if not self._held:
            self._held = True
            for seat in self.seats.values():
                seat.hold()

    def release(self) -> None:
        if self._held:
            self._held = False
            for seat in self.seats.values():
                seat.release()

    # ---- sessions

    def open(self, registration: Registration) -> tuple[Seat, str]:
        """A new session and its secret, which nobody can be told again."""
        if not registration.id:
            registration = msgspec.structs.replace(registration, id=secrets.token_hex(12))
        if registration.id in self.seats or registration.id in self.past:
            raise ConflictError(f"there is a session {registration.id!r} already; an attempt has an id of its own")
        if len(self.seats) >= MAX_SESSIONS:
            raise UsageError(f"{MAX_SESSIONS} sessions are open here: delete those that are over")
        check(registration, self.roles)
        secret = f"rk-{secrets.token_urlsafe(24)}"
        stood = self._stood()
        opened = Opened(registration, sha256(secret.encode()).digest(), time.time(), stood)
        try:
            self._note(opened)
        except OverflowError:
            raise UsageError("a number in the registration is larger than 64 bits hold") from None
        return self._sit(opened, stood), secret

    def session(self, seat: Seat) -> Session:
        """The session of a seat, with what was recorded before."""
        seat.used = time.monotonic()
        if seat.session is None:
            turns = self.turns(seat)
            recorder = Recorder.restore(seat.id, turns, self._sink(seat))
            made = Session(
                seat.id,
                {name: _wished(role, seat.registration) for name, role in self.roles.items()},
                seat.registration.budgets.limits(),
                recorder,
                seat,
                seat.registration.seed,
            )
            for turn in turns:
                made.count(turn)
                made.draw_seed()  # the next one is not the first one's again
                seat.answered(turn)
            made.truncated = seat.truncated
            seat.session = made
            seat.news_of(made)  # what was counted before is no news
        return seat.session

    def rest(self, seconds: float) -> None:
        """Sessions that were not used for so long, and those that are over, let go of their memory."""
        before = time.monotonic() - seconds
        for seat in self.seats.values():
            session = seat.session
            idle = session is not None and not session.under_way and not seat.asking
            if idle and (seat.ended is not None or seat.used < before):
                seat.rest()

    def turns(self, seat: Seat) -> list[Turn]:
        """What was recorded, read back from the disk."""
        return self.read(seat.extents)

    def read(self, extents: Iterable[Extent]) -> list[Turn]:
        """Turns from the disk, with files of its own: also from a thread."""
        with TokenReader(self._tokens) as reader:
            return [decode_turn(reader.read(extent)) for extent in extents]

    def prompt(self, seat: Seat, turn: Turn) -> bytes:
        """All ids that went into a turn; it stores only those that its parent does not have."""
        parts = [turn.prompt]
        if turn.prefix:
            turns = {one.index: one for one in self.turns(seat)}
            while turn.prefix and turn.parent is not None:
                parent = turns[turn.parent]
                # Of a partial turn, the next one may extend less than was sampled.
                extended = turn.prefix - parent.prefix - len(parent.prompt) // 4
                parts += (parent.sampled[: 4 * extended], parent.prompt)
                turn = parent
        return b"".join(reversed(parts))

    def turn(self, seat: Seat, index: int) -> Turn:
        """One turn of a session, by its number."""
        (turn,) = self.read([seat.extents[index]])
        return turn

    def history(self, seat: Seat, index: int) -> list[Message]:
        """All messages up to and with a turn's answer."""
        path: list[Turn] = []
        at: int | None = index
        with TokenReader(self._tokens) as reader:
            while at is not None:
                path.append(decode_turn(reader.read(seat.extents[at])))
                at = path[-1].parent
        path.reverse()
        return [
            message
            for turn, following in zip(path, (*path[1:], None), strict=True)
            for message in (*turn.messages, get_continued_response(turn, following))
        ]

    def stopped(self, seat: Seat, reason: TruncatedReason) -> None:
        """A budget is spent: known also after a restart."""
        if seat.truncated is None:
            seat.truncated = reason
            self._note(Stopped(seat.id, reason))

    def end(self, seat: Seat, why: Ending) -> None:
        """The session takes no more calls; those under way are cancelled. Ending twice is fine."""
        if seat.session is not None:
            seat.session.close()
        if seat.ended is None or (why == "deleted" and seat.ended != "deleted"):
            seat.ended = why
            self._note(Ended(seat.id, why, time.time()))
        if why == "deleted":
            self._forget(seat)

    def _forget(self, seat: Seat) -> None:
        self.seats.pop(seat.id, None)
        self.past[seat.id] = seat.digest
        for extent in seat.extents:
            self._kept[extent.file] -= 1
            if self._kept[extent.file] == 0 and extent.file != self._turns.name:
                (self._tokens / extent.file).unlink(missing_ok=True)
        while len(self.past) > MAX_PAST:
            del self.past[next(iter(self.past))]

    def opens(self, digest: bytes, secret: str) -> bool:
        return hmac.compare_digest(digest, sha256(secret.encode("utf-8", "replace")).digest())

    # ---- the disk

    def _sink(self, seat: Seat) -> Callable[[Turn], None]:
        def sink(turn: Turn) -> None:
            if seat.ended is not None:
                raise RookeryError(f"session {seat.id} is past: nothing is recorded any more")
            extent = _written(self._turns, encode_turn(turn))
            self._kept[extent.file] += 1
            seat.extents.append(extent)
            seat.answered(turn)

        return sink

    def _note(self, line: Line) -> None:
        _written(self._lines, _encode(line))

    def close(self) -> None:
        for seat in self.seats.values():
            if seat.session is not None:
                seat.session.close()
        try:
            self._lines.close()
        finally:
            self._turns.close()


def _written(writer: TokenWriter, payload: bytes) -> Extent:
    """Where it lies on the disk. What could not be written before goes first: a disk may be full for a while."""
    if writer.pending:
        writer.flush()
    extent = writer.append(payload)
    writer.flush()
    return extent


def _in_order(files: Iterable[str]) -> list[str]:
    """As they were written: the tenth file of a writer comes after its second."""
    return sorted(files, key=lambda name: (name.rpartition("-")[0], len(name), name))


def owner(session: str, shards: int) -> int:
    """The shard that a session belongs to, the same in every process."""
    return crc32(session.encode("utf-8", "replace")) % shards


def _wished(role: Role, registration: Registration) -> Role:
    model = registration.roles.get(role.name, RoleWish()).model
    if role.name == "policy":
        model = model or registration.model
    return msgspec.structs.replace(role, model=model) if model else role
