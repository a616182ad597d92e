"""What an agent in a box is given, and what it is graded by: the same for every format of task folders.

Promises:
- whatever format a task came in, environment and graders see this one description;
- it is small plain data: files stay in folders of this machine, and are named;
- a task always has a list of steps; one that is not divided has one.
"""

from typing import Any, Literal, TypeAlias

import msgspec

from rookery.core import Task, TaskError

KEY = "swe"
"""Where `Task.data` holds the description."""

TESTS = "/tests"
SOLUTION = "/solution"
LOGS = "/logs"
"""Below it: `agent`, `verifier`, `artifacts`."""
WORKSPACE = "/workspace"

SweFormat: TypeAlias = Literal["open-instruct", "harbor", "rows"]
GradeMode: TypeAlias = Literal["fresh", "shared"]
"""`fresh`: the tests run in another box, over what the agent changed. `shared`: in the agent's own."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file or folder of this machine, and where it goes in the box."""

    source: str
    target: str


class Verifier(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a step is graded."""

    script: str = "test.sh"
    """Below the tests."""
    mode: GradeMode = "fresh"
    timeout: float = 600.0
    env: dict[str, str] = {}
    user: str | None = None
    services: bool = False
    """Whether what the agent started must be alive while the tests run; in `shared` only."""
    reward_from_exit: bool = True
    """Whether the script's exit code is the reward where it wrote none."""


class SweStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instruction and its grading; those of a task follow one another in the same box."""

    name: str = ""
    instruction: str
    tests: tuple[Part, ...] = ()
    """Never in the box before the step is graded."""
    setup: str = ""
    """A script of this machine that runs in the box before the agent gets the step."""
    solution: tuple[Part, ...] = ()
    """For `rookery validate` alone."""
    solve: str = "solve.sh"
    """Below `SOLUTION`."""
    timeout: float | None = None
    """Seconds the agent has."""
    verifier: Verifier = Verifier()
    enough: float | None = None
    """The reward below which the steps after this one are not begun."""


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
    network: Literal["none", "allow", "all"] = "none"
    allow: tuple[str, ...] = ()
    mcp: tuple[dict[str, Any], ...] = ()
    """MCP servers that the task offers, as its format describes them."""
    metadata: dict[str, Any] = {}


def swe_task(task: Task) -> SweTask:
    """The description that a task carries. `TaskError` where it has none, or one that cannot be read."""
    found = task.data.get(KEY)
    if found is None:
        raise TaskError(f"task {task.id} is no task for a box: its data has no {KEY!r}")
    try:
        return msgspec.convert(found, SweTask)
    except msgspec.ValidationError as error:
        raise TaskError(f"task {task.id}: its description cannot be read: {error}") from None
