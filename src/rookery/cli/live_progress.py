"""Live progress display on a terminal.

Guarantees:
- the display is drawn on stderr, and nothing is drawn after `close`;
- the cursor is visible again however the process ends.

The event loop draws the display; there is no thread.
"""

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rookery.cli.progress import RunStart, TextProgress
from rookery.cli.terminal import color_setting, format_duration


class LiveProgress(TextProgress):
    """Shows a progress bar with rates and failures by cause. Messages scroll above the bar."""

    def __init__(self, muted: frozenset[str] = frozenset()) -> None:
        super().__init__(muted)
        self._console = Console(stderr=True, highlight=False, soft_wrap=False, no_color=color_setting() is False)
        self._live: Live | None = None
        self._status: dict[str, Any] = {}

    def say(self, text: str) -> None:
        self._console.print(Text.from_ansi(text))

    def started(self, start: RunStart) -> None:
        super().started(start)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def tick(self, status: dict[str, Any]) -> None:
        self._status = status
        if self._live is not None:
            self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _render(self) -> RenderableType:
        assert self.start is not None
        done, total = self.done, self.start.total
        elapsed = time.monotonic() - self.start_time
        left = ""
        if self.stats.rollouts and done < total:
            left = f"{format_duration((total - done) * elapsed / self.stats.rollouts)} left"
        bar = Table.grid(padding=(0, 2), expand=False)
        bar.add_row(
            ProgressBar(
                total=max(1, total),
                completed=done,
                width=min(36, max(10, self._console.width - 44)),
                complete_style="cyan",
                finished_style="green",
            ),
            Text(f"{done:,}/{total:,}", "bold"),
            Text(format_duration(elapsed)),
            Text(left, "dim"),
        )
        rows: list[RenderableType] = [
            bar,
            self._join_parts([Text.from_ansi(one) for one in self.state(self._status)]),
        ]
        causes = self.stats.causes()
        if causes:
            rows.append(self._join_parts([Text(f"{cause} {one.count:,}", "red") for cause, one in causes[:4]]))
        return Group(*rows)

    def _join_parts(self, parts: list[Text]) -> Text:
        found = Text(no_wrap=True, overflow="ellipsis")
        for at, part in enumerate(parts):
            found.append(" · " if at else "", "dim").append_text(part)
        return found
