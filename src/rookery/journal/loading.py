"""Load the turns and segments of one rollout without letting its failure reach another rollout.

`load_segments` never raises for a rollout that cannot be loaded: it returns a record of the same shape whose
outcome is `Failed`, with the traceback. Unreadable token data is infra (`engine.tokens`), an exception while
merging turns into segments is a bug of Rookery (`bug.merge`).
"""

import msgspec

from rookery.core import Rollout, RookeryError, Segment, Turn, mark_failed
from rookery.core.errors import describe
from rookery.journal.tokens import TokenReader, decode_turn
from rookery.trajectories import build_segments

UNREADABLE_TOKENS = "engine.tokens"
MERGE = "bug.merge"


class LoadError(RookeryError):
    """The turns or segments of one rollout could not be loaded; `code` says whether reading or merging failed."""

    cause = UNREADABLE_TOKENS


def load_turns(record: Rollout, reader: TokenReader) -> list[Turn]:
    """Read the turns of the rollout's last attempt; raise `LoadError` if the token data is unreadable."""
    try:
        return [decode_turn(reader.read(extent)) for extent in record.tokens]
    except Exception as error:
        raise LoadError(f"the tokens of rollout {record.id} cannot be read: {describe(error)}") from error


def merge_turns(record: Rollout, turns: list[Turn]) -> list[Segment]:
    """Merge turns into segments; raise `LoadError` if that fails."""
    try:
        return build_segments(turns)
    except Exception as error:
        text = f"the turns of rollout {record.id} cannot be merged into segments: {describe(error)}"
        raise LoadError(text, cause=MERGE) from error


def load_segments(record: Rollout, reader: TokenReader) -> Rollout:
    """Return the record with its segments, or as `Failed`. A record that is not valid has no segments."""
    if not record.valid or record.segments:
        return record
    try:
        return msgspec.structs.replace(record, segments=merge_turns(record, load_turns(record, reader)))
    except Exception as error:  # noqa: BLE001  (the exception ends this rollout alone; its record keeps it)
        return mark_failed(record, error, cause=MERGE)
