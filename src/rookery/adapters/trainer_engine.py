"""An engine that opens with the first request, for trainers that do not announce the start of training."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from rookery.adapters.compatibility import RolloutChecks
from rookery.adapters.group_requests import GroupRequests
from rookery.adapters.task_rows import find_task, get_tasks, make_task_rows
from rookery.core import Group, Task, UsageError
from rookery.engine import Engine
from rookery.environments import Environment
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.token_function import TokenFunction, serve_function


class TrainerEngine:
    """Opens an engine with the first group that a trainer requests, and runs groups in it.

    The policy is `policy` (a URL or a configuration), or the trainer's own function `generate`, which takes token
    IDs. Invalid settings raise `UsageError` here. `options` are arguments of `Engine`.
    """

    def __init__(
        self,
        env: Environment | str,
        *,
        name: str,
        policy: str | Sequence[str] | UpstreamConfig = "",
        generate: TokenFunction | None = None,
        context: int | None = None,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        **options: Any,
    ) -> None:
        self._registration = ExitStack()
        if generate is not None:
            if not options.get("rendering"):
                raise UsageError(
                    f"{name} passes token IDs to its inference engine: pass the policy's chat format, as "
                    "rendering={'tokenizer': PATH}"
                )
            policy = self._registration.enter_context(serve_function(generate, context=context))
            options |= {"runners": 0, "record": "tokens"}
        self.engine = Engine(env, policy=policy, **options)
        self.tasks = get_tasks(self.engine.environment, tasks)
        self._known = {task.id: task for task in self.tasks}
        self._requests = GroupRequests(self.engine, name)
        self._opening = asyncio.Lock()
        self._open = False

    def make_rows(self) -> list[dict[str, Any]]:
        """Return the rows of a dataset for the trainer: `prompt` (messages) and `task` (the task ID)."""
        return make_task_rows(self.tasks)

    def find_task(self, prompt: object, name: object = None) -> Task:
        """Return the task with the ID `name`, or of the row whose prompt this is."""
        return find_task(prompt, self._known, name)

    async def run(self, task: Task, k: int, checks: RolloutChecks | None = None) -> Group:
        """Run k rollouts of a task. Cancelling the call cancels them.

        With `checks`, raise `UsageError` if their tokens do not fit the trainer.
        """
        async with self._opening:
            if not self._open:
                await self.engine.__aenter__()
                self._open = True
        group = await self._requests.run(task, k)
        if checks is not None:
            checks.check_groups([group], self.engine.folder)
        return group

    async def aclose(self) -> None:
        """Cancel running rollouts and close the engine."""
        async with self._opening:
            if self._open:
                self._open = False
                await self.engine.__aexit__(None, None, None)
        self._registration.close()
