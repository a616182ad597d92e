"""The promises of the taskset `repairs`: both formats, one source; right is one, broken and half right are not."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from rookery.core import ExecResult, SandboxSpec, TaskError, UsageError
from rookery.environments.swe import SweEnvironment, repairs
from rookery.sandboxes import Command, ProviderHome, Sandbox, open_provider
from rookery.sandboxes.protocol import Provider
from rookery.scoring.swe import PreparedSandbox, SweGrade, SweGrader, prepare
from rookery.scoring.swe.preparation import Deadline
from rookery.scoring.swe.reference_solution import run_solution
from rookery.tasks import load_tasks
from rookery.tasks.cache import VARIABLE
from rookery.tasks.swe import SweTask, get_swe_task
from tests.environments.swe.wrong_repairs import CHEATS, WRONG, changed, texts

SPEC = SandboxSpec(provider="local", wall=600.0)
pytestmark = pytest.mark.timeout(900)  # a machine that has much else to do is no failure
NAMES = repairs.names()
FEW = ("backup-rotation", "cache-expiry", "word-splitter")
"""One of each language, one of them with parts; for what would take too long with all."""
TIMES = (20, 5) if os.environ.get("ROOKERY_REPAIRS_ALL") else (6, 2)
"""How often a repair is graded again, and a wrong one: the whole number takes a quarter of an hour."""


@pytest.fixture(autouse=True, scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is left in the user's own cache of tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Provider]:
    made = open_provider("local", ProviderHome(folder=tmp_path_factory.mktemp("home"), run="repairs"))
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(scope="module")
def tasks() -> dict[str, SweTask]:
    return {task.id: get_swe_task(task) for task in repairs.repairs()}


class Ready:
    """A task in a box, of which each submission gets a copy."""

    def __init__(
        self, provider: Provider, task: SweTask, spec: SandboxSpec, box: Sandbox, prepared: PreparedSandbox
    ) -> None:
        self._provider, self._task, self._spec = provider, task, spec
        self._box, self._prepared = box, prepared

    async def _open(self, spec: SandboxSpec) -> Sandbox:
        return await self._provider.create(spec, attempt="grading")

    async def graded(self, files: dict[str, str] | None = None, *, solved: bool = False) -> SweGrade:
        """The grade of the reference solution, with these files put over it; or of these files alone."""
        step = self._task.steps[0]
        box = await self._box.fork(self._prepared.snapshot)
        try:
            if solved:
                await run_solution(
                    box, self._task, step, multi_user=self._prepared.multi_user, deadline=Deadline(300)
                )
            for name, text in (files or {}).items():
                await box.write(f"{self._task.workdir}/{name}", text.encode())
            grader = SweGrader(self._open, self._task, self._spec)
            return await grader.grade(box, self._prepared, 0, timeout=1_500)
        finally:
            await box.close()


@asynccontextmanager
async def ready(provider: Provider, task: SweTask, spec: SandboxSpec = SPEC) -> AsyncIterator[Ready]:
    box = await provider.create(spec, attempt=task.id)
    try:
        yield Ready(provider, task, spec, box, await prepare(box, task, timeout=300))
    finally:
        await box.close()


async def wrong_grade(task: SweTask, made: Ready, label: str) -> SweGrade:
    wrong = WRONG[task.id][label]
    top = Path(task.folder)
    files = texts(top / "environment" / "seeds")
    if wrong.over == "repaired":
        files |= texts(top / "solution" / "files")
    return await made.graded(changed(files, wrong.edits), solved=wrong.over == "repaired")


# ------------------------------------------------------------------------------------------------------ the gate


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in NAMES]
)
async def test_the_reference_is_one_and_nothing_is_zero(
    provider: Provider, tasks: dict[str, SweTask], name: str
) -> None:
    async with ready(provider, tasks[name]) as made:
        right = await made.graded(solved=True)
        assert right.reward == 1.0, right
        assert right.weaker == "", right
        assert dict(right.parts) == dict.fromkeys(repairs.get_info(name).parts, 1.0)
        broken = await made.graded()  # as it was given
        assert broken.reward == 0.0, broken
        assert broken.detail == "", broken


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", NAMES)
async def test_no_wrong_repair_passes(provider: Provider, tasks: dict[str, SweTask], name: str) -> None:
    assert len(WRONG[name]) >= 2
    async with ready(provider, tasks[name]) as made:
        for label in WRONG[name]:
            await is_wrong(tasks[name], made, label)


async def is_wrong(task: SweTask, made: Ready, label: str) -> None:
    grade = await wrong_grade(task, made, label)
    parts = WRONG[task.id][label].parts
    assert dict(grade.parts) == (parts or {}), (label, grade)
    assert grade.reward == (sum(parts.values()) / len(parts) if parts else 0.0), (label, grade)
    assert grade.reward < 1.0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", FEW[1:2])
async def test_gradings_agree(provider: Provider, tasks: dict[str, SweTask], name: str) -> None:
    await gradings_agree(provider, tasks[name], right=2, wrong=1)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", NAMES)
async def test_gradings_agree_again_and_again(provider: Provider, tasks: dict[str, SweTask], name: str) -> None:
    right, wrong = TIMES
    await gradings_agree(provider, tasks[name], right=right, wrong=wrong)


async def gradings_agree(provider: Provider, task: SweTask, *, right: int, wrong: int) -> None:
    """Inputs are new each time; what they tell is not."""
    async with ready(provider, task) as made:
        assert [(await made.graded(solved=True)).reward for _ in range(right)] == [1.0] * right
        assert [(await made.graded()).reward for _ in range(right)] == [0.0] * right
        for label in WRONG[task.id]:
            found = [(await wrong_grade(task, made, label)).score for _ in range(wrong)]
            assert [score.parts for score in found] == [WRONG[task.id][label].parts or {}] * wrong, label
            assert all(score.reward < 1.0 for score in found), label


# ------------------------------------------------------------------------------------------------------ cheats


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
async def test_whatever_the_submission_does_it_gets_nothing(provider: Provider, tasks: dict[str, SweTask]) -> None:
    async with ready(provider, tasks["cache-expiry"]) as made:
        for label, files in CHEATS.items():
            grade = await made.graded(files)
            assert grade.reward == 0.0, (label, grade)
            assert grade.source == "reward.txt", (label, grade)


# ------------------------------------------------------------------------------------------------- both formats


def test_there_are_enough_tasks_in_several_languages() -> None:
    found = [repairs.get_info(name) for name in NAMES]
    assert len(found) >= 14
    assert {"Python", "bash", "C"} <= {one.language for one in found}
    assert {one.difficulty for one in found} == {"easy", "medium", "hard"}
    assert set(WRONG) == set(NAMES)
    assert sum(bool(one.parts) for one in found) >= 2


@pytest.mark.parametrize("kind", repairs.FORMATS)
def test_every_task_is_there_in_both_formats(kind: repairs.RepairsFormat) -> None:
    loaded = load_tasks(repairs.folder(kind))
    assert [task.id for task in loaded] == list(NAMES)
    for task in loaded:
        assert task.invalid == ""
        found = get_swe_task(task)
        assert found.format == kind
        assert found.workdir == "/workspace"
        assert found.steps[0].solution
        assert 0 < len(found.steps[0].instruction) < 3_000
        assert (found.image is None) == (kind == "open-instruct")


def test_both_formats_have_the_same_content() -> None:
    one, other = repairs.folder("open-instruct"), repairs.folder("harbor")
    for name in NAMES:
        for part in ("instruction.md", "environment/seeds", "tests", "solution"):
            assert _bytes(one / name / part) == _bytes(other / name / part), (name, part)
        assert _bytes(one / name / "setup.sh") == _bytes(other / name / "environment" / "setup.sh")


def test_directories_are_made_once_and_the_same_again(tmp_path: Path) -> None:
    for kind in repairs.FORMATS:
        made = repairs.folder(kind)
        before = made.stat().st_ino
        repairs.write(kind, tmp_path / kind)
        assert _bytes(made) == _bytes(tmp_path / kind)
        assert repairs.folder(kind).stat().st_ino == before
        with pytest.raises(UsageError, match=kind):
            repairs.write(kind, tmp_path / kind)


def _bytes(path: Path) -> dict[str, tuple[int, bytes]]:
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return {str(one.relative_to(path)): (one.stat().st_mode, one.read_bytes()) for one in files}


def test_no_answer_is_in_what_the_agent_gets() -> None:
    """Neither in the files nor in the script that makes their history."""
    for name in NAMES:
        top = repairs.folder() / name
        solution = texts(top / "solution" / "files")
        seen = texts(top / "environment" / "seeds")
        for path, text in solution.items():
            assert text != seen.get(path), (name, path)
            assert text not in (top / "setup.sh").read_text()


def test_the_page_names_every_task_as_it_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "repairs.md").read_text()
    for name in NAMES:
        found = repairs.get_info(name)
        assert f"| `{name}` | {found.language} | {found.difficulty} | {found.words} |" in page
    assert page.count("\n| `") == len(NAMES)


def test_the_set_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [task.id for task in load_tasks("repairs")] == list(NAMES)
    assert load_tasks("repairs").source == "repairs"
    assert {get_swe_task(task).format for task in load_tasks("repairs-harbor")} == {"harbor"}
    assert list(SweEnvironment().tasks()) == list(repairs.repairs())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repairs").mkdir()
    with pytest.raises(UsageError, match="contains no tasks"):
        load_tasks("repairs")


def test_names_of_the_set_are_checked() -> None:
    with pytest.raises(UsageError, match="'nothing'"):
        repairs.get_info("nothing")
    with pytest.raises(UsageError, match="'rows'"):
        repairs.folder("rows")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- boxes


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sandbox_without_a_compiler_is_reported_by_name(
    provider: Provider, tasks: dict[str, SweTask]
) -> None:
    box = await provider.create(SPEC, attempt="bare")
    try:
        few = 'mkdir bin && for name in bash sh python3 rm; do ln -s "$(command -v "$name")" bin; done'
        assert (await box.exec(Command(argv=("sh", "-c", few)))).ok
        bare = msgspec.structs.replace(tasks["turned-pictures"], env={"PATH": "/work/bin"})
        with pytest.raises(TaskError, match=r"gcc make$") as failed:
            await prepare(box, bare, timeout=60)
        assert failed.value.code == "task.setup"
    finally:
        await box.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", [name for name in NAMES if "git" in repairs.get_info(name).needs])
async def test_histories_end_in_the_files_and_belong_to_the_agent(
    provider: Provider, tasks: dict[str, SweTask], name: str
) -> None:
    async with ready(provider, tasks[name]) as made:

        async def git(*words: str) -> ExecResult:
            return await made._box.exec(Command(argv=("git", *words), cwd="/workspace"))

        assert (await git("status", "--porcelain")).stdout == b""
        assert len((await git("log", "--format=%s")).stdout.splitlines()) >= 2
        assert (await git("fsck")).ok


def test_scripts_are_sound() -> None:
    """What a shell can say about them without running them."""
    scripts = [path for path in repairs.folder().rglob("*.sh") if "seeds" not in path.parts]
    assert len(scripts) >= 3 * len(NAMES)
    for path in scripts:
        shell = "sh" if path.read_bytes().startswith(b"#!/bin/sh") else "bash"
        subprocess.run([shell, "-n", path], check=True)
