"""From what the stub says of a cell's end to what the caller is told.

Promises:
- what does not have the form of an ending is `Garbage`;
- want of memory or of processes is called so when the sandbox counted it, whatever the cell made of it.
"""

import math

import msgspec

from rookery.core import ExecUsage
from rookery.workers.cells import Cell, CellStatus, Recovered, notice_of, signal_name
from rookery.workers.inside import frames as f
from rookery.workers.limits import MB, WorkerLimits

_STATUS: dict[int, CellStatus] = {
    f.OK: "ok",
    f.RUNTIME: "runtime",
    f.SYNTAX: "syntax",
    f.CRASH: "crash",
    f.TIME: "time_limit",
    f.MEMORY: "memory_limit",
    f.OUTPUT_FULL: "output_limit",
    f.PROCESSES: "process_limit",
    f.DISK: "disk_limit",
    f.CANCELLED: "crash",
}
_RECOVERED: dict[int, Recovered] = {f.NONE: "none", f.KEPT: "kept", f.RESET: "reset"}
_EXITS = {
    91: "the cell closed the descriptors over which the worker answers",
    92: "the cell broke the worker's own code",
}


MOST_ERROR, MOST_NAME, MOST_FILES = 20_000, 4_096, 100
"""The stub keeps to less; a cell that speaks in its place may not."""


class Ended(msgspec.Struct, frozen=True):
    """As the stub says it."""

    number: int
    ending: int
    recovery: int
    usage: ExecUsage
    outside: float
    code: int
    others: int
    texts: tuple[str, ...]
    figures: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def read(cls, payload: bytes) -> "Ended":
        if len(payload) < f.DONE_HEAD.size:
            raise f.Garbage("a short ending")
        number, ending, recovery, wall, cpu, outside, peak, code, others = f.DONE_HEAD.unpack_from(payload)
        texts = [text.decode("utf-8", "replace") for text in f.unpacked(payload, f.DONE_HEAD.size)]
        if ending not in _STATUS or recovery not in _RECOVERED or len(texts) < 5 or "\0" not in texts[4:]:
            raise f.Garbage("no ending")
        split = texts.index("\0", 4)
        if not all(map(math.isfinite, (wall, cpu, outside))):
            raise f.Garbage("a time that is none")
        usage = ExecUsage(wall, cpu, peak)
        return cls(
            number,
            ending,
            recovery,
            usage,
            outside,
            code,
            others,
            tuple(texts[:4]),
            tuple(name[:MOST_NAME] for name in texts[4:split][:MOST_FILES]),
            tuple(name[:MOST_NAME] for name in texts[split + 1 :][:MOST_FILES]),
        )


def cell_of(ended: Ended, bounds: WorkerLimits, *, oom: bool = False, refused: bool = False) -> Cell:
    """`oom`, `refused`: the sandbox ended, or refused, a process meanwhile."""
    value, error, words, why = ended.texts
    killed, _, rest = words.partition("\n")
    what, _, lost = rest.partition("\n")
    status = _STATUS[ended.ending]
    if oom:
        status = "memory_limit"
    elif refused and status in ("runtime", "crash"):
        status = "process_limit"
    elif status == "crash" and ended.code == -25:
        status = "disk_limit"
    recovered = _RECOVERED[ended.recovery]
    detail = _detail(ended, status, what, bounds, oom=oom, refused=refused)
    notice = notice_of(
        detail[:1].upper() + detail[1:] + "." if detail else "",
        recovered,
        why=why[:200],
        ended=_number(killed),
        lost=_number(lost),
        others=ended.others if recovered != "none" else 0,
    )
    return Cell(
        number=ended.number,
        status=status,
        value=value[: 2 * bounds.display + 1_000],
        error=error[:MOST_ERROR],
        detail=detail,
        figures=ended.figures,
        files=ended.files,
        usage=ended.usage,
        function_seconds=ended.outside,
        recovered=recovered,
        notice=notice,
    )


def _detail(ended: Ended, status: CellStatus, what: str, bounds: WorkerLimits, *, oom: bool, refused: bool) -> str:
    if oom:
        return "the sandbox ran out of memory, and the kernel ended what used most of it"
    if refused and status == "process_limit":
        return "the sandbox has as many processes as it may have, and was refused more"
    if ended.ending == f.CANCELLED:
        return "the cell was cancelled"
    if status == "time_limit" and what == "cpu":
        return f"the cell used its {bounds.cpu_seconds:g} s of processor time"
    if status == "time_limit":
        return f"the cell was stopped after {bounds.wall:g} s"
    if status == "memory_limit":
        least = f" ({(bounds.memory or 0) // MB} MB)" if bounds.memory else ""
        return f"the cell needed more memory than it may have{least}"
    if status == "output_limit":
        return f"the cell wrote without end to {what[:20]}, and was stopped"
    if status == "process_limit":
        return f"the cell had more than {bounds.processes} processes at a time"
    if status == "disk_limit":
        return "no space is left, or a file grew over its limit"
    if status == "crash" and what:
        return f"the cell {what[:200]}"
    if status == "crash" and ended.code < 0:
        return f"the Python was ended by {signal_name(-ended.code)}"
    if status == "crash":
        return _EXITS.get(ended.code, f"the Python ended with exit code {ended.code}")
    return ""


def lost(number: int, detail: str, wall: float) -> Cell:
    """The stub itself is gone; a new one is there."""
    return Cell(
        number=number,
        status="crash",
        detail=detail,
        usage=ExecUsage(wall),
        recovered="reset",
        notice=notice_of(detail[:1].upper() + detail[1:] + ".", "reset"),
    )


def restarted(detail: str) -> str:
    return notice_of(f"Before this cell, {detail}.", "reset")


def died(what: str, why: str, *, kept: bool) -> str:
    """Between cells."""
    begin = f"Before this cell, the Python was lost: {what}."
    if kept:
        return f"{begin} It goes on from its state after the last cell."
    return notice_of(begin, "reset", why=why)


def _number(text: str) -> int:
    return int(text) if text.isdigit() and len(text) < 9 else 0
