"""Failures that a submission causes are never attributed to the infrastructure or the task."""

from pathlib import Path

import msgspec
import pytest

from rookery.core import ScoringError, TaskError
from rookery.scoring.swe.grading import get_wall_time
from rookery.tasks.swe import GRADING_TIME_SHARE, SweStep, SweTask, Verifier, grading_budget, make_task
from tests.scoring.swe.conftest import LOCAL
from tests.scoring.swe.small_task import REPAIR, STRONG, WEAK, Open, attempt, small_task

with_sandboxes = pytest.mark.asyncio(loop_scope="module")
ROOT = msgspec.structs.replace(LOCAL, user="root")
MODES = ("fresh", "shared")

ATTRIBUTES = f"""{REPAIR}
python3 - <<'E'
import os
for n in range(300):
    try: os.setxattr('calc.py', 'user.' + 'x%03d' % n + 'a' * 245, b'v')
    except OSError: break
E
"""


def long_path(start: str, name: str) -> str:
    """Return a script that creates a file with a path of 7,500 characters."""
    return (
        f"{REPAIR}\npython3 - <<'E'\nimport os\nos.chdir('{start}')\nfor n in range(30):\n"
        f"    os.mkdir('d' * 250); os.chdir('d' * 250)\nopen('{name}', 'w').write('x')\nE\n"
    )


# ---- the working folder


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", [STRONG, WEAK], ids=["strong", "weak"])
@pytest.mark.parametrize("does", ["chmod 700 .", "chmod 000 .", "chmod 111 .", "cd / && rm -rf /workspace"])
@with_sandboxes
async def test_unusable_working_directory_is_the_submissions_fault(
    open_sandbox: Open, tmp_path: Path, mode: str, script: str, does: str
) -> None:
    for solution in (None, ()):
        changes = {} if solution is None else {"solution": solution}
        task = small_task(tmp_path, script=script, mode=mode, **changes)
        grade = await attempt(open_sandbox, task, does, spec=LOCAL)
        assert grade.reward == 0.0, grade


@with_sandboxes
async def test_tests_that_never_start_are_a_task_fault(open_sandbox: Open, tmp_path: Path) -> None:
    task = small_task(tmp_path, script="#!/no/such/interpreter\n# ROOKERY_RUN\n", solution=())
    for does in ("", "chmod 700 ."):
        with pytest.raises(TaskError) as caught:
            await attempt(open_sandbox, task, does, spec=LOCAL)
        assert caught.value.code == "task.image"


# ---- time


@pytest.mark.parametrize("timeout", [1.0, 60.0, 539.0, 541.0, 600.0, 3600.0, 86_400.0])
def test_grading_time_suffices_for_every_run(timeout: float) -> None:
    steps = tuple(
        SweStep(name=name, instruction="", timeout=10.0, verifier=Verifier(timeout=timeout)) for name in "ab"
    )
    limits = make_task(SweTask(id="long", format="rows", folder="", steps=steps)).limits
    assert limits.score is not None
    assert limits.run is not None
    assert get_wall_time(timeout, GRADING_TIME_SHARE * limits.score) == timeout
    assert limits.run >= 20.0 + 3 * timeout
    assert get_wall_time(timeout, grading_budget(steps[0], float("inf"))) == timeout


HANGS = (
    "#!/bin/sh\n# ROOKERY_RUN\nif grep -q slow calc.py; then sleep 1000; fi\necho 1 > /logs/verifier/reward.txt\n"
)


@pytest.mark.long
@pytest.mark.parametrize("solution", [True, False], ids=["solution", "none"])
@with_sandboxes
async def test_hanging_submission_gets_the_minimum_with_little_time(
    open_sandbox: Open, tmp_path: Path, solution: bool
) -> None:
    changes = {} if solution else {"solution": ()}
    task = small_task(tmp_path, script=HANGS, timeout=600.0, **changes)
    grade = await attempt(open_sandbox, task, "echo slow >> calc.py", spec=LOCAL, low=-1.0, seconds=30.0)
    assert (grade.reward, grade.score.metrics["grade/time"]) == (-1.0, 1.0), grade


