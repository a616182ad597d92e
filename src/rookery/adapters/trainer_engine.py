"""Engines of adapters that run inside a trainer. They open with the trainer's first request.

`TrainerEngine` runs in the trainer's event loop, for trainers whose inference engine must be called there.
`ThreadedTrainerEngine` runs in threads of its own, for trainers without an event loop or without an end.

Guarantees:
- A version of the trainer outside the tested range is named in a warning when the object is created.
- There is one engine for each purpose, such as training and evaluation. It samples with the settings that the
  trainer had when it opened. Other settings for the same purpose raise `UsageError`.
- Sampling parameters of the user or of a task that contradict the trainer raise `UsageError` before an engine
  opens.
- The tokens of every group are compared with the trainer's context length and tokenizer.
- Missing rollouts are logged with their causes.
- A `ThreadedTrainerEngine` closes its engines when it is garbage-collected, and when the interpreter exits.
"""

import asyncio
import atexit
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from rookery.adapters.compatibility import RolloutChecks, TokenDecoder, TrainerSettings, check_version
from rookery.adapters.group_requests import GroupRequests, run_groups
from rookery.adapters.task_rows import find_task, get_tasks, make_task_rows
from rookery.core import Group, Task, UsageError, derive_seed, label
from rookery.core.lifetimes import ClosesOnExit
from rookery.engine import Engine, SyncEngine
from rookery.environments import Environment, load_environment
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.token_function import TokenFunction, serve_function

TestedVersions: TypeAlias = tuple[str, str, str]
"""Name of a package, the oldest version that was tested, and the version at which the tested range ends."""
TRAINING = "training"
MAX_ENGINES = 4
"""Maximum number of purposes, each of which has an engine of its own."""
E = TypeVar("E", bound=Engine | SyncEngine)

log = logging.getLogger("rookery.adapters")


class _OpenEngine(NamedTuple, Generic[E]):
    """An open engine, with the checks for its rollouts."""

    engine: E
    checks: RolloutChecks
    requests: GroupRequests

    def check(self, groups: Iterable[Group]) -> None:
        """Raise `UsageError` if tokens do not fit the trainer, and log the missing rollouts."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.checks.check_groups(groups, self.engine.folder)
        missing = Counter(
            "ungraded" if rollout.ungraded else label(rollout.outcome) for rollout in rollouts if not rollout.valid
        )
        if missing:
            causes = ", ".join(f"{count} {cause}" for cause, count in missing.most_common())
            log.warning("%d of %d rollouts are missing: %s", missing.total(), len(rollouts), causes)


class _TrainerEngineBase:
    """The environment, the tasks and the options that the engines of an adapter share."""

    def __init__(
        self,
        env: Environment | str,
        *,
        trainer: str,
        tested: TestedVersions,
        policy: str | Sequence[str] | UpstreamConfig = "",
        generate: TokenFunction | None = None,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        tokenizer: TokenDecoder | None = None,
        **options: Any,
    ) -> None:
        """The policy is `policy`, or the trainer's own function `generate`, which takes token IDs.

        `tokenizer` is the trainer's, to check that the policy has the same. `options` are arguments of `Engine`.
        """
        check_version(*tested)
        if generate is not None:
            if not options.get("rendering"):
                raise UsageError(
                    f"{trainer} passes token IDs to its inference engine: pass the policy's chat format, as "
                    "rendering={'tokenizer': PATH}"
                )
            options |= {"runners": 0, "record": "tokens"}
        self.trainer = trainer
        self.environment = (
            env if isinstance(env, Environment) else load_environment(env, **(options.get("arguments") or {}))
        )
        self.tasks = get_tasks(self.environment, tasks)
        self.tokenizer = tokenizer
        self._known = {task.id: task for task in self.tasks}
        self._generate = generate
        self._options = {"env": env, "policy": policy, **options}

    def make_rows(self) -> list[dict[str, Any]]:
        """Return the rows of a dataset for the trainer: `prompt` (messages) and `task` (the task ID)."""
        return make_task_rows(self.tasks)

    def find_task(self, prompt: object, name: object = None) -> Task:
        """Return the task with the ID `name`, or of the row whose prompt this is."""
        return find_task(prompt, self._known, name)

    def check_settings(self, settings: TrainerSettings) -> None:
        """Raise `UsageError` if sampling parameters or limits of the user or of a task contradict the trainer."""
        for task in self.tasks:
            settings.settle_sampling(task.sampling)
        settings.settle_sampling(self._options.get("sampling"))
        settings.settle_limits(self._options.get("limits"))

    def accept_longer_context(self, settings: TrainerSettings, warn: Callable[[str], None]) -> TrainerSettings:
        """Return the settings with the user's `limits.context` if that is longer; see `TrainerSettings`."""
        return settings.accept_longer_context(self._options.get("limits"), warn)

    def _make_options(self, settings: TrainerSettings | None, registrations: ExitStack) -> dict[str, Any]:
        """Return the arguments of an engine. Without `settings`, the sampling parameters are not checked."""
        options = dict(self._options)
        if settings is not None:
            self.check_settings(settings)
            options["sampling"] = settings.settle_sampling(options.get("sampling"))
            options["limits"] = settings.settle_limits(options.get("limits"))
        if self._generate is not None:
            context = None if settings is None else settings.context
            served = serve_function(self._generate, model=self.trainer, context=context)
            options["policy"] = registrations.enter_context(served)
        return options

    def _wrap(self, engine: E, settings: TrainerSettings | None) -> _OpenEngine[E]:
        checks = RolloutChecks(self.trainer, settings or TrainerSettings(), self.tokenizer)
        return _OpenEngine(engine, checks, GroupRequests(self.trainer.lower()))

    def _check_number(self, opened: int) -> None:
        if opened == MAX_ENGINES:
            raise UsageError(
                f"{self.trainer} uses engines for more than {MAX_ENGINES} purposes, such as evaluation or other "
                "sampling settings: use fewer, because each has an engine of its own"
            )


