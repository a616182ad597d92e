"""The taskset `repairs`: both formats have one source; correct solutions score one, wrong ones do not."""

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
from tests.environments.swe.wrong_repairs import CHEATS, WRONG, apply_edits, read_texts

SPEC = SandboxSpec(provider="local", wall=600.0)
pytestmark = pytest.mark.timeout(900)  # the machine may be busy
NAMES = repairs.names()
FEW = ("backup-rotation", "cache-expiry", "word-splitter")
"""One task of each language, one of them with reward parts, for tests that would take too long with all."""
TIMES = (20, 5) if os.environ.get("ROOKERY_REPAIRS_ALL") else (2, 1)
"""Numbers of gradings of a correct and of a wrong solution. The full numbers take a quarter of an hour."""


@pytest.fixture(autouse=True, scope="module")
def task_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a separate task cache."""
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


class PreparedTask:
    """A prepared sandbox of a task; each submission is graded in a fork of it."""

    def __init__(
        self, provider: Provider, task: SweTask, spec: SandboxSpec, sandbox: Sandbox, prepared: PreparedSandbox
    ) -> None:
        self._provider, self._task, self._spec = provider, task, spec
        self._sandbox, self._prepared = sandbox, prepared

    async def _open(self, spec: SandboxSpec) -> Sandbox:
        return await self._provider.create(spec, attempt="grading")

    async def grade(self, files: dict[str, str] | None = None, *, solved: bool = False) -> SweGrade:
        """Grade the given files, on top of the reference solution if `solved`."""
        step = self._task.steps[0]
        sandbox = await self._sandbox.fork(self._prepared.snapshot)
        try:
            if solved:
                await run_solution(
                    sandbox, self._task, step, multi_user=self._prepared.multi_user, deadline=Deadline(300)
                )
            for name, text in (files or {}).items():
                await sandbox.write(f"{self._task.workdir}/{name}", text.encode())
            grader = SweGrader(self._open, self._task)
            return await grader.grade(sandbox, self._prepared, 0, timeout=1_500)
        finally:
            await sandbox.close()


@asynccontextmanager
async def prepare_task(provider: Provider, task: SweTask, spec: SandboxSpec = SPEC) -> AsyncIterator[PreparedTask]:
    sandbox = await provider.create(spec, attempt=task.id)
    try:
        yield PreparedTask(provider, task, spec, sandbox, await prepare(sandbox, task, timeout=300))
    finally:
        await sandbox.close()


async def grade_wrong_repair(task: SweTask, made: PreparedTask, label: str) -> SweGrade:
    wrong = WRONG[task.id][label]
    top = Path(task.folder)
    files = read_texts(top / "environment" / "seeds")
    if wrong.over == "repaired":
        files |= read_texts(top / "solution" / "files")
    return await made.grade(apply_edits(files, wrong.edits), solved=wrong.over == "repaired")


# ------------------------------ grading


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", FEW)
async def test_reference_solution_scores_one_and_no_change_scores_zero(
    provider: Provider, tasks: dict[str, SweTask], name: str
) -> None:
    async with prepare_task(provider, tasks[name]) as made:
        await check_reference_solution_and_no_change(made, name)


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", NAMES)
async def test_repeated_gradings_of_right_and_wrong_repairs_agree(
    provider: Provider, tasks: dict[str, SweTask], name: str
) -> None:
    """Inputs are new in each grading, but the verdict is always the same."""
    right, wrong = TIMES
    async with prepare_task(provider, tasks[name]) as made:
        for _ in range(right):
            await check_reference_solution_and_no_change(made, name)
        for label in WRONG[name]:
            for _ in range(wrong):
                await check_wrong_repair(tasks[name], made, label)


async def check_reference_solution_and_no_change(made: PreparedTask, name: str) -> None:
    right = await made.grade(solved=True)
    assert right.reward == 1.0, right
    assert right.weaker == "", right
    assert dict(right.parts) == dict.fromkeys(repairs.get_info(name).parts, 1.0)
    broken = await made.grade()
    assert broken.reward == 0.0, broken
    assert broken.detail == "", broken


async def check_wrong_repair(task: SweTask, made: PreparedTask, label: str) -> None:
    grade = await grade_wrong_repair(task, made, label)
    parts = WRONG[task.id][label].parts
    assert dict(grade.parts) == (parts or {}), (label, grade)
    assert grade.reward == (sum(parts.values()) / len(parts) if parts else 0.0), (label, grade)
    assert grade.reward < 1.0


# ------------------------------------------------------------------------------------------------------ cheats


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
async def test_cheating_submissions_score_zero(provider: Provider, tasks: dict[str, SweTask]) -> None:
    async with prepare_task(provider, tasks["cache-expiry"]) as made:
        for label, files in CHEATS.items():
            grade = await made.grade(files)
            assert grade.reward == 0.0, (label, grade)
            assert grade.source == "reward.txt", (label, grade)


# ------------------------------------------------------------------------------------------------- both formats


def test_taskset_covers_languages_and_difficulties() -> None:
    found = [repairs.get_info(name) for name in NAMES]
    assert len(found) >= 14
    assert {"Python", "bash", "C"} <= {one.language for one in found}
    assert {one.difficulty for one in found} == {"easy", "medium", "hard"}
    assert set(WRONG) == set(NAMES)
    assert min(map(len, WRONG.values())) >= 2
    assert sum(bool(one.parts) for one in found) >= 2


@pytest.mark.parametrize("kind", repairs.FORMATS)
def test_every_task_loads_in_both_formats(kind: repairs.RepairsFormat) -> None:
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


def test_task_directories_are_cached_and_deterministic(tmp_path: Path) -> None:
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


def test_agent_does_not_get_the_solution() -> None:
    """The solution is neither in the files nor in the script that makes their history."""
    for name in NAMES:
        top = repairs.folder() / name
        solution = read_texts(top / "solution" / "files")
        seen = read_texts(top / "environment" / "seeds")
        for path, text in solution.items():
            assert text != seen.get(path), (name, path)
            assert text not in (top / "setup.sh").read_text()


def test_documentation_lists_every_task() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "repairs.md").read_text()
    for name in NAMES:
        found = repairs.get_info(name)
        assert f"| `{name}` | {found.language} | {found.difficulty} | {found.description} |" in page
    assert page.count("\n| `") == len(NAMES)


def test_taskset_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [task.id for task in load_tasks("repairs")] == list(NAMES)
    assert load_tasks("repairs").source == "repairs"
    assert {get_swe_task(task).format for task in load_tasks("repairs-harbor")} == {"harbor"}
    assert list(SweEnvironment().tasks()) == list(repairs.repairs())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repairs").mkdir()
    with pytest.raises(UsageError, match="repairs"):
        load_tasks("repairs")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="'nothing'"):
        repairs.get_info("nothing")
    with pytest.raises(UsageError, match="'rows'"):
        repairs.folder("rows")  # type: ignore[arg-type]


# ------------------------------ sandboxes


@pytest.mark.asyncio(loop_scope="module")
async def test_setup_names_missing_programs(provider: Provider, tasks: dict[str, SweTask]) -> None:
    sandbox = await provider.create(SPEC, attempt="bare")
    try:
        script = 'mkdir bin && for name in bash sh python3 rm; do ln -s "$(command -v "$name")" bin; done'
        assert (await sandbox.exec(Command(argv=("sh", "-c", script)))).ok
        bare = msgspec.structs.replace(tasks["turned-pictures"], env={"PATH": "/work/bin"})
        with pytest.raises(TaskError, match=r"gcc make$") as failed:
            await prepare(sandbox, bare, timeout=60)
        assert failed.value.code == "task.setup"
    finally:
        await sandbox.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", [name for name in NAMES if "git" in repairs.get_info(name).needs])
async def test_git_histories_are_clean_and_valid(provider: Provider, tasks: dict[str, SweTask], name: str) -> None:
    async with prepare_task(provider, tasks[name]) as made:

        async def git(*words: str) -> ExecResult:
            return await made._sandbox.exec(Command(argv=("git", *words), cwd="/workspace"))

        assert (await git("status", "--porcelain")).stdout == b""
        assert len((await git("log", "--format=%s")).stdout.splitlines()) >= 2
        assert (await git("fsck")).ok


def test_scripts_have_valid_syntax() -> None:
    """Check the syntax of all scripts without running them."""
    scripts = [path for path in repairs.folder().rglob("*.sh") if "seeds" not in path.parts]
    assert len(scripts) >= 3 * len(NAMES)
    for path in scripts:
        shell = "sh" if path.read_bytes().startswith(b"#!/bin/sh") else "bash"
        subprocess.run([shell, "-n", path], check=True)