@pytest.mark.long
@with_sandboxes
async def test_solution_without_enough_time_is_no_evidence_against_the_task(
    open_sandbox: Open, tmp_path: Path
) -> None:
    task = small_task(tmp_path, script="# ROOKERY_RUN\nsleep 1000\n", timeout=600.0)
    grade = await attempt(open_sandbox, task, REPAIR, spec=LOCAL, seconds=30.0)
    assert grade.reward == 0.0, grade
    (tmp_path / "solution" / "solve.sh").write_text("#!/bin/sh\nsleep 1000\n")
    grade = await attempt(open_sandbox, small_task_again(tmp_path, task), REPAIR, spec=LOCAL, seconds=30.0)
    assert grade.reward == 0.0, grade


def small_task_again(folder: Path, task: SweTask) -> SweTask:
    """Return the same task with its files as they are now."""
    return msgspec.structs.replace(task, folder=str(folder))


# ---- verdicts that a submission can write

FORGES = "#!/bin/sh\npython3 -c 'import sys; sys.path.insert(0, \".\"); import calc'\n"


@pytest.mark.long
@pytest.mark.parametrize("solution", [True, False], ids=["solution", "none"])
@pytest.mark.parametrize("wrote", ["{", "", "NaN", "9", "[1]", '{"a": "b"}', "[" * 10_000])
@with_sandboxes
async def test_invalid_verdict_that_the_submission_could_write_scores_the_minimum(
    open_sandbox: Open, tmp_path: Path, wrote: str, solution: bool
) -> None:
    changes = {} if solution else {"solution": ()}
    script = f"{FORGES}[ -e /logs/verifier/reward.json ] || echo 0 > /logs/verifier/reward.json\n"
    task = small_task(tmp_path, script=script, reward_from_exit=False, **changes)
    does = f"cat > calc.py <<'E'\nopen('/logs/verifier/reward.json', 'w').write({wrote!r})\nE\n"
    grade = await attempt(open_sandbox, task, does, spec=LOCAL, low=-1.0)
    assert grade.reward == -1.0, grade
    assert grade.weaker


@with_sandboxes
async def test_weak_script_without_reward_in_an_untouched_sandbox_is_a_task_fault(
    open_sandbox: Open, tmp_path: Path
) -> None:
    task = small_task(
        tmp_path, script="echo maybe > /logs/verifier/reward.txt\n", reward_from_exit=False, solution=()
    )
    with pytest.raises(ScoringError) as caught:
        await attempt(open_sandbox, task, REPAIR, spec=LOCAL)
    assert (caught.value.code, caught.value.fault) == ("scoring.unparsable", "task")


@pytest.mark.parametrize("solution", [True, False], ids=["solution", "none"])
@with_sandboxes
async def test_submission_that_confuses_a_strong_script_is_not_a_task_fault(
    open_sandbox: Open, tmp_path: Path, solution: bool
) -> None:
    changes = {} if solution else {"solution": ()}
    script = (
        '#!/bin/sh\n"$ROOKERY_RUN" python3 -c "import calc; print(calc.add(1, 0))" > /logs/verifier/reward.txt\n'
    )
    task = small_task(tmp_path, script=script, reward_from_exit=False, **changes)
    grade = await attempt(open_sandbox, task, "echo 'def add(*a): return float(\"nan\")' > calc.py", spec=LOCAL)
    assert grade.reward == 0.0, grade


# ---- files that cannot be carried


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", [STRONG, WEAK], ids=["strong", "weak"])
@pytest.mark.parametrize(
    "does",
    [
        ATTRIBUTES,
        ATTRIBUTES.replace("'calc.py'", "'.'"),
        ATTRIBUTES.replace("'calc.py'", "'/work'"),
        long_path(".", "f"),
        long_path(".", "conftest.py"),
        long_path(".", "pyproject.toml"),
        long_path("/work", ".bashrc"),
    ],
    ids=["file", "folder", "elsewhere", "path", "runner", "mixed", "start"],
)
@with_sandboxes
async def test_attributes_and_paths_that_cannot_be_copied_are_the_submissions_fault(
    open_sandbox: Open, tmp_path: Path, mode: str, script: str, does: str
) -> None:
    grade = await attempt(open_sandbox, small_task(tmp_path, script=script, mode=mode), does, spec=LOCAL)
    assert grade.reward in (0.0, 1.0), grade


