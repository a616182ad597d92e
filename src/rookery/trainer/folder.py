"""The directory of a training run: settings, metrics, checkpoints and the weights that the sampler reads.

- A checkpoint is complete or absent: it is written to a temporary directory, synchronised to disk and renamed.
- A failure to write a checkpoint, such as a full disk, leaves the earlier checkpoints intact.
- Rows of metrics after the last checkpoint are removed when training resumes, so that no step has two rows.
- A lock file allows only one process at a time to train in the directory.
"""

import os
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Self

import msgspec

from rookery.core import UsageError
from rookery.core.lifetimes import ClosesOnExit
from rookery.journal.folder import TRAINING_ROLLOUTS, TRAINING_SETTINGS, open_lock, slug
from rookery.trainer.config import TrainConfig
from rookery.trainer.errors import TrainingError, write_error

if TYPE_CHECKING:
    from rookery.trainer.loop import Optimizer

SETTINGS = TRAINING_SETTINGS
METRICS = "metrics.jsonl"
_CHECKPOINTS = "checkpoints"
_STATE = "state.msgpack"
_MODEL = "model.pt"
_OPTIMIZER = "optimizer.pt"
_PREFIX = "step-"


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a training run.

    `eval_before` and `eval_after` are pass rates on the held-out tasks: the share of valid rollouts with reward 1.
    They are None without an evaluation, or if every rollout of the evaluation failed.
    """

    folder: Path
    steps: int
    seconds: float
    eval_before: float | None
    eval_after: float | None


class Progress(msgspec.Struct, kw_only=True):
    """Progress of a training run: finished steps, time and evaluations. It is part of every checkpoint."""

    step: int = 0
    """Number of finished training steps, which is also the policy version."""
    seconds: float = 0.0
    """Seconds of training, over all processes that worked on the run."""
    eval_before: float | None = None
    eval_after: float | None = None
    evaluated: int = -1
    """The step after which `eval_after` was measured."""
    eval_seconds: float = 0.0
    """Duration of the last evaluation."""
    engine: dict[str, Any] = {}
    """State of the engine, as returned by `engine.state_dict()`."""
    metrics_bytes: int = 0
    """Size of the metrics file at the checkpoint."""

    def get_share(self, config: TrainConfig) -> float:
        """Return the finished share of the run: 1 if its limits leave no time for another step.

        The final evaluation is part of the time.
        """
        by_steps = self.step / config.steps if config.steps else 0.0
        by_time = (self.seconds + self.eval_seconds) / (config.minutes * 60) if config.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def summarize(self, folder: Path) -> TrainResult:
        """Return the result of the training run in `folder`."""
        return TrainResult(
            folder=folder,
            steps=self.step,
            seconds=self.seconds,
            eval_before=self.eval_before,
            eval_after=self.eval_after,
        )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `train.json`: everything that a resume needs."""

    policy: str
    train: TrainConfig
    engine: dict[str, Any]
    """The description of the engine's configuration."""


