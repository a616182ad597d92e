"""Progress of a fetch, reported at a limited rate. Thread-safe; runs in the fetching process."""

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

REPORT_SECONDS = 0.2
"""Shortest interval between two reports of the same step."""
Step: TypeAlias = Literal["waiting", "finding", "fetching", "unpacking", "ready", "failed"]


class ImageProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the fetch of an image is."""

    image: str
    step: Step
    done: int = 0
    """Bytes fetched."""
    total: int = 0
    layers: int = 0
    layers_done: int = 0


OnProgress = Callable[[ImageProgress], None]


class ProgressReporter:
    """Counts bytes and layers, and calls back at a limited rate."""

    def __init__(self, image: str, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._reported_at = 0.0
        self._current = ImageProgress(image=image, step="waiting")

    def set_step(self, step: Step, *, complete: bool = False) -> None:
        """Change the step; `complete` also sets the counters to their totals."""
        with self._lock:
            now = self._current
            counters = {"done": now.total, "layers_done": now.layers} if complete else {}
            self._update(urgent=True, step=step, **counters)

    def begin(self, total: int, layers: int) -> None:
        """Start to count the bytes and layers of an image."""
        with self._lock:
            self._update(urgent=True, step="fetching", total=total, layers=layers)

    def add_bytes(self, count: int) -> None:
        """Count fetched bytes; a negative count takes them back."""
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
