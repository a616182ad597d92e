"""Continue a training run from its last checkpoint."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import Task, UsageError
from rookery.engine import EngineConfig
from rookery.environments import Environment
from rookery.trainer.folder import read_settings
from rookery.trainer.loop import Trainer


def resume_training(
    folder: str | Path,
    *,
    env: Environment | None = None,
    tasks: Sequence[Task] | None = None,
    held_out: Sequence[Task] | None = None,
    **changes: Any,
) -> Trainer:
    """Return a trainer that continues the training run in `folder` with its settings.

    Pass `env`, `tasks` and `held_out` if the run was started with them. `changes` are fields of `TrainConfig` to
    change, such as `steps`.
    """
    path = Path(folder)
    settings = read_settings(path)
    engine = msgspec.convert(settings.engine, EngineConfig)
    if env is None and not engine.environment:
        raise UsageError(f"{path.name} was started with an environment object: pass it as env")
    module_path = engine.stream.get("path")
    if isinstance(module_path, str) and module_path not in sys.path:
        sys.path.append(module_path)  # where `module:attr` was found
    return Trainer(
        env or engine.environment,
        policy=settings.policy,
        config=msgspec.structs.replace(settings.train, **changes),
        tasks=tasks,
        held_out=held_out,
        folder=path,
        engine=engine,
    )
