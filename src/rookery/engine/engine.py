"""The engine as a library: groups of scored rollouts, out of an environment, a policy and tasks."""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from rookery.core import Failed, Limits, Rollout, Sampling, SandboxSpec, Task, UsageError
from rookery.core.suggestions import suggestion
from rookery.engine import processes
from rookery.engine.ahead import upcoming
from rookery.engine.channel import Channel, GroupFilter, Sourced, informative
from rookery.engine.checks import check_sandbox, checked_upstreams, no_way, upstream_of
from rookery.engine.config import EngineConfig, struct_option, with_policy_options
from rookery.engine.control import Control
from rookery.engine.pacing import Pace
from rookery.engine.retry import RetryPolicy
from rookery.engine.schedule import Stream
from rookery.engine.settling import described, policy_of, reference_to, run_settings
from rookery.engine.state import Cursor, StreamState, dump_state, load_state
from rookery.engine.steps import StepStream
from rookery.engine.streams import GroupStream, resumed, sourced
from rookery.engine.supervisor import Supervisor
from rookery.engine.taskbook import REGISTERED, TaskBook
from rookery.engine.upstream import EngineUpstream
from rookery.engine.wire import NOT_ISOLATED
from rookery.environments import Environment, EnvironmentRef, load_environment, reference, reward_bounds
from rookery.environments.checks import check_environment
from rookery.gateway.config import settle_rendering
from rookery.journal import Journal, RunReader, create_run
from rookery.sandboxes import settle
from rookery.tasks import tasks_from
from rookery.upstreams.protocol import UpstreamConfig

if TYPE_CHECKING:
    from rookery.engine.remote import RemoteEngine

log = logging.getLogger("rookery.engine")
KEEP: dict[str, GroupFilter] = {"informative": informative}
MAIN = "main"
ARGUMENTS = frozenset({"policy", "model", "roles", "sandbox", "limits", "sampling", "out", "config"})
OPTIONS = frozenset(EngineConfig.__struct_fields__) - ARGUMENTS - {"environment", "upstreams"}
"""Fields of `EngineConfig` that `Engine` takes by their names, beside its own arguments."""


def _refuse_options(what: str, unknown: Iterable[str], known: Iterable[str]) -> NoReturn:
    """Raise `UsageError` for unknown options. The message lists the known ones and suggests one."""
    name = min(unknown)
    listed = sorted(known)
    raise UsageError(
        f"{what} has no option {name} (its options are {', '.join(listed)}){suggestion(name, listed)}"
    )


