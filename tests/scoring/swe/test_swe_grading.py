"""Tests of SWE grading: the reward of a submission, and whose fault it is if there is none."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.core import ScoringError, TaskError
from rookery.scoring.swe import SweGrader, prepare
from rookery.scoring.swe.grading import SAME_USER
from rookery.tasks.swe import FileMapping, SweStep
from tests.scoring.swe.conftest import LOCAL
from tests.scoring.swe.small_task import FIXED, REPAIR, STRONG, WEAK, Open, attempt, sh, small_task

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = msgspec.structs.replace(LOCAL, user="root")
MODES = ("fresh", "shared")


@pytest.mark.long
@pytest.mark.parametrize("user", ["user", "root"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", [STRONG, WEAK], ids=["strong", "weak"])
async def test_repair_gets_the_full_reward_and_no_change_gets_none(
    open_sandbox: Open, tmp_path: Path, mode: str, script: str, user: str
) -> None:
    spec = ROOT if user == "root" else LOCAL
    task = small_task(tmp_path, script=script, mode=mode)
    for what, reward in (("", 0.0), (REPAIR, 1.0)):
        grade = await attempt(open_sandbox, task, what, spec=spec)
        assert (grade.reward, grade.mode, grade.source, grade.runs) == (reward, mode, "reward.txt", 1), grade
        assert grade.weaker == ("" if script is STRONG else SAME_USER)


async def test_script_and_program_run_as_different_users(open_sandbox: Open, tmp_path: Path) -> None:
    looks = """#!/bin/bash
    id -u; stat -c '%U %a' /logs/verifier /tests /grader; echo "$HOME $PWD"
    "$ROOKERY_RUN" sh -c 'id -u; ls /tests /logs/verifier /grader 2>&1 | wc -l; ls calc.py
      env | grep -c ROOKERY_RUN; touch ok; echo 1 > /logs/verifier/reward.txt'
    echo 0.5 > /logs/verifier/reward.txt
    """
    for spec, program in ((LOCAL, "1000"), (ROOT, "65533")):
        grade = await attempt(open_sandbox, small_task(tmp_path, script=looks), spec=spec)
        assert grade.reward == 0.5
        output = grade.stdout.split("\n")
        assert output[:5] == ["0", "root 700", "root 700", "root 700", "/grader/home /workspace"], grade
        assert output[5:9] == [program, "3", "calc.py", "0"]


@pytest.mark.long
async def test_program_under_test_gets_input_and_limits_and_returns_its_output(
    open_sandbox: Open, tmp_path: Path
) -> None:
    script = r"""#!/bin/bash
    cd /workspace/tests
    printf 'a\0b' | "$ROOKERY_RUN" sh -c 'pwd; od -An -c; echo "$1" >&2; exit 7' sh "two words; \$(id)" 2>&1
    echo $?
    "$ROOKERY_RUN" -t 0.3 sleep 60; echo late $?
    timeout 0.5 "$ROOKERY_RUN" sleep 61; echo killed $?
    "$ROOKERY_RUN" sh -c 'kill -9 $$'; echo signal $?
    "$ROOKERY_RUN" /no/such/program 2>/dev/null; echo missing $?
    "$ROOKERY_RUN" sh -c 'head -c 5000000 /dev/zero' | wc -c | { read n; [ $n -lt 5000000 ] && echo bounded; }
    for i in 1 2 3 4; do "$ROOKERY_RUN" sh -c "echo $i" & done; wait
    while "$ROOKERY_RUN" pgrep -x sleep > /dev/null; do sleep 0.05; done; echo gone
    echo 1 > /logs/verifier/reward.json
    """
    grade = await attempt(open_sandbox, small_task(tmp_path, script=script), spec=LOCAL)
    assert (grade.reward, grade.source) == (1.0, "reward.json"), grade
    output = [line.strip() for line in grade.stdout.splitlines()]
    first = ["/workspace/tests", "a  \\0   b", "two words; $(id)", "7", "late 124", "killed 124", "signal 137"]
    assert output[:7] == first
    assert output[7:9] == ["missing 127", "bounded"]
    assert sorted(output[9:13]) == ["1", "2", "3", "4"]
    assert output[13] == "gone"


@pytest.mark.long
@pytest.mark.parametrize(
    ("writes", "code"),
    [
        ("exit 0", "missing"),
        (": > /logs/verifier/reward.txt", "empty"),
        ("echo maybe > /logs/verifier/reward.txt", "unparsable"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "unparsable"),
        ("mkfifo /logs/verifier/reward.json", "unparsable"),
        ("mkdir /logs/verifier/reward.txt", "unparsable"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "unparsable"),
        ("echo nan > /logs/verifier/reward.txt", "infinite"),
        ("echo 7 > /logs/verifier/reward.txt", "range"),
    ],
)
async def test_invalid_reward_is_a_fault_and_never_zero(
    open_sandbox: Open, tmp_path: Path, writes: str, code: str
) -> None:
    task = small_task(tmp_path, script=f"# ROOKERY_RUN\n{writes}\n", reward_from_exit=False)
    with pytest.raises(ScoringError) as caught:
        await attempt(open_sandbox, task, spec=LOCAL)
    assert (caught.value.code, caught.value.fault) == (f"scoring.{code}", "task")


async def test_exit_code_is_the_verdict_if_the_task_says_so(open_sandbox: Open, tmp_path: Path) -> None:
    script = '"$ROOKERY_RUN" python3 -c "from calc import add; print(add(1, 1))" | grep -qx 2'
    for what, reward in (("", 0.0), (REPAIR, 1.0)):
        grade = await attempt(open_sandbox, small_task(tmp_path, script=script), what, spec=LOCAL)
        assert (grade.reward, grade.source) == (reward, "exit")


@pytest.mark.long
async def test_script_that_fails_twice_with_a_submission_gives_the_minimum(
    open_sandbox: Open, tmp_path: Path
) -> None:
    crash = "#!/bin/sh\n# ROOKERY_RUN\n! grep -q slow calc.py || kill -9 $$\necho 1 > /logs/verifier/reward.txt\n"
    task = small_task(tmp_path, script=crash, reward_from_exit=False)
    grade = await attempt(open_sandbox, task, "echo slow >> calc.py", spec=LOCAL)
    assert (grade.reward, grade.runs, grade.score.metrics["grade/crash"]) == (0.0, 2, 1.0)
    hangs = crash.replace("kill -9 $$", "sleep 100")
    task = small_task(tmp_path, script=hangs, timeout=0.4)
    grade = await attempt(open_sandbox, task, "echo slow >> calc.py", spec=LOCAL, low=-1.0)
    assert (grade.reward, grade.score.metrics["grade/time"]) == (-1.0, 1.0)


async def test_script_that_also_fails_with_the_solution_is_a_task_fault(
    open_sandbox: Open, tmp_path: Path
) -> None:
    task = small_task(tmp_path, script="# ROOKERY_RUN\nkill -9 $$\n")
    with pytest.raises(TaskError, match=task.id) as caught:
        await attempt(open_sandbox, task, spec=LOCAL)
    assert (caught.value.code, caught.value.fault) == ("scoring.missing", "task")


BOMB = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    while True:
        try:
            if os.fork() == 0:
                time.sleep(600)
        except OSError:
            time.sleep(0.001)
time.sleep(1)
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["by the agent", "by the program under test"])
async def test_program_at_the_process_limit_does_not_stall_grading(
    open_sandbox: Open, tmp_path: Path, where: str
) -> None:
    spec = msgspec.structs.replace(LOCAL, pids=32)
    script = """#!/bin/bash
    "$ROOKERY_RUN" python3 -c "$(cat /tests/driver.py)" < /tests/inputs.json > /logs/verifier/answers
    python3 /tests/check.py < /logs/verifier/answers
    """
    task = small_task(tmp_path, script=script, timeout=600.0)
    bomb = f"cat > bomb.py <<'E'\n{BOMB}E\n"
    what = f"{REPAIR}\n{bomb}\npython3 bomb.py"
    if where == "by the program under test":
        what = f"{REPAIR}\ncat >> calc.py <<'E'\n{BOMB}E\n"
    async with asyncio.timeout(90):
        grade = await attempt(open_sandbox, task, what, spec=spec)
    assert grade.reward in (0.0, 1.0)
    assert grade.runs <= 2


async def test_oversized_submission_gets_the_minimum(open_sandbox: Open, tmp_path: Path) -> None:
    grade = await attempt(open_sandbox, small_task(tmp_path), f"{REPAIR}\ntruncate -s 300M hole", spec=LOCAL)
    assert grade.reward == 0.0
    assert grade.detail


async def test_working_directory_and_artifacts_are_graded_as_they_are(open_sandbox: Open, tmp_path: Path) -> None:
    looks = r"""
    # ROOKERY_RUN
    "$ROOKERY_RUN" find . /work/out -printf '%P|%y|%m|%l\n' | sort; cat 'new
