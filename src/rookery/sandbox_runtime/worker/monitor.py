"""The monitor of a worker: parent process of the interpreter and its savepoint. It never runs the user's code.

Guarantees:
- a cell is killed when it is cancelled or exceeds a limit of time, CPU time, output, memory or processes;
- the end of the interpreter is noticed at once. The savepoint (a frozen fork of the interpreter) then continues
  from the state before the cell; without a savepoint, the monitor forks an interpreter with an empty state;
- messages of the interpreter are checked. A message with a wrong token or length, or at the wrong time, counts as
  a crash of the cell;
- when the host closes the connection, the monitor kills everything that it started, and exits.

The monitor never blocks on sending to the host.
"""

from __future__ import annotations

import _socket
import os
import resource
import select
import struct
import sys
import time

from rookery.sandbox_runtime.worker import linux
from rookery.sandbox_runtime.worker import protocol as p
from rookery.sandbox_runtime.worker.interpreter import Interpreter
from rookery.sandbox_runtime.worker.processes import (
    FIRST_CHECK_SECONDS,
    KILL_SECONDS,
    MAX_CELLS,
    Child,
    RunningCell,
    WorkerProcesses,
    kill,
)
from rookery.sandbox_runtime.worker.savepoints import MEMORY_SLACK, Savepoints

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from typing import NoReturn
else:
    import _signal

SAVE_SECONDS = 10.0
RESUME_SECONDS = 5.0
EXIT_SECONDS = 0.03
"""Seconds to wait for the end of an interpreter whose connection is closed: an exiting process closes its file
descriptors a moment before it can be reaped."""
MAX_SAVEPOINTS = 3
"""After this many savepoints of the same state were killed, for example by a process of the user, no more are
taken."""
MAX_CHECK_SECONDS = 0.1
MAX_UNSENT = 1 << 20
GATHER_SECONDS = 0.002
"""Output is collected for this many seconds and then forwarded together, mostly with the end of the cell."""
CPUS = os.cpu_count() or 1
MAX_FILES, MAX_SCANNED = 100, 2_000


