"""Loggers for TensorBoard and W&B. W&B runs offline: `wandb sync` uploads the files later, if at all."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rookery.core import UsageError

Logger = Callable[[dict[str, Any]], None]
"""Receives each row of the metrics."""


def open_loggers(names: Iterable[str], folder: Path) -> list[Logger]:
    """Return the loggers with these names. They write to the directory of the training run."""
    return [{"tensorboard": _open_tensorboard, "wandb": _open_wandb}[name](folder) for name in names]


def select_numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row, without the step. Failures by cause become `failed/CAUSE`."""
    flat = row | {f"failed/{cause}": count for cause, count in row.get("failed", {}).items()}
    return {name: value for name, value in flat.items() if isinstance(value, int | float) and name != "step"}


def _open_tensorboard(folder: Path) -> Logger:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("log_to=tensorboard needs a package: pip install 'rookery-rl[tensorboard]'") from None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(row: dict[str, Any]) -> None:
        for name, value in select_numbers(row).items():
            writer.add_scalar(name, value, row["step"])
        writer.flush()

    return log


def _open_wandb(folder: Path) -> Logger:
    try:
        import wandb
    except ImportError:
        raise UsageError("log_to=wandb needs a package: pip install 'rookery-rl[wandb]'") from None
    run = wandb.init(project="rookery", name=folder.name, dir=str(folder), mode="offline")

    def log(row: dict[str, Any]) -> None:
        run.log(select_numbers(row), step=row["step"])

    return log
