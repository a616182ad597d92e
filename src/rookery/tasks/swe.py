"""Description of a SWE task: what an agent receives in its sandbox, and how its work is graded.

Guarantees:
- Environments and graders use this description for tasks of every format.
- It is small plain data: files stay in directories of this machine and are referred to by path.
- A task always has a list of steps; an undivided task has one.
"""

from math import isfinite
from typing import Any, Literal, TypeAlias

import msgspec

from rookery.core import Limits, Message, Task, TaskError

DATA_KEY = "swe"
"""Field of `Task.data` that contains the description."""

TESTS = "/tests"
SOLUTION = "/solution"
LOGS = "/logs"
"""Contains the directories `agent`, `verifier` and `artifacts`."""
WORKSPACE = "/workspace"

SweFormat: TypeAlias = str
"""`open-instruct`, `harbor`, `rows`, or the name of another installed format."""
TaskNetwork: TypeAlias = Literal["none", "allow", "all"]
GradeMode: TypeAlias = Literal["fresh", "shared"]
"""`fresh`: the tests run in another sandbox, over the agent's changes. `shared`: they run in the agent's
sandbox."""


TEST_TIMEOUT = 600.0
"""Default number of seconds for one run of the tests."""


class FileMapping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file or directory on this machine, and its path in the sandbox."""

    source: str
    target: str


class Verifier(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a step is graded."""

    script: str = "test.sh"
    """Path below the tests."""
    mode: GradeMode = "fresh"
    timeout: float = TEST_TIMEOUT
    """Seconds for one run of the script."""
    env: dict[str, str] = {}
    user: str | None = None
    services: bool = False
    """Whether processes that the agent started must be alive while the tests run; only with `shared`."""
    reward_from_exit: bool = True
    """Whether the script's exit code is the reward if it writes none."""
    network: TaskNetwork | None = None
    """Network while the tests run; None: the task does not say."""
    allow: tuple[str, ...] = ()


class SweStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instruction and its grading. The steps of a task run one after the other in the same sandbox."""

    name: str = ""
    instruction: str
    tests: tuple[FileMapping, ...] = ()
    """Copied into a sandbox only when the step is graded."""
    files: tuple[FileMapping, ...] = ()
    """Files copied into the sandbox when the step begins, before its setup."""
    setup: str = ""
    """Path of a script on this machine that runs in the sandbox's working directory before the agent starts the
    step."""
    solution: tuple[FileMapping, ...] = ()
    """Used by `rookery validate` and to find out whether the task is at fault when its grader fails."""
    solve: str = "solve.sh"
    """Path below `SOLUTION`."""
    solve_env: dict[str, str] = {}
    timeout: float | None = None
    """Seconds for the agent."""
    verifier: Verifier = Verifier()
    enough: float | None = None
    """With a reward below this, the following steps are not started."""
    enough_parts: dict[str, float] = {}
    """The same for named parts of the reward; a missing part counts as below."""


class SweTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task that an agent solves in a sandbox."""

    id: str
    format: SweFormat
    folder: str
    """Directory of the task on this machine."""
    steps: tuple[SweStep, ...]
    image: str | None = None
    """As `SandboxSpec.image`; a Dockerfile is written `dockerfile:DIR`."""
    files: tuple[FileMapping, ...] = ()
    """Files copied into the sandbox before the agent starts."""
    workdir: str = WORKSPACE
    artifacts: tuple[str, ...] = ()
    """Paths outside the working directory whose changes are graded."""
    env: dict[str, str] = {}
    user: str | None = None
    memory: int | None = None
    cpus: float | None = None
    disk: int | None = None
    gpus: int | None = None
    network: TaskNetwork = "none"
    allow: tuple[str, ...] = ()
    mcp: tuple[dict[str, Any], ...] = ()
    """MCP servers of the task, as its format describes them."""
    rewards: Literal["mean", "final"] = "mean"
    """Reward of several steps: the mean of all (a step that was not started counts as 0), or that of the last."""
    build: float | None = None
    """Seconds for building the image."""
    metadata: dict[str, Any] = {}