class Monitor:
    """Passes messages between the host and the interpreter, enforces limits and recovers from crashes."""

    def __init__(self) -> None:
        self.host = p.FrameConnection(0, 1, p.MAX_FRAME)
        self.processes = WorkerProcesses()
        self.pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        for reader, _ in self.pipes:
            os.set_blocking(reader, False)
        self.memory = 0
        """Memory limit of each process in bytes; 0 means no limit."""
        self.functions: list[str] = []
        self.pending: RunningCell | None = None
        """A cell that waits for a savepoint to be taken."""
        self.savepoints = Savepoints(self.processes, self.host, self.start_pending_cell)

    # ---- event loop

    def set_up(self) -> None:
        """Read the host's first message, which describes the worker, and start the interpreter."""
        while True:
            if not self.host.receive():
                os._exit(0)
            frame = next(self.host.frames(), None)
            if frame is not None:
                break
            select.select([0], [], [])
        processes, savepoints = self.processes, self.savepoints
        payload = frame[1]
        processes.tag, memory, savepoints.sandbox_memory, flags, savepoints.last_cell = p.SETUP_HEAD.unpack_from(
            payload
        )
        self.memory = savepoints.memory = memory
        self.functions = [name.decode() for name in p.unpack_texts(payload, p.SETUP_HEAD.size)]
        if flags & p.KILL_LEFTOVERS:
            processes.kill_leftovers()
        is_subreaper = linux.become_subreaper()
        processes.tagged = linux.read_tag(os.getpid()) is None
        linux.set_oom_score(b"0")
        linux.set_dumpable(False)
        linux.set_name(b"worker")
        linux.request_short_time_slices()
        self.fork_interpreter()
        capabilities = [
            b"%d.%d" % sys.version_info[:2],
            b"yes" if is_subreaper else b"",
            b"yes" if linux.can_clone() else b"",
        ]
        self.host.send(p.HELLO, p.pack_texts(capabilities))
        self.savepoints.start()

    def run(self) -> NoReturn:
        processes = self.processes
        while True:
            cell = processes.cell
            poller = select.poll()
            poller.register(0, select.POLLIN)
            poller.register(processes.wakeup_reader, select.POLLIN)
            if processes.interpreter is not None:
                connection = processes.interpreter.connection
                poller.register(connection.read_fd, select.POLLIN | (select.POLLOUT if connection.unsent else 0))
            if processes.new_savepoint is not None:
                poller.register(processes.new_savepoint.connection.read_fd, select.POLLIN)
            if self.host.unsent:
                poller.register(1, select.POLLOUT)
            if cell is not None and not cell.forward_at and self.host.unsent < MAX_UNSENT:
                for reader, _ in self.pipes:
                    poller.register(reader, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(self.poll_timeout())}
            if 0 in ready:
                self.receive_from_host()
            if processes.wakeup_reader in ready:
                processes.drain_wakeups()
                processes.reap()
            if processes.cell is not None and any(reader in ready for reader, _ in self.pipes):
                processes.cell.forward_at = time.monotonic() + GATHER_SECONDS
            if processes.interpreter is not None and processes.interpreter.connection.read_fd in ready:
                self.receive_from_interpreter()
            if processes.new_savepoint is not None and processes.new_savepoint.connection.read_fd in ready:
                self.savepoints.receive()
            self.handle_deaths()
            self.run_timers(time.monotonic())
            self.host.flush()

    def poll_timeout(self) -> float | None:
        """Return the milliseconds until the next deadline; None if there is none."""
        times = []
        cell = self.processes.cell
        if cell is not None:
            times.append(cell.next_check)
            if cell.forward_at:
                times.append(cell.forward_at)
            if not cell.call_began and cell.deadline:
                times.append(cell.deadline)
        if self.savepoints.began:
            times.append(self.savepoints.began + SAVE_SECONDS)
        if self.savepoints.retry_at:
            times.append(self.savepoints.retry_at)
        return max(0.0, (min(times) - time.monotonic()) * 1000 + 0.2) if times else None

    def run_timers(self, now: float) -> None:
        cell = self.processes.cell
        if cell is not None and cell.forward_at and now >= cell.forward_at:
            cell.forward_at = 0.0
            for stream in range(2):
                self.forward_output(stream)
        cell = self.processes.cell
        if cell is not None and not cell.call_began and cell.deadline and now >= cell.deadline:
            self.fail_cell(p.TIME, "wall")
        elif cell is not None and now >= cell.next_check:
            self.check_limits(cell, now)
        if self.savepoints.began and now >= self.savepoints.began + SAVE_SECONDS:
            if self.processes.new_savepoint is not None:
                self.savepoints.drop_new()
            else:
                self.replace_interpreter("it did not respond when a savepoint was taken")
        if self.savepoints.retry_at and now >= self.savepoints.retry_at:
            self.savepoints.try_save()

    def handle_deaths(self) -> None:
        processes = self.processes
        if processes.new_savepoint is not None and processes.new_savepoint.pid in processes.dead:
            self.savepoints.drop_new()
        if processes.savepoint is not None and processes.savepoint.pid in processes.dead:
            self.savepoints.drop("its savepoint was killed")
            self.savepoints.deaths += 1
            if processes.cell is None:
                if self.savepoints.deaths < MAX_SAVEPOINTS:
                    self.savepoints.start()
                else:
                    self.savepoints.decide(False, self.savepoints.missing_reason)
        if processes.interpreter is not None and processes.interpreter.pid in processes.dead:
            if processes.cell is not None:
                self.fail_cell(p.CRASH, "")
            else:
                self.replace_interpreter("it exited")

    # ---- the interpreter

    def fork_interpreter(self) -> None:
        """Fork this monitor process to start an interpreter that has no user state, and use it from now on."""
        ours, theirs = _socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self.become_interpreter(theirs.detach())
            finally:
                os._exit(1)
        theirs.close()
        self.processes.interpreter = Child(pid, ours.detach())

    def become_interpreter(self, connection_fd: int) -> NoReturn:
        """Turn a forked child into the interpreter: give up the monitor's resources and serve cells."""
        _signal.set_wakeup_fd(-1)
        for number in (_signal.SIGCHLD, _signal.SIGTERM, _signal.SIGHUP):
            _signal.signal(number, _signal.SIG_DFL)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        linux.die_with_parent()
        monitor_pid = self.processes.pid
        if os.getppid() != monitor_pid:
            os._exit(1)
        os.setsid()
        linux.set_dumpable(True)
        linux.set_oom_score(b"1000")
        needed = {connection_fd, *(writer for _, writer in self.pipes)}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in needed:
                try:
                    os.close(int(name))
                except OSError:
                    continue
        null = os.open(os.devnull, os.O_RDWR)  # becomes descriptor 0
        os.dup2(null, 1)
        os.dup2(null, 2)
        linux.lower_limit(resource.RLIMIT_CORE, 0)
        if self.memory:
            linux.lower_limit(resource.RLIMIT_DATA, self.memory)
        linux.protect_from_signals(monitor_pid)
        linux.set_name(b"python3")
        Interpreter(connection_fd, self.pipes[0][1], self.pipes[1][1], self.functions).serve()

    def receive_from_host(self) -> None:
        connected = self.host.receive()
        for kind, payload in self.host.frames():
            cell = self.processes.cell
            if kind == p.CELL:
                self.pending = RunningCell(payload)
                if not self.savepoints.began:
                    self.start_cell()
            elif kind == p.RESULT:
                self.forward_result(payload)
            elif kind == p.CANCEL and cell is not None and cell.number == p.SIZE.unpack(payload)[0]:
                self.fail_cell(p.CANCELLED, "")
        if not connected:
            self.processes.kill_all_and_exit()

    def start_pending_cell(self) -> None:
        """Start the cell, if any, that waited for the savepoint of the current state to be taken or given up."""
        if self.pending is not None and self.processes.cell is None:
            self.start_cell()

    def start_cell(self) -> None:
        cell, self.pending, self.savepoints.retry_at = self.pending, None, 0.0
        processes = self.processes
        processes.reaped.clear()
        interpreter = processes.interpreter
        assert cell is not None
        assert interpreter is not None
        processes.cell = cell
        if self.savepoints.undecided_reason:
            self.savepoints.decide(False, self.savepoints.undecided_reason)
        pid = interpreter.pid
        if processes.tagged:
            linux.lower_limit(linux.TAG_LIMIT, processes.tag - cell.number % MAX_CELLS, pid=pid)
        memory = cell.memory or self.memory
        if memory != interpreter.memory and (memory or interpreter.memory > 0):
            interpreter.memory = memory
            try:
                hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
                soft = hard if not memory else memory if hard == resource.RLIM_INFINITY else min(memory, hard)
                resource.prlimit(pid, resource.RLIMIT_DATA, (soft, hard))
            except (OSError, ValueError):
                pass  # it is dead, which is noticed next
        cell.cpu_before = interpreter.children_cpu
        cell.clock = linux.read_cpu_clock(pid)
        cell.start_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        cell.began = time.monotonic()
        cell.started = time.time()
        cell.deadline = cell.began + cell.wall if cell.wall > 0 else 0.0
        cell.next_check = cell.began + FIRST_CHECK_SECONDS
        cell.forward_at = cell.began + GATHER_SECONDS
        head = p.INTERPRETER_CELL_HEAD.pack(cell.number, cell.token, cell.display, cell.flags)
        interpreter.connection.send(p.CELL, head, cell.source)
        cell.source = b""

    def forward_result(self, payload: bytes) -> None:
        """Forward the result of a host function to the interpreter. Its time does not count for the cell."""
        cell, interpreter = self.processes.cell, self.processes.interpreter
        number = p.SIZE.unpack_from(payload)[0]
        if cell is None or not cell.call_began or number != cell.number or interpreter is None:
            return  # of a cell that has ended
        paused = time.monotonic() - cell.call_began
        cell.call_began = 0.0
        cell.call_seconds += paused
        if cell.deadline:
            cell.deadline += paused
        interpreter.connection.send(p.RESULT, payload[4:])

    def forward_output(self, stream: int) -> None:
        """Forward what the cell has written to a stream."""
        cell = self.processes.cell
        if cell is None:
            return
        try:
            data = os.read(self.pipes[stream][0], 1 << 16)
        except BlockingIOError:
            return
        cell.written[stream] += len(data)
        self.host.queue(p.OUTPUT, b"\1" if stream else b"\0", data)
        if cell.written[stream] > cell.max_output:
            self.fail_cell(p.OUTPUT_LIMIT, "stderr" if stream else "stdout")

    def drain_output(self, cell: RunningCell) -> None:
        """Forward the output that is left in the pipes. Output beyond the limit is dropped."""
        for stream, (reader, _) in enumerate(self.pipes):
            left = 2 << 20
            while left > 0:
                try:
                    data = os.read(reader, 1 << 16)
                except BlockingIOError:
                    break
                left -= len(data)
                if cell.written[stream] <= cell.max_output:
                    cell.written[stream] += len(data)
                    self.host.queue(p.OUTPUT, b"\1" if stream else b"\0", data)

    def receive_from_interpreter(self) -> None:
        interpreter = self.processes.interpreter
        assert interpreter is not None
        connected = interpreter.connection.receive()
        try:
            for kind, payload in interpreter.connection.frames():
                if interpreter is not self.processes.interpreter:
                    return
                self.handle_interpreter_frame(kind, payload)
        except (p.MalformedFrame, struct.error, ValueError):
            self.handle_broken_connection("wrote to the worker's private connection")
            return
        if not connected and interpreter is self.processes.interpreter:
            self.handle_broken_connection("closed the worker's private connection, or executed another program")

    def handle_broken_connection(self, cause: str) -> None:
        """Treat a broken connection as a crash, unless the interpreter ends within `EXIT_SECONDS`."""
        processes = self.processes
        assert processes.interpreter is not None
        end = time.monotonic() + EXIT_SECONDS
        while True:
            processes.drain_wakeups()
            processes.reap()
            if processes.interpreter.pid in processes.dead:
                return  # its exit status says more
            left = end - time.monotonic()
            if left <= 0:
                break
            select.select([processes.wakeup_reader], [], [], left)
        if processes.cell is not None:
            self.fail_cell(p.CRASH, cause)
        else:
            self.replace_interpreter("it " + cause)

    def handle_interpreter_frame(self, kind: int, payload: bytes) -> None:
        processes = self.processes
        cell = processes.cell
        if kind == p.COPIED and self.savepoints.began and processes.new_savepoint is None:
            self.savepoints.on_copied(p.SIZE.unpack_from(payload)[0], payload[4:200])
        elif cell is None or payload[:8] != cell.token:
            raise p.MalformedFrame("a frame outside of a cell")
        elif kind == p.CALL and not cell.call_began and cell.calls > 0:
            cell.calls -= 1
            cell.call_began = time.monotonic()
            self.host.send(p.CALL, p.SIZE.pack(cell.number), payload[8:])
        elif kind == p.CALL:
            assert processes.interpreter is not None
            refusal = b"\0HostFunctionError\nthis cell has used up its calls of host functions"
            processes.interpreter.connection.send(p.RESULT, refusal)
        elif kind == p.DONE:
            _, outcome, peak = p.INTERPRETER_DONE_HEAD.unpack_from(payload)
            texts = p.unpack_texts(payload, p.INTERPRETER_DONE_HEAD.size)
            if outcome not in (p.OK, p.RUNTIME, p.SYNTAX, p.MEMORY, p.DISK) or len(texts) < 2:
                raise p.MalformedFrame("an unknown outcome")
            cell.peak = max(cell.peak, peak)
            if outcome == p.MEMORY:
                self.fail_cell(p.MEMORY, "", texts)
            else:
                self.finish_cell(cell, outcome, texts)
        else:
            raise p.MalformedFrame(f"a frame of kind {kind}")

    # ---- the end of a cell

    def finish_cell(self, cell: RunningCell, outcome: int, texts: list[bytes]) -> None:
        """Report the end of a cell after which the interpreter continues, and start to take a savepoint."""
        self.drain_output(cell)
        interpreter = self.processes.interpreter
        assert interpreter is not None
        stat = linux.read_stat(interpreter.pid)
        cpu = linux.read_cpu_clock(interpreter.pid) - cell.clock + cell.orphan_cpu
        if stat is not None:
            cpu += max(0.0, stat.children_cpu - cell.cpu_before)
            interpreter.children_cpu = stat.children_cpu
        self.report_cell(cell, outcome, p.NOT_NEEDED, cpu, 0, [*texts[:2], b"", b"", *texts[2:]])
        self.savepoints.deaths = 0
        self.savepoints.start()

    def report_cell(
        self, cell: RunningCell, outcome: int, recovery: int, cpu: float, code: int, texts: list[bytes]
    ) -> None:
        """Report the end of a cell to the host.

        `texts` are the value, the error, the detail, the reason why there was no savepoint, and the names of
        figures.
        """
        self.processes.cell = None
        self.savepoints.last_cell = cell.number
        wall = time.monotonic() - cell.began - cell.call_seconds
        if cell.call_began:
            wall -= time.monotonic() - cell.call_began
        survivors = sum(1 for _ in self.processes.list_descendants()) if recovery != p.NOT_NEEDED else 0
        files = find_changed_files(cell.started) if cell.flags & p.FILES else []
        head = p.DONE_HEAD.pack(
            cell.number,
            outcome,
            recovery,
            max(0.0, wall),
            max(0.0, cpu),
            cell.call_seconds,
            cell.peak,
            code,
            survivors,
        )
        self.host.send(p.DONE, head, p.pack_texts([*texts, b"\0", *files]))

    def check_limits(self, cell: RunningCell, now: float) -> None:
        """Measure memory, processes and CPU time of a cell, and kill it if it exceeds a limit."""
        cell.check_interval = min(MAX_CHECK_SECONDS, cell.check_interval * 1.5)
        cell.next_check = now + cell.check_interval
        processes = self.processes
        assert processes.interpreter is not None
        stat = linux.read_stat(processes.interpreter.pid)
        if stat is None:
            return
        members = processes.find_members(cell)
        rss = stat.rss + sum(member.rss for _, member in members)
        limit = cell.memory or self.memory
        if limit and rss > limit:
            # Forks share memory: only the proportional set size adds up to what is really used.
            pids = (processes.interpreter.pid, *(pid for pid, _ in members))
            rss = sum(linux.read_proportional_memory(pid) for pid in pids) or rss
        cell.peak = max(cell.peak, rss)
        if limit and rss > limit + MEMORY_SLACK:
            self.fail_cell(p.MEMORY, "tree")
            return
        if cell.processes and len(members) > cell.processes:
            self.fail_cell(p.PROCESSES, "")
            return
        if cell.cpu > 0:
            used = processes.measure_cpu(cell, stat, members)
            if used >= cell.cpu:
                self.fail_cell(p.TIME, "cpu")
                return
            cell.next_check = min(cell.next_check, now + max(0.002, (cell.cpu - used) / CPUS))

    def fail_cell(self, outcome: int, detail: str, texts: list[bytes] | None = None) -> None:
        """Kill the cell, return to the state before it or to an empty state, and report `outcome`."""
        processes = self.processes
        cell = processes.cell
        assert cell is not None
        assert processes.interpreter is not None
        stat = linux.read_stat(processes.interpreter.pid)
        members = processes.find_members(cell)
        killed = processes.kill_cell(cell, members)
        if killed < 0:
            os._exit(4)  # the sandbox has stronger means
        status, cpu_clock, peak = processes.dead.pop(processes.interpreter.pid)
        cpu = max(0.0, cpu_clock - cell.clock) + cell.orphan_cpu
        if stat is not None and stat.state not in "ZX":
            cpu += max(0.0, stat.children_cpu - cell.cpu_before)
        cell.peak = max(cell.peak, peak)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self.drain_output(cell)
        recovery, lost_descriptors = self.recover()
        reason = self.savepoints.missing_reason
        details = [b"%d" % killed, detail.encode(), b"%d" % lost_descriptors]
        value_and_error = (texts or [b"", b""])[:2]
        self.report_cell(
            cell, outcome, recovery, cpu, code, [*value_and_error, b"\n".join(details), reason.encode()]
        )
        self.savepoints.start()

    def replace_interpreter(self, cause: str) -> None:
        """Replace an interpreter that ended, or does not respond, between cells."""
        processes = self.processes
        assert processes.interpreter is not None
        kill(processes.interpreter.pid, _signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        while processes.interpreter.pid not in processes.dead:
            processes.drain_wakeups()
            processes.reap()
            if time.monotonic() > end:
                os._exit(4)
            select.select([processes.wakeup_reader], [], [], 0.002)
        processes.dead.pop(processes.interpreter.pid)
        was_saving, self.savepoints.began = bool(self.savepoints.began), 0.0
        if processes.new_savepoint is not None:
            new_savepoint, processes.new_savepoint = processes.new_savepoint, None
            processes.discard(new_savepoint)
        elif was_saving:
            os.close(self.savepoints.new_fd)
        if was_saving:  # the existing savepoint is of the state before the last cell
            self.savepoints.drop(cause)
        recovery, _ = self.recover()
        reason = self.savepoints.missing_reason
        self.savepoints.undecided_reason = ""
        self.host.send(p.DIED, bytes([recovery]), p.pack_texts([cause.encode(), reason.encode()]))
        if self.pending is not None:
            self.start_cell()
        else:
            self.savepoints.start()

    # ---- savepoints

    def recover(self) -> tuple[int, int]:
        """Continue with the savepoint or, if there is none, with an interpreter that has an empty state.

        Return `RESTORED` or `RESET`, and the number of file descriptors that the savepoint lost.
        """
        processes = self.processes
        assert processes.interpreter is not None
        processes.interpreter.connection.close()
        processes.interpreter = None
        savepoint, processes.savepoint = processes.savepoint, None
        if savepoint is not None:
            processes.interpreter = savepoint
            connection = savepoint.connection
            connection.send(p.RESUME)
            end = time.monotonic() + RESUME_SECONDS
            while savepoint.pid not in processes.dead and time.monotonic() < end:
                try:
                    connected = connection.receive()
                    frame = next(connection.frames(), None)
                    if frame is not None:
                        kind, payload = frame
                        if kind == p.RESUMED and p.SIZE.unpack_from(payload)[0] == savepoint.pid:
                            return p.RESTORED, p.SIZE.unpack_from(payload, 4)[0]
                        connected = False
                except (p.MalformedFrame, struct.error):
                    connected = False
                if not connected:
                    break
                fds = [connection.read_fd, processes.wakeup_reader]
                select.select(fds, [], [], max(0.0, end - time.monotonic()))
                processes.drain_wakeups()
                processes.reap()
            processes.interpreter = None
            self.savepoints.missing_reason = "its savepoint was killed"
            processes.discard(savepoint)
        try:
            self.fork_interpreter()
        except OSError:
            os._exit(3)
        return p.RESET, 0


def find_changed_files(since: float) -> list[bytes]:
    """Return files below the working directory that changed since a time.

    At most `MAX_SCANNED` entries are looked at, and at most `MAX_FILES` are returned.
    """
    changed: list[bytes] = []
    scanned, todo = 0, [b"."]
    since -= 0.02  # the clock of a file system is coarser than ours
    while todo and scanned < MAX_SCANNED and len(changed) < MAX_FILES:
        directory = todo.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    scanned += 1
                    if scanned >= MAX_SCANNED or len(changed) >= MAX_FILES:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    elif (
                        entry.is_file(follow_symlinks=False)
                        and entry.stat(follow_symlinks=False).st_mtime >= since
                    ):
                        changed.append(entry.path[2:])
        except OSError:
            continue
    return sorted(changed)


def main() -> NoReturn:
    monitor = Monitor()
    monitor.set_up()
    monitor.run()
