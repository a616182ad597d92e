"""The crash-safe record of a run: one folder, one SQLite file, append-only token files.

Promises:
- `kill -9` loses at most what was not yet reported committed; nothing is doubled, nothing is half written;
- token data never passes SQLite: whoever produced it writes it, the record's transaction points to it;
- one writer at a time; any number of readers, also while the run is live;
- what goes wrong with the disk, the format or the lock is said in one sentence.
"""

from rookery.journal.batch import Totals
from rookery.journal.folder import RunLock, create_run, find_run, is_locked, open_lock, run_names, slug
from rookery.journal.loading import LoadError, load_segments, load_turns, merge_turns
from rookery.journal.reader import (
    FailedRollout,
    Missing,
    RunReader,
    RunStatus,
    RunSummary,
    Superseded,
    Unfinished,
    list_runs,
)
from rookery.journal.schema import Event, GroupRow, GroupStatus, TaskRow
from rookery.journal.store import Journal, UnencodableError
from rookery.journal.tokens import TokenReader, TokenWriter, decode_turn, encode_turn

__all__ = [
    "Event",
    "FailedRollout",
    "GroupRow",
    "GroupStatus",
    "Journal",
    "LoadError",
    "Missing",
    "RunLock",
    "RunReader",
    "RunStatus",
    "RunSummary",
    "Superseded",
    "TaskRow",
    "TokenReader",
    "TokenWriter",
    "Totals",
    "UnencodableError",
    "Unfinished",
    "create_run",
    "decode_turn",
    "encode_turn",
    "find_run",
    "is_locked",
    "list_runs",
    "load_segments",
    "load_turns",
    "merge_turns",
    "open_lock",
    "run_names",
    "slug",
]
