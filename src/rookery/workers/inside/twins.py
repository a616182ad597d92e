"""Twins of the live Python: made by it, frozen, and going on in its place. Stand-alone.

Promises:
- a twin holds no pipe and no socket of the user's, so that who waits for their end is not kept waiting by it;
- nothing that is in a buffer is written twice;
- when it goes on, its loop works, and nothing was reseeded or run that a fork would.
"""

from __future__ import annotations

import _socket
import os
import stat as stats
import sys

TYPE_CHECKING = False

if TYPE_CHECKING or "rookery.workers" in sys.modules:
    from rookery.workers.inside import frames as f
    from rookery.workers.inside import kernel as k
    from rookery.workers.inside.display import cut
    from rookery.workers.inside.runs import TREE, Runs
    from rookery.workers.inside.wire import BROKEN, high
else:
    import frames as f
    import kernel as k
    from display import cut
    from runs import TREE, Runs
    from wire import BROKEN, high

_COMMON = """
import os, sys as s
from os import path
x, y = [1], {"a": -2.5}
def f(a, *b, c=None):
    global x
    for i in range(len(b)):
        if i > 0 and not c or a is None:
            x += [a[i] * 2 for a in b if a.real == i]
    try:
        return f"{a}", lambda q: q[1:2]
    except (ValueError, KeyError) as e:
        raise
class A:
    z = 3 % 2
while True:
    break
with open("x") as g:
    print(x.y, *y, sep="")
"""
"""Of all that cells are made of: it is compiled, and never run."""


class Twins(Runs):
    """How it is copied."""

    pid = 0
    streams: list[int]

    def flush(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def peak_from_here(self) -> None:
        raise NotImplementedError

    def save(self, line: int) -> None:
        self.flush()
        line = high(line)
        try:
            pid = k.twin()
        except OSError as error:
            os.close(line)
            self.say(f.COPIED, f.SIZE.pack(0), os.strerror(error.errno or 0).encode())
            return
        if pid:
            os.close(line)
            self.rehearse()
            self.say(f.COPIED, f.SIZE.pack(pid))
            return
        try:
            self.freeze(line)
        except BaseException:
            os._exit(BROKEN)

    def rehearse(self) -> None:
        """Every page that is written to first after a copy was made is copied: those that any cell needs, now."""
        compile(compile(_COMMON, "<cell 0>", "exec", TREE, True), "<cell 0>", "exec", 0, True)
        _, value, error = self.run(0, b"[0]", 100)
        sys.stdout.write("")
        self.restore()
        f.packed([cut(text, 100).encode() for text in (value, error)])
        self.peak_from_here()

    def freeze(self, line: int) -> None:
        """In the twin: waits for its turn, which mostly never comes."""
        k.die_with_parent()
        self.socket.detach()
        os.close(self.line)
        os.setsid()
        k.worth(b"0")
        lost = self.let_go({line, *self.streams})
        k.set_dumpable(False)
        self.attach(line)
        self.say(f.FROZEN)
        kind, _, _ = self.hear()
        if kind != f.GO:
            os._exit(0)
        k.worth(b"1000")
        k.set_dumpable(True)
        self.pid = os.getpid()
        self.mend_loop()
        self.say(f.LIVE, f.SIZE.pack(self.pid), f.SIZE.pack(lost))

    def let_go(self, kept: set[int]) -> int:
        """Puts a dead end in the place of every pipe and socket; how many there were."""
        lost = 0
        dead = -1
        loops = self.loop_descriptors()
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            try:
                kind = stats.S_IFMT(os.fstat(fd).st_mode)
                if (
                    fd <= 2
                    or fd == dead
                    or fd in kept
                    or kind in (stats.S_IFREG, stats.S_IFDIR, stats.S_IFCHR, stats.S_IFBLK)
                ):
                    continue
            except OSError:
                continue
            if dead < 0:
                one, other = _socket.socketpair()
                other.close()
                dead = one.detach()
            os.dup2(dead, fd, inheritable=False)
            lost += fd not in loops
        if dead >= 0:
            os.close(dead)
        return lost

    def loop_descriptors(self) -> set[int]:
        found = set()
        for holder, name in ((self.loop, "_ssock"), (self.loop, "_csock"), (self.loop, "_selector")):
            part = getattr(holder, name, None)
            if part is not None:
                try:
                    found.add(part.fileno())
                except Exception:
                    continue
        return found

    def mend_loop(self) -> None:
        """Its own descriptors are among those that a twin let go."""
        if self.loop is None or self.loop.is_closed():
            return
        try:
            import selectors

            self.loop._selector = selectors.DefaultSelector()
            self.loop._internal_fds = 0
            self.loop._make_self_pipe()
        except Exception:
            self.loop = None