line' /work/out/b; [ ! -e /work/other ] && [ ! -e run.sh ] && [ ! -e tests ] && echo 1 > /logs/verifier/reward.txt
    """
    does = r"""
    mkdir -p /work/out dir/empty; echo b > /work/out/b; echo x > /work/other; rm -r run.sh tests
    printf text > 'new
line'; chmod 640 calc.py; chmod 750 dir; ln -s calc.py link; ln -s /etc/shadow secret; ln -s .. dir/up; mkfifo pipe
    rm pyproject.toml; mkdir pyproject.toml; echo in > pyproject.toml/in; touch ./-rf '$(touch owned)'
    """
    task = small_task(tmp_path, script=looks, artifacts=("/work/out",))
    grade = await attempt(open_sandbox, task, does, spec=LOCAL)
    assert grade.reward == 1.0, grade
    output = set(grade.stdout.splitlines())
    assert {"calc.py|f|640|", "dir|d|750|", "dir/empty|d|755|", "link|l|777|calc.py", "dir/up|l|777|.."} <= output
    assert {
        "secret|l|777|/etc/shadow",
        "pyproject.toml/in|f|644|",
        "$(touch owned)|f|644|",
        "-rf|f|644|",
        "textb",
    } <= output
    assert not any(line.startswith(("pipe", "owned")) for line in output)
    assert grade.left_out == 1


async def test_weak_script_gets_runner_configuration_and_tests_of_the_task(
    open_sandbox: Open, tmp_path: Path
) -> None:
    looks = """
    for f in conftest.py pytest.ini setup.cfg a.pth pytest.py sub/conftest.py .bashrc; do
      [ ! -e $f ] || echo "planted $f"; done
    cat tests/test_calc.py; ls tests; grep -c addopts pyproject.toml; grep mine other/pyproject.toml
    echo 1 > /logs/verifier/reward.txt
    """
    does = """
    mkdir -p sub other
    for f in conftest.py pytest.ini a.pth pytest.py sub/conftest.py .bashrc; do echo evil > $f; done
    printf '[tool:pytest]\\naddopts=-p evil\\n' > setup.cfg; rm tests/test_calc.py; echo mine > tests/test_mine.py
    printf '\\n[tool.pytest.ini_options]\\naddopts = "-p evil"\\n' >> pyproject.toml
    printf '[project]\\nname = "mine"\\n' > other/pyproject.toml
    """
    for mode in MODES:
        grade = await attempt(open_sandbox, small_task(tmp_path, script=looks, mode=mode), does, spec=LOCAL)
        output = grade.stdout.splitlines()
        assert output[:3] == ["def test_nothing(): pass", "test_calc.py", "test_mine.py"], grade
        assert output[3:] == ["0", 'name = "mine"']


async def test_shared_sandbox_restores_the_system_and_keeps_new_files(open_sandbox: Open, tmp_path: Path) -> None:
    looks = """
    # ROOKERY_RUN
    ls /work/made 2>&1; cat /work/.bashrc 2>/dev/null; pgrep -x sleep | wc -l; cat /work/sitecustomize.py
    echo 1 > /logs/verifier/reward.txt
    """
    does = "echo x > /work/made; echo evil > /work/sitecustomize.py; sleep 1000 & echo evil > /work/.bashrc"
    grade = await attempt(open_sandbox, small_task(tmp_path, script=looks, mode="shared"), does, spec=LOCAL)
    assert grade.stdout == "/work/made\n0\n", grade


async def test_services_stay_alive_if_the_task_says_so_and_tests_are_removed(
    open_sandbox: Open, tmp_path: Path
) -> None:
    looks = """
    # ROOKERY_RUN
    pgrep -x sleep > /dev/null && cat /tests/expected.json > /dev/null && echo 1 > /logs/verifier/reward.txt
    """
    task = small_task(tmp_path, script=looks, mode="shared", services=True)
    sandbox = await open_sandbox(LOCAL)
    prepared = await prepare(sandbox, task, timeout=60)
    await sh(sandbox, "sleep 1000 > /dev/null 2>&1 &")
    grade = await SweGrader(open_sandbox, task).grade(sandbox, prepared, 0, timeout=60)
    assert (grade.reward, grade.mode, grade.weaker) == (1.0, "shared", "")
    assert (
        await sh(sandbox, "ls -d /tests /grader /logs/verifier 2>/dev/null | wc -l; pgrep -x sleep | wc -l")
        == "0\n1\n"
    )
    await sandbox.close()


async def test_agent_sandbox_contains_no_test_and_steps_are_graded_separately(
    open_sandbox: Open, tmp_path: Path
) -> None:
    task = small_task(tmp_path)
    steps = (task.steps[0], msgspec.structs.replace(task.steps[0], name="again"))
    task = msgspec.structs.replace(task, steps=steps)
    sandbox = await open_sandbox(LOCAL)
    prepared = await prepare(sandbox, task, timeout=60)
    grader = SweGrader(open_sandbox, task)
    assert (await grader.grade(sandbox, prepared, 0, timeout=60)).reward == 0.0
    assert "tests" not in (await sh(sandbox, "ls /")).split()
    await sh(sandbox, REPAIR)
    assert (await grader.grade(sandbox, prepared, 1, timeout=60)).reward == 1.0
    await sandbox.close()


async def test_shared_task_can_be_graded_in_a_fresh_sandbox(open_sandbox: Open, tmp_path: Path) -> None:
    looks = """
    # ROOKERY_RUN
    [ -f /work/made ] && [ ! -e /tmp/left ] && grep -q 'a + b' calc.py && echo 1 > /logs/verifier/reward.txt
    """
    task = small_task(tmp_path, script=looks, mode="shared")
    does = f"{REPAIR}\necho x > /work/made; echo x > /tmp/left"
    grade = await attempt(open_sandbox, task, does, spec=LOCAL, fresh_always=True)
    assert (grade.reward, grade.mode) == (1.0, "fresh"), grade


async def test_without_snapshots_whole_directories_are_copied(open_sandbox: Open, tmp_path: Path) -> None:
    task = small_task(tmp_path)
    sandbox = await open_sandbox(LOCAL)
    prepared = msgspec.structs.replace(await prepare(sandbox, task, timeout=60), snapshot="")
    await sh(sandbox, f"{REPAIR}\nrm run.sh")
    grade = await SweGrader(open_sandbox, task).grade(sandbox, prepared, 0, timeout=60)
    assert grade.reward == 1.0, grade
    await sandbox.close()


async def test_tests_that_cannot_be_started_are_a_task_fault(open_sandbox: Open, tmp_path: Path) -> None:
    for changes in ({"script": "#!/no/such/interpreter\n# ROOKERY_RUN\n"}, {"tests": ()}):
        with pytest.raises(TaskError):
            await attempt(open_sandbox, small_task(tmp_path, **changes), spec=LOCAL)


async def test_later_steps_are_graded_with_files_of_earlier_steps(open_sandbox: Open, tmp_path: Path) -> None:
    one = small_task(tmp_path).steps[0]
    (tmp_path / "setup.sh").write_text("echo brought > brought\n")
    second: Any = {"name": "two", "setup": str(tmp_path / "setup.sh")}
    script = tmp_path / "tests2"
    script.mkdir()
    (script / "test.sh").write_text(
        "# ROOKERY_RUN\ngrep -q 'a + b' calc.py && echo 1 > /logs/verifier/reward.txt\n"
    )
    two = msgspec.structs.replace(one, tests=(FileMapping(source=str(script), target="/tests"),), **second)
    task = small_task(tmp_path, steps=(one, two))
    assert isinstance(two, SweStep)
    assert FIXED
    sandbox = await open_sandbox(LOCAL)
    prepared = await prepare(sandbox, task, timeout=60)
    await sh(sandbox, REPAIR)
    assert (await SweGrader(open_sandbox, task).grade(sandbox, prepared, 1, timeout=60)).reward == 1.0
    await sandbox.close()
