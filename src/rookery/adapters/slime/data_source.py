"""slime's data source over the tasks of a Rookery environment."""

import json
import logging
from pathlib import Path
from typing import Any

from rookery.adapters.slime.rollout_function import get_rollouts
from rookery.adapters.task_rows import TASK_KEY
from rookery.core import UsageError

log = logging.getLogger("rookery.adapters.slime")


class RookeryDataSource:
    """slime's data source over the tasks of the environment, in order and epoch after epoch."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self._rows = get_rollouts(args).make_rows()
        if not self._rows:
            raise UsageError("the environment has no valid tasks")
        self._groups = 0
        self._returned: list[list[Any]] = []

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Return the next groups: first those that `add_samples` got, then new ones."""
        groups, self._returned = self._returned[:num_samples], self._returned[num_samples:]
        return groups + [self._make_group() for _ in range(num_samples - len(groups))]

    def _make_group(self) -> list[Any]:
        from slime.utils.types import Sample

        k, number = self.args.n_samples_per_prompt, self._groups
        row = self._rows[number % len(self._rows)]
        self._groups += 1
        return [
            Sample(
                group_index=number,
                index=number * k + member,
                prompt=row["prompt"],
                metadata={TASK_KEY: row[TASK_KEY]},
            )
            for member in range(k)
        ]

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Take back groups that were not used."""
        self._returned += samples

    def save(self, rollout_id: int) -> None:
        """Write the position to a file in slime's checkpoint directory."""
        path = self._get_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        returned = [group[0].group_index for group in self._returned]
        path.write_text(json.dumps({"groups": self._groups, "returned": returned}), encoding="utf-8")

    def load(self, rollout_id: int | None = None) -> None:
        """Continue at the position that `save` wrote. Without a checkpoint, start at the first task."""
        if rollout_id is None or not getattr(self.args, "load", None):
            return
        path = self._get_path(self.args.load, rollout_id)
        if not path.exists():
            log.warning("there is no position of the tasks in %s: starting at the first task", path)
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        for number in state["returned"]:
            self._groups = number
            self._returned.append(self._make_group())
        self._groups = state["groups"]

    @staticmethod
    def _get_path(folder: str, rollout_id: int) -> Path:
        return Path(folder) / "rollout" / f"rookery_{rollout_id}.json"

    def __len__(self) -> int:
        return len(self._rows)