class TrainerEngine(_TrainerEngineBase):
    """Runs groups in the event loop in which it is used. Invalid options raise `UsageError` at construction."""

    def __init__(self, env: Environment | str, *, settings: TrainerSettings | None = None, **options: Any) -> None:
        """`settings` are the trainer's, if they are known before the first request.

        `options` are `trainer`, `tested`, `policy`, `generate`, `tasks`, `tokenizer`, and arguments of `Engine`.
        """
        super().__init__(env, **options)
        self._settings = settings
        self._registrations = ExitStack()
        self._opening = asyncio.Lock()
        self._opened: dict[Hashable, _OpenEngine[Engine]] = {}
        self.engine = Engine(**self._make_options(settings, self._registrations))
        """The engine that was opened last; before the first request, one that is not open."""

    async def run(
        self, task: Task, k: int, settings: TrainerSettings | None = None, *, purpose: Hashable = TRAINING
    ) -> Group:
        """Run k rollouts of a task. Cancelling the call cancels them.

        Raise `UsageError` if the settings changed, or if the tokens do not fit the trainer.
        """
        settings = self._settings if settings is None else settings
        async with self._opening:
            if purpose not in self._opened:
                self._check_number(len(self._opened))
                self.engine = Engine(**self._make_options(settings, self._registrations))
                await self.engine.__aenter__()
                self._opened[purpose] = self._wrap(self.engine, settings)
        opened = self._opened[purpose]
        if settings is not None:
            opened.checks.check_unchanged(settings)
        group = await opened.requests.run(opened.engine, task, k)
        await asyncio.to_thread(opened.check, [group])
        return group

    async def aclose(self) -> None:
        """Cancel running rollouts and close the engines."""
        async with self._opening:
            while self._opened:
                await self._opened.popitem()[1].engine.__aexit__(None, None, None)
        self._registrations.close()


class _EngineHolder:
    """Holds open engines, so that they can be closed after their owner was garbage-collected."""

    def __init__(self) -> None:
        self.opened: dict[Hashable, _OpenEngine[SyncEngine]] = {}
        self.registrations = ExitStack()
        self.opening = threading.Lock()

    def close(self) -> None:
        with self.opening, self.registrations:
            while self.opened:
                self.opened.popitem()[1].engine.__exit__(None, None, None)

    def close_in_thread(self) -> None:
        """Close the engines in a new thread, because an engine's own thread cannot wait for its end."""
        if self.opened:
            threading.Thread(target=self.close, name="rookery-close").start()