class TrainingFolder(ClosesOnExit):
    """The directory of a training run, locked by this process."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.weights = self.path / "policy"
        self.rollouts = self.path / TRAINING_ROLLOUTS
        self._lock = open_lock(self.path)

    @classmethod
    def create(cls, root: Path, env: str, policy: str) -> Self:
        """Create a new directory in `root`."""
        stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-train-{slug(env)}-{slug(policy.partition(':')[0])}"
        path = root / f"{stem}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise UsageError(
                f"cannot create a directory in {root}: {error.strerror}; choose another directory with -o"
            ) from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing directory. Raise `UsageError` if it is no training run or another process uses it."""
        if not (path / SETTINGS).is_file():
            raise UsageError(f"{path} is not a training run: it holds no {SETTINGS}")
        return cls(path)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def remove(self) -> None:
        """Remove the directory of a run that could not be started."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    # ---- settings and metrics

    def describe(self, policy: str, config: TrainConfig, engine: dict[str, Any]) -> None:
        """Write the settings. Raise `TrainingError` if this fails."""
        data = msgspec.json.encode(Settings(policy=policy, train=config, engine=engine))
        temporary = self.path / f".{SETTINGS}"
        try:
            temporary.write_bytes(msgspec.json.format(data, indent=2))
            temporary.replace(self.path / SETTINGS)
        except OSError as error:
            raise write_error(self.path / SETTINGS, error) from error

    def write_metrics(self, row: dict[str, Any]) -> None:
        """Append one row to the metrics file. Raise `TrainingError` if this fails."""
        try:
            with (self.path / METRICS).open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            raise write_error(self.path / METRICS, error) from error

    @property
    def has_metrics(self) -> bool:
        return (self.path / METRICS).is_file()

    # ---- checkpoints

    def save(self, progress: Progress, optimizer: "Optimizer", keep: int) -> None:
        """Write a checkpoint, and remove all but the newest `keep`. Raise `TrainingError` if this fails."""
        import torch

        metrics = self.path / METRICS
        progress.metrics_bytes = metrics.stat().st_size if metrics.exists() else 0
        root = self.path / _CHECKPOINTS
        target = root / f"{_PREFIX}{progress.step:08}"
        temporary = root / f".{target.name}-{os.getpid()}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            torch.save(optimizer.model.state_dict(), temporary / _MODEL)
            torch.save(
                {
                    "adamw": optimizer.adamw.state_dict(),
                    "order": optimizer.order.get_state(),
                    "rng": torch.get_rng_state(),
                },
                temporary / _OPTIMIZER,
            )
            (temporary / _STATE).write_bytes(msgspec.msgpack.encode(progress))
            for name in (_MODEL, _OPTIMIZER, _STATE, "."):
                _sync(temporary / name)
            if target.exists():
                shutil.rmtree(target)
            temporary.rename(target)
            _sync(root)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
            shutil.rmtree(temporary, ignore_errors=True)
            raise write_error(target, error) from error
        for old in _list_checkpoints(root)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def restore(self, optimizer: "Optimizer") -> Progress | None:
        """Load the newest checkpoint into the optimiser and its model; return None if there is none.

        Rows of the metrics file that were written after the checkpoint are removed.
        """
        import torch

        for partial in (self.path / _CHECKPOINTS).glob(f".{_PREFIX}*"):  # of a process that was killed
            shutil.rmtree(partial, ignore_errors=True)
        found = _list_checkpoints(self.path / _CHECKPOINTS)
        metrics = self.path / METRICS
        if not found:
            metrics.unlink(missing_ok=True)
            return None
        try:
            device = next(optimizer.model.parameters()).device
            optimizer.model.load_state_dict(torch.load(found[-1] / _MODEL, map_location=device, weights_only=True))
            state = torch.load(found[-1] / _OPTIMIZER, map_location=device, weights_only=True)
            optimizer.adamw.load_state_dict(state["adamw"])
            optimizer.order.set_state(state["order"].cpu())
            torch.set_rng_state(state["rng"].cpu())
            progress = msgspec.msgpack.decode((found[-1] / _STATE).read_bytes(), type=Progress)
        except (OSError, RuntimeError, KeyError, ValueError, UnpicklingError, msgspec.MsgspecError) as error:
            raise TrainingError(
                f"the checkpoint {found[-1]} cannot be loaded: {error}. Remove it to continue from the one before",
                reason="checkpoint",
            ) from error
        if metrics.exists():
            os.truncate(metrics, min(progress.metrics_bytes, metrics.stat().st_size))
        return progress


def find_training_run(spec: str, root: Path) -> Path:
    """Return the directory of a training run: a path, a name in `root`, a unique part of a name, or `latest`."""
    for path in (Path(spec), root / spec):
        if (path / SETTINGS).is_file():
            return path.resolve()
    names = sorted(path.parent.name for path in root.glob(f"*/{SETTINGS}"))
    found = names[-1:] if spec == "latest" else [name for name in names if spec in name]
    if len(found) == 1:
        return (root / found[0]).resolve()
    if found:
        hint = f"several match: {', '.join(found[:5])}"
    else:
        hint = f"its training runs are: {', '.join(names[-5:]) or 'none'}"
    raise UsageError(f"no training run {spec!r:.200} in {root}; {hint}")


def read_settings(path: Path) -> Settings:
    """Return the settings of the training run in a directory. Raise `UsageError` if it is none."""
    try:
        return msgspec.json.decode((path / SETTINGS).read_bytes(), type=Settings)
    except OSError as error:
        raise UsageError(f"{path} is not a training run: {SETTINGS} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"the settings {path / SETTINGS} cannot be read: {error}") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the metrics of the training run in a directory. An incomplete last row is ignored."""
    try:
        lines = (path / METRICS).read_bytes().split(b"\n")[:-1]
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]
    except OSError as error:
        raise UsageError(f"{path} has no metrics: {METRICS} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"the metrics {path / METRICS} cannot be read: {error}") from None


def _list_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in root.glob(f"{_PREFIX}*") if (path / _STATE).is_file())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
