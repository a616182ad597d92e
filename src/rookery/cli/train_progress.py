"""Show the progress of `rookery train`: a live table on a terminal, lines elsewhere, or JSON events."""

import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from rookery.cli.progress import JsonLines
from rookery.cli.terminal import format_duration, program_name, relative_path, shell_quote, write_line

if TYPE_CHECKING:
    from rookery.trainer import Trainer, TrainResult

COLUMNS: Final[dict[str, tuple[str, str]]] = {
    "step": ("step", "{:d}"),
    "seconds": ("time", "duration"),
    "reward": ("reward", "{:.3f}"),
    "pass_rate": ("pass", "{:.1%}"),
    "eval_pass_rate": ("held-out", "{:.1%}"),
    "groups": ("groups", "{:d}"),
    "informative": ("inform.", "{:d}"),
    "valid": ("valid", "{:d}"),
    "failed": ("failed", "causes"),
    "length_mean": ("length", "{:.0f}"),
    "sampler_kl": ("KL", "{:.1e}"),
    "entropy": ("entropy", "{:.3f}"),
    "grad_norm": ("grad", "{:.3f}"),
    "staleness_mean": ("stale", "{:.2f}"),
    "tokens_per_second": ("tok/s", "{:,.0f}"),
    "wait_seconds": ("wait", "duration"),
    "train_seconds": ("train", "duration"),
}
"""The columns of the table: title and format of each metric."""
_ROWS: Final = 16


def format_cell(row: dict[str, Any], name: str) -> str:
    """Return the text of a metric in a table; empty if the row does not have it."""
    value, how = row.get(name), COLUMNS[name][1]
    if value is None:
        return ""
    if how == "duration":
        return format_duration(value)
    if how == "causes":
        return " ".join(f"{cause} {count}" for cause, count in list(value.items())[:2])
    return how.format(value)


def describe_held_out(result: "TrainResult") -> str:
    """Return the held-out pass rate before and after training, and the rewards if they are no pass rates."""
    from rookery.trainer import read_metrics

    if result.eval_before is None or result.eval_after is None:
        return ""
    text = f", held-out pass rate {result.eval_before:.1%} -> {result.eval_after:.1%}"
    rows = [row for row in read_metrics(result.folder) if row.get("eval_reward") is not None]
    if any(row["eval_reward"] != row["eval_pass_rate"] for row in rows):
        text += f", reward {rows[0]['eval_reward']:.3f} -> {rows[-1]['eval_reward']:.3f}"
    return text


class TrainLines:
    """Prints one line per training step and evaluation to stderr."""

    def __init__(self, trainer: "Trainer") -> None:
        write_line(f"training run {relative_path(trainer.folder.path)}")
        write_line(f"{len(trainer.tasks):,} tasks, {len(trainer.held_out):,} held out")

    def started(self, metrics_url: str) -> None:
        """Print the URL of the metrics, if the run serves them."""
        if metrics_url:
            write_line(f"metrics at {metrics_url}")

    def row(self, row: dict[str, Any]) -> None:
        cells = ((COLUMNS[name][0], format_cell(row, name)) for name in COLUMNS)
        write_line("  ".join(f"{title} {text}" for title, text in cells if text))

    def close(self) -> None:
        """Do nothing: there is no display to remove."""

    def finished(self, result: "TrainResult | None", trainer: "Trainer", code: int) -> None:
        """Print the result, or how to continue."""
        folder = shell_quote(trainer.folder.path)
        if result is None:
            what = "interrupted" if code > 128 else "stopped"
            write_line(
                f"{what} after step {trainer.progress.step}: {program_name()} train --resume {folder} continues"
            )
            return
        lines = [
            f"trained {result.steps} steps in {format_duration(result.seconds)}{describe_held_out(result)}",
            f"  {program_name()} plot {folder}",
        ]
        write_line("\n".join(lines), err=False)


class TrainTable(TrainLines):
    """Shows the last steps as a table that is redrawn on stderr."""

    def __init__(self, trainer: "Trainer") -> None:
        super().__init__(trainer)
        from rich.console import Console
        from rich.live import Live

        self._rows: deque[dict[str, Any]] = deque(maxlen=_ROWS)
        self._live: Live | None = Live(console=Console(stderr=True, highlight=False), auto_refresh=False)
        self._live.start()

    def row(self, row: dict[str, Any]) -> None:
        from rich.table import Table

        if self._rows and self._rows[-1]["step"] == row["step"]:
            self._rows[-1] = self._rows[-1] | row  # an evaluation after this step
        else:
            self._rows.append(row)
        table = Table(box=None, pad_edge=False)
        for title, how in COLUMNS.values():
            table.add_column(title, justify="left" if how == "causes" else "right", no_wrap=True)
        for one in self._rows:
            table.add_row(*(format_cell(one, name) for name in COLUMNS))
        if self._live is not None:
            self._live.update(table, refresh=True)

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


class TrainEvents:
    """Writes each row as a JSON line to stdout, and the result as the last line."""

    def __init__(self, events: JsonLines, trainer: "Trainer") -> None:
        self._events = events
        events.write(
            "started", run=str(trainer.folder.path), tasks=len(trainer.tasks), held_out=len(trainer.held_out)
        )

    def started(self, metrics_url: str) -> None:
        """Write the URL of the metrics, if the run serves them."""
        if metrics_url:
            self._events.write("metrics", url=metrics_url)

    def row(self, row: dict[str, Any]) -> None:
        self._events.write("evaluation" if "eval_reward" in row else "step", **row)

    def close(self) -> None:
        """Do nothing: the last line follows."""

    def finished(self, result: "TrainResult | None", trainer: "Trainer", code: int) -> None:
        """Write the last line."""
        progress = trainer.progress
        self._events.write(
            "finished",
            run=str(trainer.folder.path),
            eval_before=progress.eval_before,
            eval_after=progress.eval_after,
            steps=progress.step,
            seconds=progress.seconds,
            complete=result is not None,
            exit_code=code,
        )


def open_train_progress(events: JsonLines | None, trainer: "Trainer") -> TrainLines | TrainEvents:
    """Return the display for `--json`, for a terminal or for other outputs."""
    if events is not None:
        return TrainEvents(events, trainer)
    terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return TrainTable(trainer) if terminal else TrainLines(trainer)
