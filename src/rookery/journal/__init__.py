"""Store the records of a run so that they survive crashes.

A run is a directory with one SQLite database (`journal.sqlite`) and token files: append-only files that hold the
prompt and sampled tokens of every model call. The supervisor process writes the database. Each process that calls
the model writes its own token files, and the records in the database refer to them by file name and offset. After
a `kill -9`, everything that was reported as committed is still in the journal. One process at a time may write to
a run; any number of processes may read it, also while it is being written.
"""

from rookery.journal.batch import EnvironmentTotals, Totals
from rookery.journal.folder import (
    RunLock,
    create_run,
    find_journal,
    find_run,
    is_locked,
    open_lock,
    run_names,
    slug,
    training_journals,
    training_names,
)
from rookery.journal.loading import UNREADABLE_TOKENS, LoadError, load_segments, load_turns, merge_turns
from rookery.journal.reader import (
    FailedRollout,
    MissingRollouts,
    RunReader,
    RunStatus,
    RunSummary,
    Superseded,
    Unfinished,
    list_runs,
    list_training_runs,
    sort_newest_first,
)
from rookery.journal.schema import Event, GroupRow, GroupStatus, TaskRow
from rookery.journal.store import Journal, UnencodableError
from rookery.journal.tokens import TokenReader, TokenWriter, decode_turn, encode_turn

__all__ = [
    "UNREADABLE_TOKENS",
    "EnvironmentTotals",
    "Event",
    "FailedRollout",
    "GroupRow",
    "GroupStatus",
    "Journal",
    "LoadError",
    "MissingRollouts",
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
    "find_journal",
    "find_run",
    "is_locked",
    "list_runs",
    "list_training_runs",
    "load_segments",
    "load_turns",
    "merge_turns",
    "open_lock",
    "run_names",
    "slug",
    "sort_newest_first",
    "training_journals",
    "training_names",
]
