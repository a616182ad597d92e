"""How a cell ended, in a form for records and in words for a model.

Promises:
- every ending has one word: `ok`, `runtime`, `syntax`, `crash`, and the sandbox's own for its limits;
- `recovered` says whether the Python went on as it was, went back to the state before the cell, or is empty;
- `notice` says in words what was ended, what was kept and what was undone; empty when there is nothing to say.
"""

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
    """One cell that was run. All texts are bounded; what was dropped of the streams is counted in bytes."""

    number: int
    status: CellStatus
    value: str = ""
    """Of the last expression, as `repr` shows it, bounded; empty when there is none, or it is None."""
    stdout: str = ""
    stderr: str = ""
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    error: str = ""
    """The traceback, with the user's frames alone."""
    detail: str = ""
    """Why it ended as it did, where `status` alone does not say."""
    figures: tuple[str, ...] = ()
    """Files below the working folder that open figures were saved to."""
    files: tuple[str, ...] = ()
    """Files below the working folder that changed meanwhile, where asked for; at most a hundred."""
    usage: ExecUsage = ExecUsage()
    function_seconds: float = 0.0
    """Spent in host functions; no part of `usage.wall`."""
    recovered: Recovered = "none"
    notice: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def notice_of(
    detail: str, recovered: Recovered, *, why: str = "", ended: int = 0, lost: int = 0, others: int = 0
) -> str:
    """`ended`: the cell's processes; `lost`: pipes and sockets; `others`: earlier cells' processes that go on."""
    if recovered == "none":
        return detail
    said = [detail]
    if ended:
        who = _count(ended, "process", "processes")
        said.append(f"{who} that the cell had started {_were(ended)} ended with it.")
    if recovered == "kept":
        said.append(
            "Python is back in the state before this cell: variables, functions and imports of earlier cells are "
            "there; nothing that this cell defined or changed is."
        )
        if lost:
            what = _count(lost, "pipe or socket", "pipes and sockets")
            said.append(f"{what} that earlier cells had opened {_were(lost)} closed.")
    else:
        said.append(
            "The state was reset: all variables, functions and imports are gone"
            + (f", because no savepoint was there ({why})." if why else ".")
        )
    said.append("Files that were written stay.")
    if others:
        who = _count(others, "process", "processes")
        said.append(f"{who} of earlier cells {'goes' if others == 1 else 'go'} on.")
    return " ".join(filter(None, said))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"
