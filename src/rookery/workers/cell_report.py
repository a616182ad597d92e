"""Convert the monitor's report of a cell into the `Cell` that the caller of `Worker.run` gets.

The monitor is the process in the sandbox that supervises the worker's interpreter. This module runs in the
caller's process, outside of the sandbox. A malformed report raises `MalformedFrame`. If the kernel killed a
process of the sandbox for lack of memory while the cell ran, the status is `memory_limit`, whatever the cell
reported. If the kernel refused a fork, a status of `runtime` or `crash` becomes `process_limit`.
"""

import math
import signal

import msgspec

from rookery.core import ExecUsage
from rookery.sandbox_runtime.worker import protocol as p
from rookery.workers.cells import Cell, CellStatus, Recovered, build_notice, signal_name
from rookery.workers.limits import MB, WorkerLimits

_STATUS: dict[int, CellStatus] = {
    p.OK: "ok",
    p.RUNTIME: "runtime",
    p.SYNTAX: "syntax",
    p.CRASH: "crash",
    p.TIME: "time_limit",
    p.MEMORY: "memory_limit",
    p.OUTPUT_LIMIT: "output_limit",
    p.PROCESSES: "process_limit",
    p.DISK: "disk_limit",
    p.CANCELLED: "crash",
}
_RECOVERED: dict[int, Recovered] = {p.NOT_NEEDED: "none", p.RESTORED: "kept", p.RESET: "reset"}
_EXIT_CODES = {
    91: "the cell closed the file descriptors of the worker",
    92: "the cell broke the code of the worker",
}


MAX_ERROR, MAX_NAME, MAX_FILES = 20_000, 4_096, 100
"""Maximum lengths of an error and a file name, and maximum number of files in a report.

The monitor respects these limits. They are enforced again because a cell could forge the monitor's messages.
"""


class CellReport(msgspec.Struct, frozen=True):
    """The monitor's report of a finished cell, decoded but not yet interpreted."""

    number: int
    outcome: int
    recovery: int
    usage: ExecUsage
    call_seconds: float
    """Seconds spent in host functions."""
    exit_code: int
    """Exit code of the interpreter if it ended; a negative number is the signal that killed it."""
    survivors: int
    """Number of processes of earlier cells that still run after a recovery."""
    texts: tuple[str, ...]
    """Value, error, details of the end, and the reason why there was no savepoint."""
    figures: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def decode(cls, payload: bytes) -> "CellReport":
        """Decode the payload of a `DONE` frame; raise `MalformedFrame` if it is invalid."""
        if len(payload) < p.DONE_HEAD.size:
            raise p.MalformedFrame("a report that is too short")
        head = p.DONE_HEAD.unpack_from(payload)
        number, outcome, recovery, wall, cpu, call_seconds, peak, exit_code, survivors = head
        texts = [text.decode("utf-8", "replace") for text in p.unpack_texts(payload, p.DONE_HEAD.size)]
        if outcome not in _STATUS or recovery not in _RECOVERED or len(texts) < 5 or "\0" not in texts[4:]:
            raise p.MalformedFrame("an unknown outcome")
        split = texts.index("\0", 4)
        if not all(map(math.isfinite, (wall, cpu, call_seconds))):
            raise p.MalformedFrame("a time that is not finite")
        usage = ExecUsage(wall, cpu, peak)
        return cls(
            number,
            outcome,
            recovery,
            usage,
            call_seconds,
            exit_code,
            survivors,
            tuple(texts[:4]),
            tuple(name[:MAX_NAME] for name in texts[4:split][:MAX_FILES]),
            tuple(name[:MAX_NAME] for name in texts[split + 1 :][:MAX_FILES]),
        )


