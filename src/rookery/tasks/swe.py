"""`SweTask`, the description of a SWE task: what an agent receives in its sandbox, and how its work is graded.

Guarantees:
- Tasks of every file format are read into this description, and environments and graders use only it.
- It is small plain data: files stay in directories of this machine and are referred to by path.
- A task always has a list of steps; a task that is not divided into steps has one.
"""

from math import isfinite
from typing import Any, Literal, TypeAlias

import msgspec

from rookery.core import Limits, Message, Task, TaskError

DATA_KEY = "swe"
"""Field of `Task.data` that contains the `SweTask`."""

TESTS = "/tests"
SOLUTION = "/solution"
LOGS = "/logs"
"""Directory in the sandbox that contains the directories `agent`, `verifier` and `artifacts`."""
WORKSPACE = "/workspace"

SweFormat: TypeAlias = str
"""Name of the format that a task was read from: `open-instruct`, `harbor`, `rows` or another installed format."""
TaskNetwork: TypeAlias = Literal["none", "allow", "all"]
"""Network access of a sandbox. `none`: no network. `allow`: only the hosts in `allow`. `all`: every host."""
GradeMode: TypeAlias = Literal["fresh", "shared"]
"""The sandbox in which tests run. `fresh`: in a new sandbox, to which the agent's changes are copied. `shared`: in
the agent's sandbox."""


TEST_TIMEOUT = 600.0
"""Default timeout in seconds of one execution of the tests."""


class FileMapping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file or directory on this machine, and its path in the sandbox."""

    source: str
    target: str


class Verifier(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The grading of a step: a script that runs the tests in a sandbox."""

    script: str = "test.sh"
    """Path of the script below `/tests` in the sandbox."""
    mode: GradeMode = "fresh"
    timeout: float = TEST_TIMEOUT
    """Timeout in seconds of one execution of the script."""
    env: dict[str, str] = {}
    """Environment variables of the script."""
    user: str | None = None
    """User that runs the script; None if the task does not specify one."""
    services: bool = False
    """True if processes that the agent started must be alive while the tests run; only with the mode `shared`."""
    reward_from_exit: bool = True
    """True if the script's exit code determines the reward if the script writes no reward file."""
    network: TaskNetwork | None = None
    """Network access while the tests run; None if the task does not specify it."""
    allow: tuple[str, ...] = ()
    """Hosts that the tests may reach if `network` is `allow`."""


class SweStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instruction and its grading. The steps of a task run one after the other in the same sandbox."""

    name: str = ""
    instruction: str
    tests: tuple[FileMapping, ...] = ()
    """Files of the tests. They are copied into a sandbox only when the step is graded."""
    files: tuple[FileMapping, ...] = ()
    """Files that are copied into the sandbox when the step begins, before its script `setup` runs."""
    setup: str = ""
    """Path of a script on this machine that runs in the sandbox's working directory before the agent starts the
    step."""
    solution: tuple[FileMapping, ...] = ()
    """Files of the reference solution. `rookery validate` runs it. So does grading when the grader fails, to
    find out whether the task is at fault."""
    solve: str = "solve.sh"
    """Path of the reference solution's script below `/solution` in the sandbox."""
    solve_env: dict[str, str] = {}
    """Environment variables of that script."""
    timeout: float | None = None
    """Timeout in seconds of the agent in this step; None if the task specifies none."""
    verifier: Verifier = Verifier()
    min_reward: float | None = None
    """Minimum reward of this step. If the reward is lower, the following steps are not started."""
    min_reward_parts: dict[str, float] = {}
    """Minimum of each named part of the reward. If a part is lower or missing, the following steps are not
    started."""


class SweTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task that an agent solves in a sandbox, as read from a task directory or a row."""

    id: str
    format: SweFormat
    folder: str
    """Directory of the task on this machine."""
    steps: tuple[SweStep, ...]
    image: str | None = None
    """Image of the sandbox, as in `SandboxSpec.image`. `dockerfile:DIR` means an image built from that build
    context. None if the task specifies no image."""
    files: tuple[FileMapping, ...] = ()
    """Files that are copied into the sandbox before the agent starts."""
    workdir: str = WORKSPACE
    artifacts: tuple[str, ...] = ()
    """Paths in the sandbox, outside the working directory, whose changes are graded, too."""
    env: dict[str, str] = {}
    """Environment variables in the agent's sandbox."""
    user: str | None = None
    """User that the agent's commands run as; None if the task does not specify one."""
    memory: int | None = None
    """Memory limit in bytes."""
    cpus: float | None = None
    disk: int | None = None
    """Disk limit in bytes."""
    gpus: int | None = None
    network: TaskNetwork = "none"
    allow: tuple[str, ...] = ()
    """Hosts that the agent may reach if `network` is `allow`."""
    mcp: tuple[dict[str, Any], ...] = ()
    """MCP servers of the task, in the notation of the task's format."""
    rewards: Literal["mean", "final"] = "mean"
    """The way the rewards of several steps are combined. `mean`: their mean, where a step that was not started
    counts as 0. `final`: the reward of the last step."""
    build: float | None = None
    """Timeout in seconds for building the image; None if the task specifies none."""
    metadata: dict[str, Any] = {}
    """Further fields of the task that Rookery does not interpret."""


RUNS_PER_GRADING = 3
"""Maximum number of executions of the tests in one grading: twice for the submission, once for the reference
solution."""
GRADING_OVERHEAD_SECONDS = 120.0
"""Seconds that a grading needs in addition to the execution of tests, for creating sandboxes and copying files."""
GRADING_TIME_SHARE = 0.9
"""Share of the remaining time of a rollout's stage that grading a step may use."""
SETUP_OVERHEAD_SECONDS = 300.0


def grading_seconds(step: SweStep) -> float:
    """Return the maximum number of seconds for grading a step, including repeated executions of its tests."""
    return RUNS_PER_GRADING * step.verifier.timeout + 2 * GRADING_OVERHEAD_SECONDS


def grading_budget(step: SweStep, remaining: float) -> float:
    """Return the number of seconds that grading a step may take.

    `remaining` is the number of seconds that remain in the current stage of the rollout; it may be infinite.
    """
    return GRADING_TIME_SHARE * remaining if isfinite(remaining) else grading_seconds(step)


def make_task(task: SweTask, prompt: tuple[Message, ...] = ()) -> Task:
    """Return the `Task` for the engine that contains a SWE task in its data.

    Its prompt is `prompt`, or the instruction of the first step if `prompt` is empty.
    """
    return Task(
        id=task.id,
        prompt=prompt or (Message("user", task.steps[0].instruction),),
        image=task.image,
        limits=derive_limits(task),
        data={DATA_KEY: msgspec.to_builtins(task)},
    )


def derive_limits(task: SweTask) -> Limits:
    """Return the time limits of a rollout's stages that follow from the timeouts in the task."""
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
    """Return the task with the timeout of the tests that applies in a rollout.

    `run` is the timeout that the run or the task's limits set; it takes precedence over that of each step.
    `default` applies to steps whose timeout is `TEST_TIMEOUT`, which is the value of a step that specifies none.
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

    `limits` are the limits of the rollout so far, `run` those that the run sets, and `default` the test timeout
    for steps that specify none. Only limits derived from the task's timeouts are changed, not those that the run
    or a row sets explicitly.
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
    """Return the `SweTask` in a task's data. Raise `TaskError` if the data contains none or an invalid one."""
    found = task.data.get(DATA_KEY)
    if found is None:
        raise TaskError(f"task {task.id} is not a SWE task: its data has no field {DATA_KEY!r}")
    try:
        return msgspec.convert(found, SweTask)
    except msgspec.ValidationError as error:
        raise TaskError(f"task {task.id}: invalid task description: {error}") from None
