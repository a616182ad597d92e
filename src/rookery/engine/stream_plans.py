"""Decide which groups the streams of a run start: new groups, repeated ones, and the rest of a resumed run."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rookery.core import Failed, Group, Task, UsageError
from rookery.engine.checkpoint import StreamCheckpoint, StreamCursor, dump_checkpoint, load_checkpoint
from rookery.engine.config import EngineConfig
from rookery.engine.group_channel import GroupChannel, PlannedGroup
from rookery.engine.length_predictor import LengthPredictor
from rookery.engine.supervisor import Supervisor
from rookery.engine.task_source import TaskRegistry, plan_groups, plan_resume
from rookery.environments import Environment, Mixture
from rookery.environments.mixture import get_entries
from rookery.journal import RunReader
from rookery.tasks import tasks_from
from rookery.tasks.task_order import SamplerOption, TaskOrder

log = logging.getLogger("rookery.engine")

TaskRows = Iterable[Task | dict[str, Any] | str]


class StreamPlans:
    """The streams of an engine by name, and where each of them continues."""

    def __init__(
        self, environment: Environment, config: EngineConfig, get_supervisor: Callable[[], Supervisor]
    ) -> None:
        self._environment = environment
        self._entries = get_entries(environment)
        self._config = config
        self.channels: dict[str, GroupChannel] = {}
        """The last stream of each name."""
        self.lengths = LengthPredictor()
        self.resumed: list[PlannedGroup] = []
        """Groups of a resumed run that have not finished."""
        self._loaded: dict[str, StreamCheckpoint] = {}
        """The positions of a loaded checkpoint, for streams that are not open yet."""
        self._rounds: dict[str, int] = {}
        """Number of times that each stream was restarted, by name."""
        self._get_supervisor = get_supervisor
        self._registry: TaskRegistry | None = None

    @property
    def registry(self) -> TaskRegistry:
        """The numbers of the tasks in the journal."""
        if self._registry is None:
            self._registry = TaskRegistry(self._get_supervisor().journal)
        return self._registry

    def plan_resume(self, folder: Path, *, failed: bool, causes: tuple[str, ...]) -> None:
        """Read what is left of the run in `folder`. With `failed`, rollouts that failed run again as well."""
        supervisor = self._get_supervisor()
        plan = plan_resume(folder, supervisor.journal, failed=failed, causes=causes)
        if self._config.longest_first:
            with RunReader(folder) as reader:
                self.lengths.record_all(reader.iter_rollouts())
        self.resumed, self._registry = plan.groups, TaskRegistry(supervisor.journal, plan.task_numbers)
        supervisor.next_group = plan.next_group
        for task, detail in plan.quarantined.items():
            supervisor.records.quarantined[task] = Failed("task", "task.invalid", detail, "queue")

    # ---- a new stream

    def close_abandoned(self, name: str) -> None:
        """Close the last stream named `name` if its consumer dropped it. Raise `UsageError` if it is in use."""
        last = self.channels.get(name)
        if last is None or last.done:
            return
        if not last.abandoned:
            raise UsageError(
                f"a stream named {name!r} is still open: close it (`await stream.aclose()`) to continue in a new "
                "one, or use another name"
            )
        self._get_supervisor().close_channel(last, "user")

    def choose_tasks(self, tasks: TaskRows | None) -> Iterable[Task]:
        """Return the checked tasks of a stream; by default those of the environment."""
        environment = self._environment
        chosen = environment.tasks() if tasks is None else tasks
        if isinstance(chosen, Sequence):
            taskset = tasks_from(chosen, environment.title, own_limits=environment.own_limits)
            for task in taskset:
                self._check_environment_of(task)
            return taskset
        own = environment.own_limits
        return (
            self._check_environment_of(task)
            for row in chosen
            for task in ((row,) if isinstance(row, Task) else tasks_from([row], "row", own_limits=own))
        )

    def _check_environment_of(self, task: Task) -> Task:
        """Return the task. Raise `UsageError` if its environment is not one of this run's."""
        if task.environment not in self._entries:
            raise UsageError(
                f"the task {task.id!r:.80} names the environment {task.environment!r:.80}, which this run does "
                f"not have: set Task.environment to {' or '.join(map(repr, self._entries))}"
            )
        return task

    def find_cursor(
        self, name: str, tasks: TaskRows | None, chosen: Iterable[Task], *, resumed: bool
    ) -> StreamCursor | None:
        """Return where the stream named `name` continues, or None if it starts at the first task.

        It continues at a loaded checkpoint, or where the last stream with this name and these tasks ended.
        `resumed` is True for the stream of what is left of a resumed run.
        """
        state = self._loaded.get(name)
        if state is not None:
            return StreamCursor.from_checkpoint(state, self.registry.number)
        last = self.channels.get(name)
        if last is None:
            return None
        if isinstance(chosen, Sequence) and last.tasks != tuple(chosen):
            return None  # other tasks, none of which has started
        if not isinstance(chosen, Sequence) and isinstance(last.tasks, tuple):
            return None
        cursor = StreamCursor.from_channel(last, self._rounds[name])
        if resumed:
            self.resumed = [*cursor.rerun, *self.resumed[last.drawn :]]
        elif isinstance(tasks, Iterator) and tasks is last.tasks:
            cursor.rest = last.source  # an iterator cannot be started again
        return cursor

    def choose_order(
        self,
        chosen: Iterable[Task],
        epochs: int | None,
        sampler: SamplerOption | None,
        cursor: StreamCursor | None,
    ) -> TaskOrder | None:
        """Return the order of the tasks if a sampler chooses them or if a mixture repeats them without end."""
        weights = self._environment.weights if isinstance(self._environment, Mixture) else None
        mixed = weights is not None and epochs is None and isinstance(chosen, Sequence)
        if sampler is None and not mixed:
            return None
        if epochs is not None or not isinstance(chosen, Sequence):
            raise UsageError("a task sampler repeats a list of tasks without end: pass a list and epochs=None")
        before = cursor.order if cursor is not None else None
        if isinstance(before, TaskOrder):
            return before
        return TaskOrder(
            chosen, sampler=sampler or "uniform", weights=weights, seed=self._config.root_seed, state=before
        )

    def plan_groups(
        self, name: str, chosen: Iterable[Task], epochs: int | None, cursor: StreamCursor | None
    ) -> Iterable[PlannedGroup]:
        """Return the groups to run: first those that run again, then those that never started."""
        if cursor is not None and cursor.rest is not None:
            return chain(cursor.rerun, cursor.rest)
        groups = plan_groups(chosen, epochs, self.registry.number, cursor)
        return groups if cursor is None or name in self._loaded else self._warn_if_empty(name, groups, cursor)

    def _warn_if_empty(
        self, name: str, groups: Iterable[PlannedGroup], cursor: StreamCursor
    ) -> Iterator[PlannedGroup]:
        """Yield `groups`. If the stream delivers no group at all, log a warning and record an event.

        An evaluation without results must not go unnoticed.
        """
        some = bool(cursor.finished)
        for one in groups:
            some = True
            yield one
        if not some:
            detail = (
                f"the stream {name!r} is at its end: its {cursor.admitted} tasks were used. Pass restart=True "
                "to start again at the first task, or epochs=None to repeat the tasks for ever"
            )
            log.warning("%s", detail)
            self._get_supervisor().record_event("stream.at_end", {"stream": name, "detail": detail})

    def next_round(self, name: str) -> int:
        """Return the number of the next round of the stream `name`: 0 first, then 1 more each time."""
        state = self._loaded.get(name)
        return 1 + max(self._rounds.get(name, -1), state.round if state is not None else -1)

    def add(self, name: str, channel: GroupChannel, round_number: int) -> None:
        """Remember a stream as the last one named `name`."""
        self._loaded.pop(name, None)
        self.channels[name] = channel
        self._rounds[name] = round_number

    # ---- checkpoints

    def dump(self, folder: Path, on_loaded: Callable[[Group, Group], None] | None) -> dict[str, Any]:
        """Return the position of every stream, and the finished groups that were not taken, as plain data.

        `on_loaded` is called for each such group, before and after its segments were loaded.
        """
        return dump_checkpoint(
            self._config.root_seed,
            self.channels,
            self._rounds,
            folder,
            self._loaded,
            on_loaded,
            self.lengths.get_state() if self._config.longest_first else None,
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `dump` returned. Raise `UsageError` for another seed, or if one of the streams is open."""
        loaded = load_checkpoint(state)
        if (seed := loaded.seed) != self._config.root_seed:
            raise UsageError(
                f"the checkpoint has seed {seed}, but this engine has {self._config.root_seed}: pass seed={seed}"
            )
        for name in loaded.streams:
            self.close_abandoned(name)
        self._loaded = loaded.streams
        self.lengths.set_state(loaded.lengths)