def build_cell(report: CellReport, limits: WorkerLimits, *, oom: bool = False, refused: bool = False) -> Cell:
    """Return the result of a cell from the monitor's report.

    `oom`: while the cell ran, the kernel killed a process of the sandbox for lack of memory. `refused`: the kernel
    refused to create a process because the sandbox had reached its process limit.
    """
    value, error, details, no_savepoint_reason = report.texts
    killed, _, rest = details.partition("\n")
    cause, _, lost_descriptors = rest.partition("\n")
    status = _STATUS[report.outcome]
    if oom:
        status = "memory_limit"
    elif refused and status in ("runtime", "crash"):
        status = "process_limit"
    elif status == "crash" and report.exit_code == -signal.SIGXFSZ:
        status = "disk_limit"
    recovered = _RECOVERED[report.recovery]
    detail = _describe(report, status, cause, limits, oom=oom, refused=refused)
    notice = build_notice(
        detail[:1].upper() + detail[1:] + "." if detail else "",
        recovered,
        no_savepoint_reason=no_savepoint_reason[:200],
        killed=_parse_count(killed),
        lost_descriptors=_parse_count(lost_descriptors),
        survivors=report.survivors if recovered != "none" else 0,
    )
    return Cell(
        number=report.number,
        status=status,
        value=value[: 2 * limits.display + 1_000],
        error=error[:MAX_ERROR],
        detail=detail,
        figures=report.figures,
        files=report.files,
        usage=report.usage,
        function_seconds=report.call_seconds,
        recovered=recovered,
        notice=notice,
    )


def _describe(
    report: CellReport, status: CellStatus, cause: str, limits: WorkerLimits, *, oom: bool, refused: bool
) -> str:
    if oom:
        return "the sandbox ran out of memory, and the kernel killed the largest process"
    if refused and status == "process_limit":
        return "the sandbox reached its process limit, and the kernel refused to start more"
    if report.outcome == p.CANCELLED:
        return "the cell was cancelled"
    if status == "time_limit" and cause == "cpu":
        return f"the cell used its {limits.cpu_seconds:g} s of CPU time"
    if status == "time_limit":
        return f"the cell was stopped after {limits.wall:g} s"
    if status == "memory_limit":
        limit = f" ({(limits.memory or 0) // MB} MB)" if limits.memory else ""
        return f"the cell exceeded its memory limit{limit}"
    if status == "output_limit":
        return f"the cell wrote too much to {cause[:20]} and was stopped"
    if status == "process_limit":
        return f"the cell had more than {limits.processes} processes at a time"
    if status == "disk_limit":
        return "the disk is full, or a file exceeded its size limit"
    if status == "crash" and cause:
        return f"the cell {cause[:200]}"
    if status == "crash" and report.exit_code < 0:
        return f"the interpreter was killed by {signal_name(-report.exit_code)}"
    if status == "crash":
        return _EXIT_CODES.get(report.exit_code, f"the interpreter exited with code {report.exit_code}")
    return ""


def build_lost_cell(number: int, detail: str, wall: float) -> Cell:
    """Return the result of a cell during which the monitor ended. The caller has started an empty worker since."""
    return Cell(
        number=number,
        status="crash",
        detail=detail,
        usage=ExecUsage(wall),
        recovered="reset",
        notice=build_notice(detail[:1].upper() + detail[1:] + ".", "reset"),
    )


def build_restart_notice(detail: str) -> str:
    """Return the model's notice for a worker that ended between two cells and was restarted without its state."""
    return build_notice(f"Before this cell, {detail}.", "reset")


def build_death_notice(cause: str, no_savepoint_reason: str, *, restored: bool) -> str:
    """Return the model's notice for an interpreter that ended between two cells.

    `restored` says whether its savepoint took over; otherwise an empty interpreter was started.
    """
    start = f"Before this cell, the interpreter was lost: {cause}."
    if restored:
        return f"{start} It continues from its state after the last cell."
    return build_notice(start, "reset", no_savepoint_reason=no_savepoint_reason)


def _parse_count(text: str) -> int:
    return int(text) if text.isdigit() and len(text) < 9 else 0
