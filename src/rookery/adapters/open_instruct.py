"""open-instruct: environments of Rookery as an entry of its tool registry. open-instruct samples and trains.

    from rookery.adapters.open_instruct import register

    register()    # before open-instruct parses its arguments, in a file that then calls its main function

Then `--tools rookery --tool_configs '{"environment": "swe", "tasks": "repairs"}'`, and a dataset of `make_rows`.

Guarantees:
- If the classes of open-instruct differ from those of the tested commit, a warning names the commit.
- The reward comes with the step that ends the rollout, from Rookery's own grading.
- After an infrastructure failure the rollout is repeated in a fresh sandbox with the calls so far. If all attempts
  fail, the step raises. open-instruct then counts the reward 0, because it cannot leave a sample out;
  `get_metrics` counts these samples.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from rookery.adapters.stepped_rollout import Observation, SteppedRollout
from rookery.core import ToolSchema
from rookery.environments import load_environment
from rookery.tasks import load_tasks

TESTED: Final = "e6c3044"
"""The commit of open-instruct whose interface this module implements; it has no releases."""
INTERFACE: Final = {
    "RLEnvironment": ("config_name", "setup", "reset", "step", "state", "get_metrics"),
    "BaseEnvConfig": ("pool_size",),
}
"""Attributes of open-instruct's classes at that commit that the adapter relies on."""

log = logging.getLogger("rookery.adapters.open_instruct")


def register(name: str = "rookery") -> Any:
    """Add an entry to open-instruct's tool registry, and return its configuration class."""
    from open_instruct.environments import base
    from open_instruct.environments.base import BaseEnvConfig, RLEnvironment, State, StepResult
    from open_instruct.environments.tools.tools import TOOL_REGISTRY

    check_interface(base)

    class RookeryEnvironment(RLEnvironment):  # type: ignore[misc]
        """Runs tasks of a Rookery environment, one at a time."""

        config_name = name

        def __init__(
            self, environment: str, tasks: str = "", options: dict[str, Any] | None = None, **_: Any
        ) -> None:
            self.rollout = SteppedRollout(
                environment, tasks=load_tasks(tasks) if tasks else None, **(options or {})
            )
            self.steps = 0
            self.task = ""

        async def reset(self, **kwargs: Any) -> tuple[Any, list[dict[str, Any]]]:
            """Start the rollout of the task that the row names."""
            self.task, self.steps = str(kwargs["task"]), 0
            first = await self.rollout.reset(self.task)
            return StepResult(result=first.text), [_format_tool(one) for one in first.tools]

        async def step(self, call: Any) -> Any:
            """Execute a tool call."""
            self.steps += 1
            return _make_result(StepResult, await self.rollout.step(call.name, call.args, call.id))

        def state(self) -> Any:
            """Return the task and the number of steps."""
            return State(episode_id=self.task, step_count=self.steps)

        def get_metrics(self) -> dict[str, float]:
            """Return the number of rollouts without a reward, by cause. open-instruct counts them as zeros."""
            return {f"rookery/missing/{cause}": float(count) for cause, count in self.rollout.missing.items()}

    @dataclass
    class RookeryEnvConfig(BaseEnvConfig):  # type: ignore[misc]
        """Settings of the registry entry, from `--tool_configs`."""

        tool_class: ClassVar[type] = RookeryEnvironment

        environment: str = "swe"
        tasks: str = ""
        options: dict[str, Any] = field(default_factory=dict)

    TOOL_REGISTRY[name] = RookeryEnvConfig
    return RookeryEnvConfig


def check_interface(module: Any) -> list[str]:
    """Return the attributes of `INTERFACE` that open-instruct's module lacks, and name them in a warning."""
    lacking = [
        f"{kind}.{name}"
        for kind, names in INTERFACE.items()
        for name in names
        if not hasattr(getattr(module, kind), name)
    ]
    if lacking:
        log.warning("open-instruct has no %s: the adapter was tested with commit %s only", lacking, TESTED)
    return lacking


def make_rows(environment: str, tasks: str = "", *, name: str = "rookery") -> list[dict[str, Any]]:
    """Return rows for open-instruct's dataset: `messages`, and `env_config` with the task's ID."""
    taskset = load_tasks(tasks) if tasks else SteppedRollout(load_environment(environment)).tasks
    return [
        {
            "messages": [{"role": one.role, "content": one.text} for one in task.prompt],
            "ground_truth": "",
            "dataset": "passthrough",
            "env_config": {"env_configs": [{"env_name": name, "task": task.id}]},
        }
        for task in taskset
        if not task.invalid
    ]


def _make_result(kind: Any, found: Observation) -> Any:
    if found.reward is None:
        return kind(result=found.text)
    return kind(result=found.text, reward=found.reward, done=True)


def _format_tool(tool: ToolSchema) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }
