"""The result of a cell, for records and for the model. Runs in our process."""

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
    """Result of a cell. All texts have limited length; `*_dropped` counts the missing bytes of a stream."""

    number: int
    status: CellStatus
    value: str = ""
    """Representation of the last expression's value; empty if there is none or it is None."""
    stdout: str = ""
    stderr: str = ""
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    error: str = ""
    """Traceback with the user's frames only."""
    detail: str = ""
    """Cause of the outcome, if `status` alone does not say it."""
    figures: tuple[str, ...] = ()
    """Files in the working directory to which open matplotlib figures were saved."""
    files: tuple[str, ...] = ()
    """Files below the working directory that changed, if requested; at most a hundred."""
    usage: ExecUsage = ExecUsage()
    function_seconds: float = 0.0
    """Time spent in host functions; not part of `usage.wall`."""
    recovered: Recovered = "none"
    """`none`: the interpreter continues; `kept`: it is back in the state before the cell; `reset`: it is empty."""
    notice: str = ""
    """For the model: what was killed, restored and lost; empty if there is nothing to report."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def signal_name(number: int) -> str:
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
    """Return the text that tells the model how a cell ended.

    `killed` counts the cell's processes, `lost_descriptors` the closed pipes and sockets of earlier cells,
    `survivors` the processes of earlier cells that continue.
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
