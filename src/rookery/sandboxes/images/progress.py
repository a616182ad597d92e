"""How far the making of an image is, told now and then; from several threads."""

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

BEAT_SECONDS = 0.2


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the making of an image is."""

    image: str
    step: Literal["waiting", "finding", "fetching", "unpacking", "ready", "failed"]
    done: int = 0
    """Bytes."""
    total: int = 0
    layers: int = 0
    layers_done: int = 0


OnProgress = Callable[[Progress], None]


class Bar:
    """Counts, and tells now and then."""

    def __init__(self, image: str, tell: OnProgress | None) -> None:
        self._tell = tell
        self._image = image
        self._lock = threading.Lock()
        self._last = 0.0
        self._step: Any = "waiting"
        self._done = self._total = self._layers = self._layers_done = 0

    def step(self, step: str, *, last: bool = False) -> None:
        with self._lock:
            self._step = step
            if last:
                self._done, self._layers_done = self._total, self._layers
            self._say(now=True)

    def begin(self, total: int, layers: int) -> None:
        with self._lock:
            self._step, self._total, self._layers = "fetching", total, layers
            self._say(now=True)

    def have(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._done >= self._total:
                self._step = "unpacking"
            self._say()

    def at(self, done: int, total: int, *, layers: int) -> None:
        """Where somebody else counts."""
        with self._lock:
            self._step, self._done, self._total, self._layers = "fetching", done, total, layers
            self._say()

    def layer(self) -> None:
        with self._lock:
            self._layers_done += 1
            self._say(now=True)

    def _say(self, *, now: bool = False) -> None:
        if self._tell is None or not (now or time.monotonic() - self._last > BEAT_SECONDS):
            return
        self._last = time.monotonic()
        self._tell(
            Progress(
                image=self._image,
                step=self._step,
                done=self._done,
                total=self._total,
                layers=self._layers,
                layers_done=self._layers_done,
            )
        )
