"""Hold an adapter's engine, and close it when the interpreter exits, for trainers that never close it."""

import atexit
import threading
import weakref
from functools import cache

from rookery.engine import SyncEngine


class EngineHolder:
    """Holds an open engine of an adapter, and closes it at the latest when the interpreter exits.

    It is a separate object, so that the engine can be closed after the adapter's object was garbage-collected.
    """

    def __init__(self) -> None:
        self.engine: SyncEngine | None = None

    def open(self, engine: SyncEngine) -> SyncEngine:
        engine.__enter__()
        self.engine = engine
        _open_holders.add(self)
        _register_close()
        return engine

    def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.__exit__(None, None, None)

    def close_in_thread(self) -> None:
        """Close the engine in a new thread.

        Garbage collection may run in the engine's thread, which would deadlock.
        """
        if self.engine is not None:
            threading.Thread(target=self.close, name="rookery-close").start()


_open_holders: "weakref.WeakSet[EngineHolder]" = weakref.WeakSet()


@cache
def _register_close() -> None:
    """Arrange that open Rookery engines are closed at interpreter exit; their threads do not end on their own."""
    # `atexit` handlers run too late: thread pools are already shut down, and closing an engine needs one.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


def _close_all() -> None:
    for holder in list(_open_holders):
        holder.close()
