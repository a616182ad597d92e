"""What an agent in a box is given, and what it is graded by: the same for every format of task folders.

Promises:
- whatever format a task came in, environment and graders see this one description;
- it is small plain data: files stay in folders of this machine, and are named;
- a task always has a list of steps; one that is not divided has one.
"""

from math import isfinite
from typing import Any, Literal, TypeAlias

import msgspec

from rookery.core import Limits, Message, Task, TaskError

KEY = "swe"
"""Where `Task.data` holds the description."""

TESTS = "/tests"
SOLUTION = "/solution"
LOGS = "/logs"
"""Below it: `agent`, `verifier`, `artifacts`."""
WORKSPACE = "/workspace"

SweFormat: TypeAlias = str
"""`open-instruct`, `harbor`, `rows`, or the name of another format that is installed."""
BoxNetwork: TypeAlias = Literal["none", "allow", "all"]
GradeMode: TypeAlias = Literal["fresh", "shared"]
"""`fresh`: the tests run in another box, over what the agent changed. `shared`: in the agent's own."""


TEST_TIMEOUT = 600.0
"""Seconds for one run of the tests where neither run nor task nor environment says it."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file or folder of this machine, and where it goes in the box."""

    source: str
    target: str


class Verifier(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a step is graded."""

    script: str = "test.sh"
    """Below the tests."""
    mode: GradeMode = "fresh"
    timeout: float = TEST_TIMEOUT
    """Seconds for one run of the script."""
    env: dict[str, str] = {}
    user: str | None = None
    services: bool = False
    """Whether what the agent started must be alive while the tests run; in `shared` only."""
    reward_from_exit: bool = True
    """Whether the script's exit code is the reward where it wrote none."""
    network: BoxNetwork | None = None
    """What the task says about the network while its tests run; None: nothing."""
    allow: tuple[str, ...] = ()


class SweStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instruction and its grading; those of a task follow one another in the same box."""

    name: str = ""
    instruction: str
    tests: tuple[Part, ...] = ()
    """Never in the box before the step is graded."""
    files: tuple[Part, ...] = ()
    """What comes into the box when the step begins, before its setup."""
    setup: str = ""
    """A script of this machine that runs in the box, in the working folder, before the agent gets the step."""
    solution: tuple[Part, ...] = ()
    """For `rookery validate` alone."""
    solve: str = "solve.sh"
    """Below `SOLUTION`."""
    solve_env: dict[str, str] = {}
    timeout: float | None = None
    """Seconds the agent has."""
    verifier: Verifier = Verifier()
    enough: float | None = None
    """The reward below which the steps after this one are not begun."""
    enough_parts: dict[str, float] = {}
    """The same for named parts of the reward; one that is missing is below."""


class SweTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task in a box of its own."""

    id: str
    format: SweFormat
    folder: str
    """Where the task lies on this machine."""
    steps: tuple[SweStep, ...]
    image: str | None = None
    """As `SandboxSpec.image`; a Dockerfile is named `dockerfile:DIR`."""
    files: tuple[Part, ...] = ()
    """What lies in the box from the start."""
    workdir: str = WORKSPACE
    artifacts: tuple[str, ...] = ()
    """Paths besides the working folder whose changes count for the tests."""
    env: dict[str, str] = {}
    user: str | None = None
    memory: int | None = None
    cpus: float | None = None
    disk: int | None = None
    gpus: int | None = None
    network: BoxNetwork = "none"
    allow: tuple[str, ...] = ()
    mcp: tuple[dict[str, Any], ...] = ()
    """MCP servers that the task offers, as its format describes them."""
    rewards: Literal["mean", "final"] = "mean"
    """Of several steps: the mean of all (one not begun counts as 0), or the last one's."""
    build: float | None = None
    """Seconds that making the image may take."""
    metadata: dict[str, Any] = {}


GRADED_RUNS = 3
"""Runs of the tests that one grading may need: the submission twice, the task's own solution once."""
SCORE_ROOM = 120.0
"""Seconds of a grading besides its runs: sandboxes are created, files are moved."""
GRADE_SHARE = 0.9
"""The part of a stage's time that grading may use."""
SETUP_ROOM = 300.0


def grading_seconds(step: SweStep) -> float:
    """Return the seconds that grading a step needs at most, so that every run of its tests has its whole time."""
    return GRADED_RUNS * step.verifier.timeout + 2 * SCORE_ROOM


def grading_budget(step: SweStep, remaining: float) -> float:
    """Return the seconds that grading a step gets of what remains of its stage."""
    return GRADE_SHARE * remaining if isfinite(remaining) else grading_seconds(step)


def task_of(task: SweTask, prompt: tuple[Message, ...] = ()) -> Task:
    """The task that an engine runs. `prompt`: instead of the first step's instruction."""
    return Task(
        id=task.id,
        prompt=prompt or (Message("user", task.steps[0].instruction),),
        image=task.image,
        limits=limits_of(task),
        data={KEY: msgspec.to_builtins(task)},
    )


def limits_of(task: SweTask) -> Limits:
    """Return the limits that follow from a task's own timeouts."""
    steps = task.steps
    run = None
    if all(step.timeout is not None for step in steps):
        # All but the last are graded while the rollout runs.
        graded = sum(grading_seconds(step) for step in steps[:-1])
        run = sum(step.timeout or 0.0 for step in steps) + graded
    return Limits(
        run=run,
        score=grading_seconds(steps[-1]) / GRADE_SHARE,
        setup=task.build + SETUP_ROOM if task.build is not None else None,
    )


def with_test_timeout(task: SweTask, run: float | None, default: float | None) -> SweTask:
    """Return the task with the seconds that each run of its tests has in a rollout.

    What the run says wins over what the task says. `default`: for tests whose own timeout is `TEST_TIMEOUT`, the
    timeout of a task that says nothing.
    """

    def timed(step: SweStep) -> SweStep:
        own = step.verifier.timeout
        seconds = run or (default if default is not None and own == TEST_TIMEOUT else own)
        return msgspec.structs.replace(step, verifier=msgspec.structs.replace(step.verifier, timeout=seconds))

    if run is None and default is None:
        return task
    return msgspec.structs.replace(task, steps=tuple(timed(step) for step in task.steps))


def limits_with_test_timeout(task: Task, said: Limits, run: Limits, default: float | None) -> Limits:
    """Return the limits `said` of a rollout, with stages that are long enough for tests with other timeouts.

    Only limits that follow from the task's timeouts are changed. What the run or a row says explicitly stays.
    """
    try:
        described = swe_task(task)
    except TaskError:  # the setup of its attempts says so
        return said
    timed = with_test_timeout(described, said.test_timeout, default)
    if timed is described or not described.steps:
        return said
    before, after = limits_of(described), limits_of(timed)
    changed = {
        name: getattr(after, name)
        for name in ("run", "score")
        if getattr(run, name) is None and getattr(task.limits, name) == getattr(before, name) is not None
    }
    return msgspec.structs.replace(said, **changed)


def swe_task(task: Task) -> SweTask:
    """The description that a task carries. `TaskError` where it has none, or one that cannot be read."""
    found = task.data.get(KEY)
    if found is None:
        raise TaskError(f"task {task.id} is no task for a box: its data has no {KEY!r}")
    try:
        return msgspec.convert(found, SweTask)
    except msgspec.ValidationError as error:
        raise TaskError(f"task {task.id}: its description cannot be read: {error}") from None