# ---- files that configure or start a test runner

PLANTED = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p evil'\n",
    "setup.cfg": "[tool:pytest]\naddopts = -p evil\n",
    "tox.ini": "[pytest]\naddopts = -p evil\n",
    "package.json": '{"scripts": {"test": "true"}}',
    "pytest.ini": "[pytest]\naddopts = -p evil\n",
    "conftest.py": "import evil\n",
    "sub/tox.ini": "[pytest]\naddopts = -p evil\n",
}
WAYS = {
    "link": "for f in {names}; do mv -f $f odd-${{f##*/}}.txt; ln -s $PWD/odd-${{f##*/}}.txt $f; done",
    "relative link": "for f in {names}; do mv -f $f odd; ln -s odd $f; done",
    "large": "for f in {names}; do head -c 1100000 /dev/zero | tr '\\0' '#' >> $f; done",
    "folder": "for f in {names}; do rm -f $f; mkdir $f; echo evil > $f/in; done",
    "fifo": "for f in {names}; do rm -f $f; mkfifo $f; done",
    "form feed": "for f in setup.cfg tox.ini; do (printf '[metadata]\\nx = 1\\f'; cat $f) > odd; mv odd $f; done",
}  # fmt: skip
LISTS = """
grep -l evil pyproject.toml setup.cfg tox.ini package.json pytest.ini conftest.py sub/tox.ini 2>/dev/null
for f in setup.cfg tox.ini package.json pytest.ini conftest.py sub/tox.ini; do
  [ ! -L $f ] && [ ! -f $f ] || echo $f
done
[ -f pyproject.toml ] && [ ! -L pyproject.toml ] || echo no pyproject.toml
echo 1 > /logs/verifier/reward.txt
"""


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
@with_sandboxes
async def test_unreadable_runner_configuration_is_not_graded(
    open_sandbox: Open, tmp_path: Path, mode: str, way: str
) -> None:
    writes = "mkdir -p sub\n" + "".join(f"cat > {name} <<'E'\n{text}E\n" for name, text in PLANTED.items())
    does = writes + WAYS[way].format(names=" ".join(PLANTED))
    grade = await attempt(open_sandbox, small_task(tmp_path, script=LISTS, mode=mode), does, spec=LOCAL)
    assert (grade.reward, grade.stdout) == (1.0, ""), grade


@pytest.mark.parametrize("mode", MODES)
@with_sandboxes
async def test_modules_that_shadow_the_standard_library_are_not_graded(
    open_sandbox: Open, tmp_path: Path, mode: str
) -> None:
    planted = (
        "json.py",
        "random.py",
        "tests/re.py",
        "ast.pyc",
        "csv.cpython-311-x86_64-linux-gnu.so",
        "typing/in.py",
    )
    does = "mkdir -p typing src queue\n" + "".join(f"echo evil > {name}\n" for name in planted)
    does += "echo mine > src/types.py; echo mine > statistics.py; echo mine > queue/in.py; echo mine > queue.txt"
    # The script must not mention the planted module, because a task that mentions a module asks for it.
    looks = "ls *.* typing tests src 2>/dev/null; cat statistics.py; ls queue; echo 1 > /logs/verifier/reward.txt"
    task = small_task(tmp_path, script=looks, mode=mode, instruction="Write statistics.py and the folder queue/.")
    grade = await attempt(open_sandbox, task, does, spec=LOCAL)
    output = grade.stdout.split()
    assert grade.reward == 1.0, grade
    assert {"types.py", "queue.txt", "statistics.py", "mine", "in.py", "test_calc.py", "calc.py"} <= set(output), (
        grade
    )
    assert not {"json.py", "random.py", "re.py", "ast.pyc", "typing:"} & set(output), grade
    assert not any(word.startswith("csv") for word in output), grade