class Engine:
    """Runs rollouts and hands out groups.

        async with Engine(env, policy="http://localhost:8000/v1") as engine:
            async for group in engine.groups(tasks, k=8):
                ...

    Every configuration error is raised here or on entering, before anything is admitted.
    """

    def __init__(
        self,
        env: Environment | str,
        *,
        policy: str | Sequence[str] | UpstreamConfig = "",
        model: str = "",
        roles: Mapping[str, UpstreamConfig] | None = None,
        sandbox: SandboxSpec | Mapping[str, Any] | str | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        out: str | Path = "runs",
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        """`options` are the other fields of `EngineConfig`: runners, concurrency, seed, retry, breaker, …

        `sandbox`, `limits`, `sampling` and `retry` are also accepted as dictionaries of their fields.
        """
        if processes.in_runner:
            raise UsageError(
                "an engine cannot be started inside of a runner process: put what starts it under "
                '`if __name__ == "__main__":`, since runners import the file that defines the environment'
            )
        if not OPTIONS.issuperset(options):
            _refuse_options("Engine", set(options) - OPTIONS, OPTIONS | ARGUMENTS)
        self._given = env if isinstance(env, Environment) else None
        if config is not None and (options or policy or model or roles or sandbox or limits or sampling):
            raise UsageError(
                "an engine takes its settings from `config` or from arguments, not from both: "
                "change the configuration with msgspec.structs.replace(config, …)"
            )
        if config is None:
            source = env if isinstance(env, str) else ""
            if "retry" in options:
                options["retry"] = struct_option("retry", options["retry"], RetryPolicy)
            if isinstance(sandbox, str):
                sandbox = {"provider": sandbox}
            elif isinstance(sandbox, Mapping):
                options.setdefault("sandbox_named", tuple(sandbox))
            config = EngineConfig(
                environment=source,
                upstreams={"policy": upstream_of(policy, model), **(roles or {})},
                sandbox=struct_option("sandbox", sandbox, SandboxSpec),
                limits=struct_option("limits", limits, Limits),
                sampling=struct_option("sampling", sampling, Sampling),
                **options,
            )
        config = with_policy_options(config)
        self.environment = self._given or load_environment(config.environment, **config.arguments)
        reward_bounds(self.environment)
        check_environment(self.environment)
        self.sandbox, self._unsettled = settle(config.sandbox.over(self.environment.sandbox, config.sandbox_named))
        """What an attempt gets, unless its task or its environment's code asks for another. Without a provider
        where none isolates and nobody consented to that: creating one is then refused."""
        config = msgspec.structs.replace(
            config, sandbox=msgspec.structs.replace(config.sandbox, provider=self.sandbox.provider)
        )
        self.config = config
        missing = sorted(
            {"policy", *self.environment.roles} - {name for name, up in config.upstreams.items() if up.urls}
        )
        if missing:
            raise UsageError(
                f"{self.environment.title} needs a model for: {', '.join(missing)}; "
                "give the policy's URL (--policy http://host:port/v1, or --policy embedded for the small one "
                "that comes along), others in `roles`"
            )
        rendering, self._no_tools = self._settle_rendering(config)
        self.config = msgspec.structs.replace(config, rendering=rendering)
        self.folder: Path | None = None
        self._out = Path(out)
        self._resume = False
        self._failed_again: tuple[bool, tuple[str, ...]] = False, ()
        """Whether a resume also runs failed rollouts again, and those of which causes; without any, all."""
        self._supervisor: Supervisor | None = None
        self._journal: Journal | None = None
        self._channels: dict[str, Channel] = {}
        self._states: dict[str, StreamState] = {}
        self._rounds: dict[str, int] = {}
        """How many streams of a name went before the present one."""
        self._book: TaskBook | None = None
        self._resumed: list[Sourced] = []
        self._control: Control | None = None
        self.on_record: Callable[[Rollout], None] | None = None
        """Called with each terminal record, as it is made."""
        self.on_event: Callable[[str, dict[str, Any]], None] | None = None

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        *,
        env: Environment | str | None = None,
        failed: bool = False,
        causes: Collection[str] = (),
        **changes: Any,
    ) -> "Engine":
        """Return the engine of an earlier run, to go on with it: `async for group in engine.groups()`.

        With `failed`, rollouts that failed run again too: all, or those with one of `causes` (`upstream` stands
        for every cause that begins with `upstream.`). Their groups are handed out whole; earlier records stay in
        the journal. `changes` are fields of `EngineConfig`.
        """
        if causes and not failed:
            raise UsageError("causes say which failed rollouts run again: pass failed=True with them")
        if isinstance(causes, str):
            causes = (causes,)
        path = Path(folder)
        with RunReader(path) as reader:
            config = msgspec.convert(reader.config(), EngineConfig)
        if isinstance(env, str):
            changes["environment"] = env
        if unknown := set(changes) - set(EngineConfig.__struct_fields__):
            _refuse_options("Engine.resume", unknown, {*EngineConfig.__struct_fields__, "env", "failed", "causes"})
        config = msgspec.structs.replace(config, **changes)
        if env is None and not config.environment:
            raise UsageError(
                f"{path.name} was made from Python with an environment object: resume it there, "
                "with Engine.resume(folder, env=…)"
            )
        engine = cls(env or config.environment, config=config)
        engine.folder = path
        engine._resume = True
        engine._failed_again = failed, tuple(causes)
        return engine

    @staticmethod
    async def connect(url: str | Path) -> "RemoteEngine":
        """An engine that lives in another process: its run folder, `unix:PATH` or `tcp://HOST:PORT`."""
        from rookery.engine.remote import RemoteEngine

        return await RemoteEngine.connect(str(url))

    # ---- life

    async def __aenter__(self) -> Self:
        if self._supervisor is not None:
            raise UsageError("this engine is already open; make another one for another run")
        self.check_sandbox()
        upstreams = await checked_upstreams(
            self.config.upstreams,
            tokens=self.config.recording == "tokens",
            wait=self.config.wait_for_upstream,
        )
        self.config = msgspec.structs.replace(self.config, upstreams=upstreams)
        ref = self._reference()
        if self.folder is None:
            self.folder = create_run(
                self._out, self.environment.title, upstreams["policy"].model, now=datetime.now(UTC)
            )
            self._journal = Journal.create(
                self.folder,
                self.describe(),
                env=self.environment.title,
                model=upstreams["policy"].model,
            )
        else:
            self._journal = Journal.open(self.folder)
        try:
            settings = run_settings(self.config, self.sandbox, self.folder, ref)
            self._supervisor = Supervisor(settings, self.environment, self._journal, policy_of(self.config))
            self._supervisor.ledger.on_record = self._on_record
            self._supervisor.ledger.on_event = self._on_event
            if self._resume:
                await asyncio.to_thread(self._read_back)
            await self._supervisor.start()
            if self._unsettled:
                self._supervisor.event(NOT_ISOLATED, {"detail": f"sandboxes will be refused: {self._unsettled}"})
            if self._no_tools:
                self._supervisor.event("template.no_tools", {"detail": self._no_tools})
            self._control = Control(self, self.folder, self.config.listen)
            await self._control.start()
        except BaseException:
            await self._close("stopped")
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unfinished = any(not channel.done or channel.error for channel in self._channels.values())
        await self._close("stopped" if unfinished or kind is not None else "finished")

    async def _close(self, status: Any) -> None:
        supervisor, journal, self._supervisor, self._journal = self._supervisor, self._journal, None, None
        control, self._control = self._control, None
        try:
            if control is not None:
                await control.close()
            if supervisor is not None:
                for channel in self._channels.values():
                    channel.changed()
                await asyncio.shield(asyncio.ensure_future(supervisor.close()))
        finally:
            if journal is not None:
                if journal.error is None:
                    journal.end(status)
                await journal.aclose()

    def check_sandbox(self) -> None:
        """Raises what the provider says against the sandbox asked for; opens nothing."""
        if self.sandbox.provider:
            check_sandbox(self.sandbox, self._out)
        elif self.environment.needs_sandbox:
            raise UsageError(self._unsettled)
        problems = list(self.environment.check(self.sandbox))
        if self.environment.needs_gateway:
            problems += no_way(self.sandbox, self.config.public)
        purpose = self.environment.needs_gateway
        if problems and isinstance(purpose, str):
            problems.append(f"it needs the gateway for {purpose}")
        if problems:
            raise UsageError(f"{self.environment.title} cannot run so: {'; '.join(problems)}")

    def _settle_rendering(self, config: EngineConfig) -> tuple[dict[str, Any], str]:
        """The chat format, ready to travel, and a warning where it has no place for tools.

        Refuses a format that would hide the environment's tools from the policy, unless that is allowed.
        """
        wanted = config.rendering
        if wanted and config.allow_no_tools:
            wanted = {**wanted, "allow_no_tools": True}
        settled, lost = settle_rendering(config.recording, wanted, config.upstreams["policy"])
        if lost and not settled.get("allow_no_tools") and self.environment.tools():
            names = ", ".join(tool.name for tool in self.environment.tools())
            raise UsageError(f"{self.environment.title} gives the policy tools ({names:.200}), and {lost}")
        return settled, lost

    def _reference(self) -> EnvironmentRef:
        if self._given is None:
            return reference_to(self.config)
        return reference(self._given) if self.config.runners else EnvironmentRef(source="")

    def _on_record(self, record: Rollout) -> None:
        if self.on_record is not None:
            self.on_record(record)

    def _on_event(self, kind: str, payload: dict[str, Any]) -> None:
        if self.on_event is not None:
            self.on_event(kind, payload)

    @property
    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise UsageError("the engine is not open: use `async with Engine(…) as engine`")
        return self._supervisor

    def describe(self) -> dict[str, Any]:
        """The configuration as plain data, without secrets."""
        return described(self.config)

    def pids(self) -> list[int]:
        """This process and its runners."""
        return [os.getpid(), *(pid for link in self.supervisor.fleet.links for pid in link.pids())]

    # ---- groups

    def groups(
        self,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        k: int = 1,
        *,
        want: int | None = None,
        oversample: int = 0,
        keep: GroupFilter | str | None = None,
        epochs: int | None = 1,
        buffer: int = 64,
        name: str = MAIN,
        restart: bool = False,
        load_tokens: bool = True,
        need_tokens: bool = False,
        pace: Pace | None = None,
    ) -> GroupStream:
        """Groups of k rollouts, each handed out when its last member ends.

        `keep` drops groups (`"informative"`: valid rewards differ, or a function of the group) and, with `want`,
        others take their place; `oversample` starts that many groups more than wanted; `epochs=None` goes round
        for ever. Streams of different `name` run side by side and share the engine fairly.

        A stream has a name and a cursor. A second call with the same name and tasks goes on where the first one
        ended: with finished groups that nobody took, groups that were cancelled, then new tasks. `want` counts
        from the call. `restart` starts over at the first task, with other seeds. A call with another list of tasks
        begins at its first one; an iterable that is no list is taken to be the same one.

        `need_tokens` is for trainers: the stream raises `UsageError` where turns are recorded without token IDs.
        """
        supervisor = self.supervisor
        if need_tokens and self.config.recording == "plain":
            raise UsageError("training needs token IDs, and record='plain' keeps none: record tokens or messages")
        self._close_abandoned(name)
        if isinstance(keep, str):
            if keep not in KEEP:
                raise UsageError(f"unknown filter {keep!r}; known: {', '.join(KEEP)}, or a function of the group")
            keep = KEEP[keep]
        resumed_run = tasks is None and self._resume
        if resumed_run and restart:
            raise UsageError("a resumed run cannot start over: it goes on with what is left of it")
        chosen = () if resumed_run else self._tasks(tasks)
        k = int(self.config.stream.get("k", k)) if resumed_run else k
        try:
            schedule = Stream(k=k, want=want, oversample=oversample, buffer=buffer, pace=pace)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if isinstance(chosen, Sequence) and len(chosen) <= REGISTERED:
            self.register(chosen)
        cursor = None if restart else self._cursor(name, tasks, chosen)
        if cursor is not None:
            cursor.run_again_unless(k)
        source = self._resumed if resumed_run else self._source(name, chosen, epochs, cursor)
        number = cursor.round if cursor is not None else self._next_round(name)
        self._states.pop(name, None)
        channel = Channel(f"{name}#{number}" if number else name, schedule, source, keep)
        channel.upcoming = partial(upcoming, source if isinstance(source, list) else chosen, epochs, channel)
        channel.tasks = tuple(chosen) if isinstance(chosen, Sequence) else tasks
        if cursor is not None:
            cursor.restore(channel)
            supervisor.next_group = max(supervisor.next_group, cursor.next_group)
        channel.trains = load_tokens
        channel.needs_tokens = need_tokens
        self._channels[name] = channel
        self._rounds[name] = number
        supervisor.open_channel(channel)
        assert self.folder is not None
        return GroupStream(supervisor, channel, self.folder if load_tokens else None)

    def _close_abandoned(self, name: str) -> None:
        """Close the last stream of a name if nobody holds it any more; refuse a second one beside an open one."""
        last = self._channels.get(name)
        if last is None or last.done:
            return
        if not last.abandoned:
            raise UsageError(
                f"a stream named {name!r} is still open: close it (`await stream.aclose()`) to go on with it in a "
                "new one, or give this one another name"
            )
        self.supervisor.close_channel(last, "user")

    def _cursor(
        self, name: str, tasks: Iterable[Task | dict[str, Any] | str] | None, chosen: Iterable[Task]
    ) -> Cursor | None:
        """Where the stream of this name goes on: at a checkpoint, or where its last one with these tasks ended."""
        state = self._states.get(name)
        if state is not None:
            return Cursor.of_state(state, self._tasks_known().number)
        last = self._channels.get(name)
        if last is None:
            return None
        if isinstance(chosen, Sequence) and last.tasks != tuple(chosen):
            return None  # other tasks: nothing of them was begun
        if not isinstance(chosen, Sequence) and isinstance(last.tasks, tuple):
            return None
        cursor = Cursor.of_channel(last, self._rounds[name])
        if self._resume and tasks is None:
            self._resumed = [*cursor.again, *self._resumed[last.drawn :]]
        elif isinstance(tasks, Iterator) and tasks is last.tasks:
            cursor.rest = last.source  # it cannot be gone through from its beginning again
        return cursor

    def _source(
        self, name: str, chosen: Iterable[Task], epochs: int | None, cursor: Cursor | None
    ) -> Iterable[Sourced]:
        """The groups to come: those to run again, then those that were never begun."""
        if cursor is not None and cursor.rest is not None:
            return chain(cursor.again, cursor.rest)
        groups = sourced(chosen, epochs, self._tasks_known().number, cursor)
        return groups if cursor is None or name in self._states else self._or_at_end(name, groups, cursor)

    def _or_at_end(self, name: str, groups: Iterable[Sourced], cursor: Cursor) -> Iterator[Sourced]:
        """Yield the groups; if there is none, say so: a silent empty evaluation would mislead."""
        some = bool(cursor.finished)
        for one in groups:
            some = True
            yield one
        if not some:
            detail = (
                f"the stream {name!r} hands out nothing: its {cursor.pulled} tasks are used up. Pass restart=True "
                "to begin at the first task given, or epochs=None to go on for ever"
            )
            log.warning("%s", detail)
            self.supervisor.event("stream.at_end", {"stream": name, "detail": detail})

    def _next_round(self, name: str) -> int:
        state = self._states.get(name)
        return 1 + max(self._rounds.get(name, -1), state.round if state is not None else -1)

    def steps(
        self,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        k: int = 8,
        *,
        groups: int,
        lag: int = 1,
        keep: GroupFilter | str | None = None,
        epochs: int | None = 1,
        name: str = MAIN,
        restart: bool = False,
    ) -> StepStream:
        """Groups, `groups` at a time, none of which has tokens that are older than `lag` versions of the policy.

        Rollouts go on while the consumer trains: `lag` steps ahead, with 0 not at all. A version is one
        `upstream.sync`. The last step has what is left. Other arguments are those of `groups`; a second call with
        the same name goes on with the next step.
        """
        try:
            pace = Pace(groups, lag)
        except ValueError as error:
            raise UsageError(str(error)) from error
        ahead = (lag + 1) * groups
        stream = self.groups(
            tasks,
            k,
            keep=keep,
            epochs=epochs,
            buffer=ahead,
            name=name,
            restart=restart,
            pace=pace,
            need_tokens=True,
        )
        return StepStream(stream, pace, self.upstream)

    def _tasks(self, tasks: Iterable[Task | dict[str, Any] | str] | None) -> Iterable[Task]:
        chosen = self.environment.tasks() if tasks is None else tasks
        if isinstance(chosen, Sequence):
            return tasks_from(chosen, self.environment.title, own_limits=self.environment.own_limits)
        own = self.environment.own_limits
        return (
            task
            for row in chosen
            for task in ((row,) if isinstance(row, Task) else tasks_from([row], "row", own_limits=own))
        )

    def register(self, tasks: Sequence[Task]) -> None:
        """Writes all tasks into the journal at once, so that a resume knows those not yet begun."""
        self._tasks_known().register(tasks)

    def _tasks_known(self) -> TaskBook:
        if self._book is None:
            assert self._journal is not None
            self._book = TaskBook(self._journal)
        return self._book

    def _read_back(self) -> None:
        assert self.folder is not None
        assert self._journal is not None
        failed, causes = self._failed_again
        back = resumed(self.folder, self._journal, failed=failed, causes=causes)
        self._resumed, self._book = back.sources, TaskBook(self._journal, back.numbers)
        self.supervisor.next_group = back.next_group
        for task, detail in back.quarantined.items():
            self.supervisor.ledger.quarantined[task] = Failed("task", "task.invalid", detail, "queue")

    # ---- pause, state

    @property
    def upstream(self) -> EngineUpstream:
        """The policy's upstream: `pause`, `resume`, and `sync` for new weights."""
        return EngineUpstream(lambda: self.supervisor.fleet.pauses)

    @asynccontextmanager
    async def paused(self, timeout: float = 600.0) -> AsyncIterator[None]:
        """Inside, nothing is admitted and no model call is under way; resumes on every path."""
        pauses, holder = self.supervisor.fleet.pauses, secrets.token_hex(8)
        await pauses.pause("drain", timeout=timeout, deadline=None, holder=holder)
        try:
            yield
        finally:
            await pauses.resume(holder=holder)

    def state_dict(self) -> dict[str, Any]:
        """Cursor, seeds and finished groups not yet taken, of every stream: plain data for a checkpoint."""
        assert self.folder is not None
        loaded = self._supervisor.ledger.loaded if self._supervisor is not None else None
        return dump_state(self.config.root_seed, self._channels, self._rounds, self.folder, self._states, loaded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before `groups`: streams of the same name go on where the checkpoint was taken."""
        seed, states = load_state(state)
        if seed != self.config.root_seed:
            raise UsageError(f"the checkpoint was made with seed {seed}, this engine has {self.config.root_seed}")
        for name in states:
            self._close_abandoned(name)
        self._states = states

    async def status(self) -> dict[str, Any]:
        """What is going on, as plain data."""
        supervisor = self.supervisor
        return {
            "run": str(self.folder),
            "paused": supervisor.fleet.paused,
            "in_flight": supervisor.fleet.under_way,
            "waiting_for_upstream": supervisor.outage.waited,
            "runners": len(supervisor.fleet.links),
            "runner_deaths": supervisor.fleet.deaths,
            **supervisor.counts,
            "images": [
                msgspec.structs.asdict(image) for link in supervisor.fleet.links for image in link.images.values()
            ],
            "streams": {
                name: {"admitted": channel.pulled, "taken": channel.taken, "waiting": len(channel.queue)}
                for name, channel in self._channels.items()
            },
        }
