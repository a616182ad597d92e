"""The built-in tasks are deterministic, spread over the context, and solvable by reading all of it."""

import hashlib
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import Task
from rookery.environments.rlm import RlmEnvironment
from rookery.environments.rlm.options import KINDS
from rookery.environments.rlm.recipes import Recipe, generate_tasks
from tests.environments.rlm.helpers import Models, count_replies, run_rollout, run_tasks
from tests.environments.rlm.policies import solve

Kind = Literal["needle", "aggregate", "join"]
each_kind = pytest.mark.parametrize("kind", KINDS)
WINDOW = 400_000
"""Characters of 100,000 tokens."""


def read_text(path: Path) -> str:
    files = (
        [path]
        if path.is_file()
        else sorted(run_rollout for run_rollout in path.rglob("*") if run_rollout.is_file())
    )
    return "".join(file.read_text() for file in files)


@each_kind
def test_equal_recipes_write_equal_bytes_of_about_the_requested_size(kind: Kind, tmp_path: Path) -> None:
    digests = set()
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        text = read_text(Recipe(kind, 7, 300_000).write(tmp_path / str(index)))
        assert 0.9 < len(text) / 300_000 < 1.1
        digests.add(hashlib.sha256(text.encode()).digest())
    (tmp_path / "other").mkdir()
    other = Recipe(kind, 8, 300_000)
    digests.add(hashlib.sha256(read_text(other.write(tmp_path / "other")).encode()).digest())
    assert len(digests) == 2


@each_kind
@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_sized_window_contains_all_facts(kind: Kind, seed: int, tmp_path: Path) -> None:
    recipe = Recipe(kind, seed, 1_000_000)
    text = read_text(recipe.write(tmp_path))
    positions = sorted(text.index(fact) for fact in recipe.facts)
    assert all(text.count(f"{fact}\n") == 1 for fact in recipe.facts), "each fact occurs once"
    assert positions[-1] - positions[0] > len(text) / 2 > WINDOW
    counts = [sum(start <= position < start + WINDOW for position in positions) for start in positions]
    assert max(counts) < len(positions)


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**40), size=st.integers(10_000, 2**30))
def test_answer_is_known_without_writing_the_context(kind: Kind, seed: int, size: int) -> None:
    recipe = Recipe(kind, seed, size)
    assert recipe.answer > 0
    assert (recipe.question, recipe.answer) == (Recipe(kind, seed, size).question, recipe.answer)
    assert str(recipe.answer) not in recipe.question.split()
    assert msgspec.convert(msgspec.to_builtins(recipe), Recipe) == recipe


def test_any_prefix_of_the_tasks_is_balanced_and_ids_are_unique() -> None:
    tasks: list[Task] = list(RlmEnvironment(megabytes=[1, 50], size=24).tasks())
    assert len({task.id for task in tasks}) == 24
    assert [task.data["kind"] for task in tasks[:6]] == [*KINDS, *KINDS]
    assert [task.data["megabytes"] for task in tasks[:6]] == [1, 1, 1, 50, 50, 50]
    assert generate_tasks(KINDS, (1.0,), 3, 5)[0] == generate_tasks(KINDS, (1.0,), 9, 5)[0]
    assert len(msgspec.json.encode(tasks)) < 24 * 1000, "a task is its recipe, not its context"


async def _solve_tasks(folder: Path, megabytes: float, repl: str, **options: Any) -> None:
    tasks = list(RlmEnvironment(megabytes=[megabytes], size=len(KINDS)).tasks())
    kind_of = {task.text: task.data["kind"] for task in tasks}

    def root(messages: list[dict[str, Any]]) -> str:
        question = messages[1]["content"]
        return "gave up" if count_replies(messages) else solve(kind_of[question], question, repl=repl)

    groups = await run_tasks(Models(root), folder, tasks, repl=repl, **options)
    assert {group.task.data["kind"]: group.rollouts[0].reward for group in groups} == dict.fromkeys(KINDS, 1.0)


@pytest.mark.long
@pytest.mark.needs("mount")
@pytest.mark.parametrize("repl", ["python", "bash"])
async def test_reference_policy_solves_each_kind(repl: str, tmp_path: Path) -> None:
    await _solve_tasks(tmp_path, 1, repl)


@pytest.mark.long
@pytest.mark.needs("mount")
@pytest.mark.parametrize("repl", ["python", "bash"])
async def test_reference_policy_solves_contexts_of_fifty_megabytes(repl: str, tmp_path: Path) -> None:
    await _solve_tasks(tmp_path, 50, repl, cell_seconds=100.0)


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_context_of_fifty_megabytes_is_in_no_message(tmp_path: Path) -> None:
    (task,) = RlmEnvironment(kinds=["aggregate"], megabytes=50, size=1).tasks()
    models = Models(["<code>len(context)", "<code>print(context)", solve("aggregate", task.text)])
    rollout = await run_rollout(models, tmp_path, task)
    assert rollout.reward == 1.0
    assert 49_000_000 < int(models.observations[0].split("\n")[1]) < 51_000_000
    cut = re.search(r"….*?([\d,]+) .*?([\d,]+) .*…", models.observations[1])
    assert cut, "bytes that the worker dropped are counted separately"
    requests = [len(msgspec.json.encode(request.body)) for request in models.server.requests]
    assert max(requests) < 30_000
    journal = sum(path.stat().st_size for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert journal < 5_000_000
