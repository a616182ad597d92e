"""Write tasks as a dataset file for verl's `data.train_files` and `data.val_files`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rookery.adapters.task_rows import TASK_KEY, get_tasks, make_task_rows
from rookery.core import Task
from rookery.environments import Environment, load_environment


def write_dataset(
    path: str | Path, env: Environment | str, tasks: Iterable[Task | dict[str, Any] | str] | None = None
) -> int:
    """Write the tasks of an environment to a Parquet file that verl can read, and return their number.

    verl passes `extra_info` to the adapter, which finds the task by its ID there.
    """
    from pyarrow import Table, parquet

    environment = env if isinstance(env, Environment) else load_environment(env)
    rows = [
        {
            "data_source": environment.title,
            "prompt": [{"role": one["role"], "content": one["content"]} for one in row["prompt"]],
            "reward_model": {"style": "rookery", "ground_truth": ""},
            "extra_info": {"index": index, TASK_KEY: row[TASK_KEY]},
        }
        for index, row in enumerate(make_task_rows(get_tasks(environment, tasks)))
    ]
    parquet.write_table(Table.from_pylist(rows), str(path))
    return len(rows)
