"""Progress of the fetch of an image, reported at a limited rate.

Thread-safe; runs in the child process that fetches an image.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

REPORT_SECONDS = 0.2
"""Shortest interval in seconds between two reports of the same step."""
Step: TypeAlias = Literal["waiting", "finding", "fetching", "unpacking", "ready", "failed"]


class ImageProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the fetch of an image."""

    image: str
    step: Step
    done: int = 0
    """Number of bytes fetched so far."""
    total: int = 0
    """Number of bytes to fetch."""
    layers: int = 0
    """Number of layers to fetch and unpack."""
    layers_done: int = 0


OnProgress = Callable[[ImageProgress], None]


class ProgressReporter:
    """Counts fetched bytes and layers, and calls `on_progress` at a limited rate."""

    def __init__(self, image: str, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._reported_at = 0.0
        self._current = ImageProgress(image=image, step="waiting")

    def set_step(self, step: Step, *, complete: bool = False) -> None:
        """Change the step of the fetch and report it at once. `complete` sets the counters to their totals."""
        with self._lock:
            now = self._current
            counters = {"done": now.total, "layers_done": now.layers} if complete else {}
            self._update(urgent=True, step=step, **counters)

    def begin(self, total: int, layers: int) -> None:
        """Set the numbers of bytes and layers to fetch."""
        with self._lock:
            self._update(urgent=True, step="fetching", total=total, layers=layers)

    def add_bytes(self, count: int) -> None:
        """Add to the number of fetched bytes. A negative `count` subtracts, when a download starts again."""
        with self._lock:
            done = self._current.done + count
            step = "unpacking" if done >= self._current.total else self._current.step
            self._update(step=step, done=done)

    def set_bytes(self, done: int, total: int, *, layers: int) -> None:
        """Set counters to values that the container engine reports."""
        with self._lock:
            self._update(step="fetching", done=done, total=total, layers=layers)

    def add_layer(self) -> None:
        with self._lock:
            self._update(urgent=True, layers_done=self._current.layers_done + 1)

    def _update(self, *, urgent: bool = False, **changes: object) -> None:
        self._current = msgspec.structs.replace(self._current, **changes)
        if self._on_progress is None or not (urgent or time.monotonic() - self._reported_at > REPORT_SECONDS):
            return
        self._reported_at = time.monotonic()
        self._on_progress(self._current)
