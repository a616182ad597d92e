"""Loggers for TensorBoard, W&B and Prometheus.

W&B runs offline: `wandb sync` uploads the files later, if at all.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, Self

from rookery.core.lifetimes import ClosesOnExit
from rookery.telemetry import REGISTRY, catalogue


class Logger(Protocol):
    """Receives each row of the metrics."""

    def log(self, row: dict[str, Any]) -> None:
        """Write a row."""
        ...

    def close(self) -> None:
        """Write what is buffered and close the files."""
        ...


class Loggers(ClosesOnExit):
    """The loggers of a training run, which write to its directory. A `with` block adds the one for Prometheus."""

    def __init__(self, names: Iterable[str], folder: Path) -> None:
        """Open the loggers with these names."""
        self._loggers: list[Logger] = []
        try:
            for name in names:
                self._loggers.append(TensorBoardLogger(folder) if name == "tensorboard" else WandbLogger(folder))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        self._loggers.append(PrometheusLogger())
        return self

    def __call__(self, row: dict[str, Any]) -> None:
        for logger in self._loggers:
            logger.log(row)

    def close(self) -> None:
        """Close all loggers."""
        while self._loggers:
            self._loggers.pop().close()


def select_numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row, without the step. Failures by cause become `failed/CAUSE`."""
    flat = row | {f"failed/{cause}": count for cause, count in row.get("failed", {}).items()}
    return {name: value for name, value in flat.items() if isinstance(value, int | float) and name != "step"}


class TensorBoardLogger:
    """Writes event files to the directory `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, row: dict[str, Any]) -> None:
        for name, value in select_numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Writes an offline run to the directory `wandb`."""

    def __init__(self, folder: Path) -> None:
        import wandb

        # The terminal shows the live table, so W&B neither prints to it nor records it.
        settings = wandb.Settings(silent=True, console="off")
        self._run: Any = wandb.init(
            project="rookery", name=folder.name, dir=str(folder), mode="offline", settings=settings
        )

    def log(self, row: dict[str, Any]) -> None:
        self._run.log(select_numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


class PrometheusLogger:
    """Sets the trainer's metrics in this process to the newest values."""

    def __init__(self) -> None:
        REGISTRY.collectors.append(self._collect)
        self._newest: dict[str, float] = {}
        self._step = 0

    def log(self, row: dict[str, Any]) -> None:
        self._step = row["step"]
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
        self._newest |= numbers
        for phase in ("wait", "train", "sync"):
            if seconds := numbers.get(f"{phase}_seconds"):
                catalogue.TRAIN_SECONDS.add(phase, by=seconds)
        if tokens := numbers.get("tokens"):
            catalogue.TRAIN_TOKENS.add(by=tokens)

    def _collect(self) -> None:
        catalogue.TRAIN_STEP.set(self._step)
        for name, value in list(self._newest.items()):  # another thread may add one
            catalogue.TRAIN_VALUE.set(value, name)

    def close(self) -> None:
        REGISTRY.collectors.remove(self._collect)
