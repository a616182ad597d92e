"""Write a taskset package for verifiers: tasks of Rookery that prime-rl's orchestrator loads and sends back."""

import re
from pathlib import Path
from typing import Final

import msgspec

from rookery.core import Task

TESTED: Final = ("verifiers", "0.4.0", "0.4.1")
"""The package, the oldest version that was tested, and the version at which the tested range ends."""
PROJECT: Final = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "Tasks of Rookery for verifiers"
requires-python = ">=3.11"
dependencies = ["{requirement}"]

[tool.hatch.build.targets.wheel]
packages = ["{module}"]
"""

MODULE: Final = '''\
"""Tasks for verifiers. They run on the server `rookery serve --protocol verifiers`."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.task import task_key


class RookeryData(vf.TaskData):
    """A task; `rookery` is what the server gets."""

    rookery: dict[str, Any]


class RookeryTask(vf.Task[RookeryData]):
    """A task that the server runs and scores."""

    @property
    def hash(self) -> str:
        return task_key(self.data.rookery)

    @property
    def key(self) -> str:
        return self.data.id or self.hash


class RookeryTaskset(vf.Taskset[RookeryTask]):
    """The tasks of `tasks.jsonl`."""

    def load(self) -> Iterator[RookeryTask]:
        with files(__name__).joinpath("tasks.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                prompt = "\\n".join(str(one.get("content") or "") for one in row.get("prompt", ()))
                yield RookeryTask(RookeryData(id=row["id"], prompt=prompt or None, rookery=row), self.config.task)


__all__ = ["RookeryTaskset"]
'''

CONFIG: Final = """\
# Add this to the configuration of prime-rl. `serve.address` makes it use a server that it does not start.
[[orchestrator.train.source]]
name = "{name}"

[orchestrator.train.source.serve]
address = "{url}"

[orchestrator.train.source.env.taskset]
id = "{name}"
"""


def write_package(tasks: list[Task], folder: Path, name: str, url: str) -> list[Path]:
    """Write an installable taskset package and a part of a prime-rl configuration; return the files."""
    requirement = "{}>={},<{}".format(*TESTED)
    name = "rookery-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "tasks")
    module = name.replace("-", "_")
    (folder / module).mkdir(parents=True, exist_ok=True)
    files = {
        folder / "pyproject.toml": PROJECT.format(name=name, module=module, requirement=requirement),
        folder / "prime-rl.toml": CONFIG.format(name=name, url=url),
        folder / module / "__init__.py": MODULE,
        folder / module / "tasks.jsonl": "".join(msgspec.json.encode(task).decode() + "\n" for task in tasks),
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)
