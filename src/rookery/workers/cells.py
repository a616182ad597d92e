"""The result of a cell, and the text that tells the model about it. Runs outside of the sandbox."""

import signal
from typing import Literal, TypeAlias

import msgspec

from rookery.core import ExecUsage

CellStatus: TypeAlias = Literal[
    "ok",
    "runtime",
    "syntax",
    "crash",
    "time_limit",
    "memory_limit",
    "output_limit",
    "process_limit",
    "disk_limit",
]
Recovered: TypeAlias = Literal["none", "kept", "reset"]


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a cell that a `Worker` ran. The length of every text is limited.

    `stdout_dropped` and `stderr_dropped` are the numbers of bytes cut out of the middle of each stream.
    """

    number: int
    status: CellStatus
    value: str = ""
    """`repr` of the value of the cell's last expression; empty if the cell ends with a statement or it is None."""
    stdout: str = ""
    stderr: str = ""
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    error: str = ""
    """Traceback of an uncaught exception, with the frames of the cell's code only; empty if nothing was raised."""
    detail: str = ""
    """The reason why the cell was stopped or crashed; empty if `status` is enough."""
    figures: tuple[str, ...] = ()
    """Names of the files in the working directory to which open matplotlib figures were saved."""
    files: tuple[str, ...] = ()
    """Paths of up to 100 files below the working directory that the cell changed; only with `run(files=True)`."""
    usage: ExecUsage = ExecUsage()
    function_seconds: float = 0.0
    """Seconds spent in host functions (functions outside of the sandbox); not part of `usage.wall`."""
    recovered: Recovered = "none"
    """`none`: no recovery was needed; `kept`: the state before the cell was restored; `reset`: it was lost."""
    notice: str = ""
    """Text for the model that says what was killed, restored and lost; empty if there is nothing to report."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`, or `signal N` for an unknown number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def build_notice(
    detail: str,
    recovered: Recovered,
    *,
    no_savepoint_reason: str = "",
    killed: int = 0,
    lost_descriptors: int = 0,
    survivors: int = 0,
) -> str:
    """Return the text that tells the model how a cell ended. It starts with the sentence `detail`.

    `killed` is the number of processes that were killed with the cell, `lost_descriptors` that of pipes and
    sockets opened by earlier cells and closed by the recovery, `survivors` that of processes of earlier cells that
    still run. `no_savepoint_reason` says why the state could not be restored.
    """
    if recovered == "none":
        return detail
    sentences = [detail]
    if killed:
        processes = _count(killed, "process", "processes")
        sentences.append(f"{processes} that the cell had started {_were(killed)} killed with it.")
    if recovered == "kept":
        sentences.append(
            "Python is back in the state before this cell: variables, functions and imports of earlier cells are "
            "there; nothing that this cell defined or changed is."
        )
        if lost_descriptors:
            descriptors = _count(lost_descriptors, "pipe or socket", "pipes and sockets")
            sentences.append(f"{descriptors} that earlier cells had opened {_were(lost_descriptors)} closed.")
    else:
        sentences.append(
            "The state was reset: all variables, functions and imports are gone"
            + (f", because there was no savepoint ({no_savepoint_reason})." if no_savepoint_reason else ".")
        )
    sentences.append("Files that were written stay.")
    if survivors:
        processes = _count(survivors, "process", "processes")
        sentences.append(f"{processes} of earlier cells {'continues' if survivors == 1 else 'continue'}.")
    return " ".join(filter(None, sentences))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"
