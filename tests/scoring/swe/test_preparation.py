"""Preparation of a sandbox for an agent."""

import json
from pathlib import Path

import msgspec
import pytest

from rookery.core import TaskError
from rookery.sandboxes import Command
from rookery.scoring.swe import prepare, prepare_step
from rookery.tasks import load_tasks
from rookery.tasks.cache import VARIABLE, TaskCache
from rookery.tasks.swe import FileMapping, SweStep, get_swe_task
from tests.scoring.swe.conftest import LOCAL
from tests.scoring.swe.small_task import Open, sh, small_task

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_files_belong_to_the_agent_and_tests_and_solutions_are_absent(
    open_sandbox: Open, tmp_path: Path
) -> None:
    (tmp_path / "setup.sh").write_text("pwd; id -u > made; test ! -e /tests\n")
    task = small_task(tmp_path, setup=str(tmp_path / "setup.sh"))
    sandbox = await open_sandbox(LOCAL)
    prepared = await prepare(sandbox, task, timeout=60)
    assert prepared.snapshot
    assert prepared.multi_user
    assert prepared.agent == 1000
    found = await sh(sandbox, "stat -c '%U %n' . calc.py made /logs/agent /logs/artifacts; cat made; ls -a / /tmp")
    assert found.splitlines()[:6] == [
        "user .",
        "user calc.py",
        "user made",
        "user /logs/agent",
        "user /logs/artifacts",
        "1000",
    ]
    assert "tests" not in found.split()
    assert "solution" not in found.split()
    assert ".sh" not in found
    assert await sh(sandbox, "grep -rs reward /tmp /workspace /logs /work | wc -l") == "0\n"
    assert await sandbox.diff(prepared.snapshot) == {}
    await sandbox.close()