RUNS_PER_GRADING = 3
"""Runs of the tests that one grading may need: the submission twice, the reference solution once."""
GRADING_OVERHEAD_SECONDS = 120.0
"""Seconds of a grading in addition to its runs, for creating sandboxes and copying files."""
GRADING_TIME_SHARE = 0.9
"""Share of a stage's time that grading may use."""
SETUP_OVERHEAD_SECONDS = 300.0


def grading_seconds(step: SweStep) -> float:
    """Return the maximum number of seconds for grading a step with all runs of its tests."""
    return RUNS_PER_GRADING * step.verifier.timeout + 2 * GRADING_OVERHEAD_SECONDS


def grading_budget(step: SweStep, remaining: float) -> float:
    """Return the seconds for grading a step, given the time that remains in its stage."""
    return GRADING_TIME_SHARE * remaining if isfinite(remaining) else grading_seconds(step)


def make_task(task: SweTask, prompt: tuple[Message, ...] = ()) -> Task:
    """Return the task that an engine runs. `prompt` replaces the instruction of the first step."""
    return Task(
        id=task.id,
        prompt=prompt or (Message("user", task.steps[0].instruction),),
        image=task.image,
        limits=derive_limits(task),
        data={DATA_KEY: msgspec.to_builtins(task)},
    )


def derive_limits(task: SweTask) -> Limits:
    """Return the limits that follow from a task's own timeouts."""
    steps = task.steps
    run = None
    if all(step.timeout is not None for step in steps):
        # All steps but the last are graded in the run stage.
        graded = sum(grading_seconds(step) for step in steps[:-1])
        run = sum(step.timeout or 0.0 for step in steps) + graded
    return Limits(
        run=run,
        score=grading_seconds(steps[-1]) / GRADING_TIME_SHARE,
        setup=task.build + SETUP_OVERHEAD_SECONDS if task.build is not None else None,
    )


def with_test_timeout(task: SweTask, run: float | None, default: float | None) -> SweTask:
    """Return the task with the test timeout that applies in a rollout.

    The timeout of the run takes precedence over that of the task. `default` applies to tests that have
    `TEST_TIMEOUT`, the timeout of a task that sets none.
    """

    def timed(step: SweStep) -> SweStep:
        own = step.verifier.timeout
        seconds = run or (default if default is not None and own == TEST_TIMEOUT else own)
        return msgspec.structs.replace(step, verifier=msgspec.structs.replace(step.verifier, timeout=seconds))

    if run is None and default is None:
        return task
    return msgspec.structs.replace(task, steps=tuple(timed(step) for step in task.steps))


def limits_with_test_timeout(task: Task, limits: Limits, run: Limits, default: float | None) -> Limits:
    """Return the limits of a rollout, with stages that are long enough for the test timeout that applies.

    Only limits derived from the task's timeouts are changed. Limits that the run or a row sets explicitly stay.
    """
    try:
        described = get_swe_task(task)
    except TaskError:  # reported by the setup of its attempts
        return limits
    timed = with_test_timeout(described, limits.test_timeout, default)
    if timed is described or not described.steps:
        return limits
    before, after = derive_limits(described), derive_limits(timed)
    changed = {
        name: getattr(after, name)
        for name in ("run", "score")
        if getattr(run, name) is None and getattr(task.limits, name) == getattr(before, name) is not None
    }
    return msgspec.structs.replace(limits, **changed)


def get_swe_task(task: Task) -> SweTask:
    """Return the description that a task carries. Raise `TaskError` if there is none or it is invalid."""
    found = task.data.get(DATA_KEY)
    if found is None:
        raise TaskError(f"task {task.id} is not a SWE task: its data has no {DATA_KEY!r}")
    try:
        return msgspec.convert(found, SweTask)
    except msgspec.ValidationError as error:
        raise TaskError(f"task {task.id}: invalid task description: {error}") from None
