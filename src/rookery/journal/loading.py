"""Load the turns (model calls) and segments (token sequences for training) of one rollout.

A rollout that cannot be loaded does not affect other rollouts. `load_segments` does not raise for it: it returns a
record of the same shape whose outcome is `Failed`, with the traceback. Unreadable token data is an infrastructure
failure with the cause `engine.tokens`. An exception while turns are merged into segments is a bug in Rookery, with
the cause `bug.merge`.
"""

import msgspec

from rookery.core import Rollout, RookeryError, Segment, Turn, mark_failed
from rookery.core.errors import describe
from rookery.journal.tokens import TokenReader, decode_turn
from rookery.trajectories import build_segments

UNREADABLE_TOKENS = "engine.tokens"
MERGE = "bug.merge"


class LoadError(RookeryError):
    """The turns or segments of one rollout could not be loaded.

    `code` is `engine.tokens` if token data could not be read, and `bug.merge` if turns could not be merged.
    """

    cause = UNREADABLE_TOKENS


def load_turns(record: Rollout, reader: TokenReader) -> list[Turn]:
    """Read the turns (model calls) of the rollout's last attempt; raise `LoadError` if they are unreadable."""
    try:
        return [decode_turn(reader.read(extent)) for extent in record.tokens]
    except Exception as error:
        raise LoadError(f"the tokens of rollout {record.id} cannot be read: {describe(error)}") from error


def merge_turns(record: Rollout, turns: list[Turn]) -> list[Segment]:
    """Merge a rollout's turns into segments, the token sequences for training; raise `LoadError` if that fails."""
    try:
        return build_segments(turns)
    except Exception as error:
        text = f"the turns of rollout {record.id} cannot be merged into segments: {describe(error)}"
        raise LoadError(text, cause=MERGE) from error


def load_segments(record: Rollout, reader: TokenReader) -> Rollout:
    """Return the rollout's record with its segments, which are built from the token files.

    If they cannot be built, the returned record has the outcome `Failed`. A record that already has segments, or
    that is not valid (it has no reward), is returned unchanged.
    """
    if not record.valid or record.segments:
        return record
    try:
        return msgspec.structs.replace(record, segments=merge_turns(record, load_turns(record, reader)))
    except Exception as error:  # noqa: BLE001  (the exception ends this rollout alone; its record keeps it)
        return mark_failed(record, error, cause=MERGE)