async def test_failing_setup_is_a_task_fault_with_its_output(open_sandbox: Open, tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("echo it is broken >&2; exit 3\n")
    sandbox = await open_sandbox(LOCAL)
    with pytest.raises(TaskError, match=r"\b3: it is broken") as caught:
        await prepare(sandbox, small_task(tmp_path, setup=str(tmp_path / "setup.sh")), timeout=60)
    assert (caught.value.code, caught.value.fault) == ("task.setup", "task")
    elsewhere = small_task(tmp_path, files=(FileMapping(source=str(tmp_path), target="/usr/x"),))
    with pytest.raises(TaskError, match="/usr/x"):
        await prepare(sandbox, elsewhere, timeout=60)
    await sandbox.close()


async def test_symlinks_stay_symlinks_and_swapped_ones_read_nothing(
    open_sandbox: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    files = {
        "v1/a": "mine",
        "current": {"link": "v1"},
        "/workspace/top": {"link": "current/a"},
        "/tmp/app/b": "more",
        "/tmp/app/here": {"link": "b"},
    }
    row = {"id": "x", "instruction": "x", "files": files, "tests": {"test.sh": "exit 1"}}
    (tmp_path / "r.jsonl").write_text(json.dumps(row))
    (task,) = load_tasks(tmp_path / "r.jsonl")
    sandbox = await open_sandbox(LOCAL)
    await prepare(sandbox, get_swe_task(task), timeout=60)
    assert await sh(sandbox, "cat current/a top /tmp/app/here; readlink top /tmp/app/here") == (
        "mineminemorecurrent/a\nb\n"
    )
    await sandbox.close()

    (tmp_path / "secret").write_text("hunter2")
    swapped = small_task(tmp_path / "small")
    (tmp_path / "small" / "seeds").rename(tmp_path / "aside")
    (tmp_path / "small" / "seeds").symlink_to(tmp_path)
    for stolen in ("seeds", "seeds/secret"):
        files_ = (FileMapping(source=str(tmp_path / "small" / stolen), target="/workspace/stolen"),)
        sandbox = await open_sandbox(LOCAL)
        with pytest.raises(TaskError) as caught:
            await prepare(sandbox, msgspec.structs.replace(swapped, files=files_), timeout=60)
        assert caught.value.code == "task.setup"
        await sandbox.close()


async def test_directory_removed_from_the_cache_fails_before_anything_is_created(
    open_sandbox: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    cache = TaskCache().open()
    cached = cache.get_or_create("k", lambda folder: None, "it")
    sandbox = await open_sandbox(LOCAL)
    await prepare(sandbox, msgspec.structs.replace(small_task(tmp_path), folder=str(cached)), timeout=60)
    removed_task = msgspec.structs.replace(small_task(tmp_path), folder=str(cache.content / "gone"))
    with pytest.raises(TaskError, match=str(cache.content / "gone")) as caught:
        await prepare(sandbox, removed_task, timeout=60)
    assert caught.value.code == "task.setup"
    await sandbox.close()


async def test_git_history_after_the_tasks_commit_is_removed(open_sandbox: Open, tmp_path: Path) -> None:
    sandbox = await open_sandbox(LOCAL)
    await prepare(sandbox, small_task(tmp_path, history=True), timeout=60)
    assert (await sh(sandbox, "git log --all --reflog --format=%s")).split() == ["broken"]
    assert (
        await sh(sandbox, "git stash list; git tag; git remote; git reflog; git notes list; git fsck --full 2>&1")
        == ""
    )
    assert await sh(sandbox, "git status --porcelain") == ""
    everything = "git cat-file --batch-all-objects --batch --buffer | grep -ac SECRET || true"
    assert await sh(sandbox, everything) == "0\n"
    assert await sh(sandbox, "grep -ra SECRET .git | wc -l") == "0\n"
    assert (
        await sh(
            sandbox,
            "git -c user.name=a -c user.email=a commit -q --allow-empty -m x; git log --format=%s",
        )
        == "x\nbroken\n"
    )
    await sandbox.close()


async def test_nested_detached_and_empty_repositories_are_stripped(open_sandbox: Open, tmp_path: Path) -> None:
    task = small_task(tmp_path)
    seeds = tmp_path / "seeds"
    setup = """
    export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a
    export GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a
    mkdir -p sub/deep empty && git init -q empty && cd sub/deep
    git init -q . && echo 1 > f && git add f && git commit -qm one
    echo 2 > f && git commit -qam SECRET && git checkout -q HEAD~1
    """
    (tmp_path / "setup.sh").write_text(setup)
    task = small_task(tmp_path, setup=str(tmp_path / "setup.sh"))
    assert seeds.is_dir()
    sandbox = await open_sandbox(LOCAL)
    await prepare(sandbox, task, timeout=60)
    assert await sh(sandbox, "cd sub/deep && git log --all --reflog --format=%s && cat f") == "one\n1\n"
    assert (
        await sh(sandbox, "git -C sub/deep cat-file --batch-all-objects --batch | grep -ac SECRET || true")
        == "0\n"
    )
    await sandbox.close()


async def test_file_names_of_tasks_are_treated_as_data(open_sandbox: Open, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    names = ["$(touch owned)", "`id`", "-rf", "quo'te\"s", "new\nline", "a b"]
    for name in names:
        (odd / name).write_text("x")
    target = "/workspace/$(touch owned) 'x\n-y"
    task = small_task(
        tmp_path, id="$(touch owned)", workdir=target, files=(FileMapping(source=str(odd), target=target),)
    )
    sandbox = await open_sandbox(LOCAL)
    await prepare(sandbox, task, timeout=60)
    found = await sandbox.exec(Command(argv=("find", target, "-type", "f", "-printf", r"%f\0"), cwd="/"))
    assert sorted(found.stdout.decode().split("\0")[:-1]) == sorted(names)
    assert "owned" not in (await sh(sandbox, "ls / /tmp /workspace /work")).split()
    await sandbox.close()


async def test_setup_of_a_later_step_runs_in_the_same_sandbox(open_sandbox: Open, tmp_path: Path) -> None:
    (tmp_path / "one.sh").write_text("echo first >> order\n")
    (tmp_path / "two.sh").write_text("echo second >> order\n")
    (tmp_path / "extra").write_text("x")
    one = SweStep(instruction="a", setup=str(tmp_path / "one.sh"))
    extra = (FileMapping(source=str(tmp_path / "extra"), target="/workspace/extra"),)
    two = SweStep(instruction="b", setup=str(tmp_path / "two.sh"), files=extra)
    task = small_task(tmp_path, steps=(one, two))
    sandbox = await open_sandbox(LOCAL)
    await prepare(sandbox, task, timeout=60)
    await prepare_step(sandbox, task, one, timeout=60)
    await sh(sandbox, "echo agent >> order")
    await prepare_step(sandbox, task, two, timeout=60)
    assert await sh(sandbox, "cat order extra") == "first\nagent\nsecond\nx"
    await sandbox.close()
