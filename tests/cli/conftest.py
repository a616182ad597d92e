"""Fixtures: a directory with an environment and tasks, a scripted inference engine, small file systems."""

import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import ModelServer

ENVIRONMENT = '''
import rookery


@rookery.tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Sums(rookery.ToolEnvironment):
    toolset = [add]

    async def score(self, ctx):
        if ctx.task.data.get("boom"):
            raise ValueError("boom in scoring")
        return await super().score(ctx)
'''


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    tasks(tmp_path, 4)
    return tmp_path


def tasks(folder: Path, count: int, *, boom: tuple[int, ...] = ()) -> None:
    """Write `tasks.jsonl`. The correct answer is 42; the tasks in `boom` raise while they are scored."""
    rows = [{"id": f"t{n}", "prompt": f"sum {n}", "answer": 42, "boom": n in boom} for n in range(count)]
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer("42") as running:
        yield running


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a tmpfs with the given options and returns its directory."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(made)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", "-l", str(folder)], check=True)