class ThreadedTrainerEngine(_TrainerEngineBase, ClosesOnExit):
    """Runs groups in threads of its own. Its methods may be called from any thread.

    In an engine's own event loop, call only `run` and `check_unchanged`: the others wait for locks or threads.
    """

    def __init__(self, env: Environment | str, **options: Any) -> None:
        super().__init__(env, **options)
        self._holder = _EngineHolder()
        weakref.finalize(self, _EngineHolder.close_in_thread, self._holder).atexit = False

    def open(
        self, settings: TrainerSettings, *, purpose: Hashable = TRAINING, seed: int = 0, salt: tuple[int, ...] = ()
    ) -> SyncEngine:
        """Return the engine for a purpose, which the first call opens.

        The user's option `seed` takes precedence over `seed`. With a `salt`, parallel and resumed trainings do not
        sample with the same seeds.
        """
        holder = self._holder
        with holder.opening:
            if purpose not in holder.opened:
                self._check_number(len(holder.opened))
                options = self._make_options(settings, holder.registrations)
                if salt:
                    options["seed"] = derive_seed(options.get("seed", seed), *salt)
                engine = SyncEngine(**options)
                engine.__enter__()
                holder.opened[purpose] = self._wrap(engine, settings)
                _open_holders.add(holder)
                _register_close()
            opened = holder.opened[purpose]
        opened.checks.check_unchanged(settings)
        return opened.engine

    @property
    def engine(self) -> SyncEngine | None:
        """The open engine for training; None before it opens and after `close`."""
        opened = self._holder.opened.get(TRAINING)
        return None if opened is None else opened.engine

    def check_unchanged(self, settings: TrainerSettings) -> None:
        """Raise `UsageError` if the settings differ from those with which the engine for training has opened.

        This takes no lock, so that an engine's event loop can call it while `close` waits for that event loop.
        """
        opened = self._holder.opened.get(TRAINING)
        if opened is not None:
            opened.checks.check_unchanged(settings)

    def check(self, groups: Iterable[Group], *, purpose: Hashable = TRAINING) -> None:
        """Raise `UsageError` if tokens of these groups do not fit the trainer, and log the missing rollouts."""
        self._holder.opened[purpose].check(groups)

    def run_groups(self, requests: Sequence[tuple[Task, int]], *, purpose: Hashable = TRAINING) -> list[Group]:
        """Run groups, each of a task and its number of rollouts, in an engine that `open` has opened.

        Return them in order. Ctrl-C and errors cancel rollouts in flight.
        """
        opened = self._holder.opened[purpose]
        groups = run_groups(opened.engine, requests, self.trainer.lower())
        opened.check(groups)
        return groups

    def submit(
        self, task: Task, k: int, settings: TrainerSettings, *, purpose: Hashable = TRAINING
    ) -> "Future[Group]":
        """Start k rollouts of a task, and return a future of the group. Cancelling it cancels them."""
        return self.open(settings, purpose=purpose).submit(
            lambda engine: self.run(engine, task, k, settings, purpose=purpose)
        )

    async def run(
        self, engine: Engine, task: Task, k: int, settings: TrainerSettings, *, purpose: Hashable = TRAINING
    ) -> Group:
        """Run k rollouts of a task in the event loop of `engine`, which `open` has opened for this purpose."""
        opened = self._holder.opened.get(purpose)
        if opened is None:
            raise asyncio.CancelledError  # `close` is about to cancel everything in this event loop
        opened.checks.check_unchanged(settings)
        group = await opened.requests.run(engine, task, k)
        await asyncio.to_thread(opened.check, [group])
        return group

    def close(self) -> None:
        """Cancel running rollouts and close the engines. A later request opens new ones."""
        self._holder.close()


_open_holders: "weakref.WeakSet[_EngineHolder]" = weakref.WeakSet()


@cache
def _register_close() -> None:
    """Arrange that open engines are closed at interpreter exit; their threads do not end on their own."""
    # `atexit` handlers run too late: thread pools are already shut down, and closing an engine needs one.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(close_all)


def close_all() -> None:
    for holder in list(_open_holders):
        holder.close()
