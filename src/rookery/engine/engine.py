"""`Engine`: run an environment with a policy over tasks and get groups of scored rollouts."""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from rookery.core import Limits, Rollout, Sampling, SandboxSpec, Task, UsageError
from rookery.core.errors import suggestion
from rookery.core.options import struct_option
from rookery.engine import processes
from rookery.engine.cluster import open_cluster
from rookery.engine.config import (
    EngineConfig,
    build_run_settings,
    check_types,
    describe_config,
    environment_reference,
    refuse_training,
    with_policy_options,
)
from rookery.engine.control_server import ControlServer
from rookery.engine.group_channel import GroupChannel, GroupFilter, PlannedGroup, informative
from rookery.engine.group_stream import GroupStream
from rookery.engine.live_state import LiveState
from rookery.engine.preflight import (
    build_upstream_config,
    check_settings,
    check_upstreams,
    require_roles,
    resolve_chat_format,
)
from rookery.engine.prewarm import iter_upcoming
from rookery.engine.retry import RetryPolicy
from rookery.engine.run_metrics import RunMetrics, count_record, split_outcome
from rookery.engine.runner_protocol import NOT_ISOLATED
from rookery.engine.scheduler import GroupScheduler
from rookery.engine.staleness import StalenessBound
from rookery.engine.steps import StepStream
from rookery.engine.stream_plans import StreamPlans
from rookery.engine.supervisor import Supervisor
from rookery.engine.task_source import MAX_REGISTERED
from rookery.engine.upstream import EngineUpstream
from rookery.environments import (
    Environment,
    EnvironmentRef,
    Mixture,
    MixtureEntry,
    load_environment,
    make_reference,
    reward_bounds,
)
from rookery.environments.checks import check_environment
from rookery.environments.mixture import MIXTURE, get_entries, is_mixture_file, read_mixture
from rookery.gateway.direct_session import check_direct_policy
from rookery.journal import EnvironmentTotals, Journal, RunReader, create_run
from rookery.sandboxes import resolve_spec
from rookery.tasks.task_order import SamplerOption
from rookery.telemetry.logs import events, log_event, log_record, make_formatter, open_log_file
from rookery.telemetry.tracing import start_tracing, stop_tracing
from rookery.upstreams.protocol import UpstreamConfig
from rookery.upstreams.reply_cache import ReplyCache

if TYPE_CHECKING:
    from rookery.engine.remote_engine import RemoteEngine

log = logging.getLogger("rookery.engine")
KEEP: dict[str, GroupFilter] = {"informative": informative}
MAIN = "main"
NOT_OPEN = "the engine is not open: use `async with Engine(…) as engine`"
ARGUMENTS = frozenset({"policy", "kind", "model", "roles", "sandbox", "limits", "sampling", "out", "config"})
OPTIONS = frozenset(EngineConfig.__struct_fields__) - ARGUMENTS - {"environment", "upstreams"}
"""Fields of `EngineConfig` that `Engine` accepts as keyword arguments, in addition to its named arguments."""


def _refuse_options(what: str, unknown: Iterable[str], known: Iterable[str]) -> NoReturn:
    """Raise `UsageError` for the first unknown option, with a list of the known options and a suggestion."""
    name = min(unknown)
    listed = sorted(known)
    raise UsageError(
        f"{what} has no option {name} (its options are {', '.join(listed)}){suggestion(name, listed)}"
    )


class Engine:
    """Runs an environment with a policy over tasks, and delivers the scored rollouts in groups.

        async with Engine(env, policy="http://localhost:8000/v1") as engine:
            async for group in engine.groups(tasks, k=8):
                ...

    Configuration errors are raised by the constructor or on entering `async with`, before any rollout starts.
    """

    def __init__(
        self,
        env: Environment | str | Sequence[MixtureEntry | Environment | Mapping[str, Any] | str],
        *,
        policy: str | Sequence[str] | UpstreamConfig = "",
        kind: str = "",
        model: str = "",
        roles: Mapping[str, UpstreamConfig] | None = None,
        sandbox: SandboxSpec | Mapping[str, Any] | str | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        out: str | Path = "runs",
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        """Check the configuration. The replicas are checked later, on entering `async with`.

        `env` is an environment, the location of one, or a list of the environments of a `Mixture`.
        `policy` is the URL of the policy's inference engine, or the URLs of several replicas. `kind` is the kind
        of inference engine, such as `vllm`; it is detected if empty. `roles` are the upstreams of other model
        roles. `out` is the directory in which the run's directory is created. `options` are other fields of
        `EngineConfig`: runners, concurrency, seed, retry, breaker, … Alternatively, `config` sets everything but
        `out`. `sandbox`, `limits`, `sampling` and `retry` are also accepted as dictionaries of their fields, and
        `sandbox` as the name of a provider.
        """
        if processes.in_runner:
            raise UsageError(
                "an engine cannot be started inside a runner process: put the code that starts it under "
                '`if __name__ == "__main__":`, since runners import the file that defines the environment'
            )
        if not OPTIONS.issuperset(options):
            _refuse_options("Engine", set(options) - OPTIONS, OPTIONS | ARGUMENTS)
        if not isinstance(env, Environment | str):
            env = Mixture(env, seed=config.root_seed if config is not None else options.get("seed") or 0)
        self._environment_object = env if isinstance(env, Environment) else None
        if config is not None and (options or policy or kind or model or roles or sandbox or limits or sampling):
            raise UsageError(
                "an engine gets its settings from `config` or from arguments, not from both: "
                "change the configuration with msgspec.structs.replace(config, …)"
            )
        if config is None:
            source = env if isinstance(env, str) else ""
            if is_mixture_file(source):
                options["arguments"] = read_mixture(source) | {"seed": options.get("seed") or 0}
                source = MIXTURE
            if "retry" in options:
                options["retry"] = struct_option("retry", options["retry"], RetryPolicy)
            if isinstance(sandbox, str):
                sandbox = {"provider": sandbox}
            elif isinstance(sandbox, Mapping):
                options.setdefault("explicit_sandbox_fields", tuple(sandbox))
            for role, upstream in (roles or {}).items():
                if not isinstance(upstream, UpstreamConfig):
                    raise UsageError(
                        f"the model role {role!r} must be an UpstreamConfig, such as UpstreamConfig(urls=(URL,)), "
                        f"not {upstream!r:.80}"
                    )
            config = EngineConfig(
                environment=source,
                upstreams={"policy": build_upstream_config(policy, model, kind), **(roles or {})},
                sandbox=struct_option("sandbox", sandbox, SandboxSpec),
                limits=struct_option("limits", limits, Limits),
                sampling=struct_option("sampling", sampling, Sampling),
                **options,
            )
        check_types(config)
        config = with_policy_options(config)
        if config.cluster:
            open_cluster(config.cluster)  # raises if it is unknown or not installed
        self.environment = self._environment_object or load_environment(config.environment, **config.arguments)
        self.entries = get_entries(self.environment)
        """The environments of a mixture by name; in other runs, one entry with an empty name."""
        self.sandboxes: dict[str, SandboxSpec] = {}
        """The sandbox spec of the attempts of each environment, by name."""
        self._provider_problems: dict[str, str] = {}
        for name, entry in self.entries.items():
            reward_bounds(entry.environment)
            check_environment(entry.environment)
            own = config.sandbox.over(entry.environment.sandbox, config.explicit_sandbox_fields)
            self.sandboxes[name], self._provider_problems[name] = resolve_spec(
                entry.sandbox.over(own, entry.explicit_sandbox_fields)
            )
        self.sandbox = next(iter(self.sandboxes.values()))
        """The sandbox spec of attempts, unless the task or the environment requests another one for an attempt.
        The provider is empty if no available provider isolates programs and the user did not consent to run them
        without isolation; creating a sandbox is then refused. In a mixture, this is the spec of the first
        environment."""
        if "" in self.entries:
            config = msgspec.structs.replace(
                config, sandbox=msgspec.structs.replace(config.sandbox, provider=self.sandbox.provider)
            )
        self.config = config
        require_roles(self.environment, config.upstreams)
        if config.record == "off":
            networks = {spec.network for spec in self.sandboxes.values()}
            check_direct_policy(config.upstreams["policy"], pass_key=config.pass_key, networks=networks)
        rendering, self._no_tools_warning = resolve_chat_format(config, self.environment)
        self.config = msgspec.structs.replace(config, rendering=rendering)
        self.folder: Path | None = None
        self._out = Path(out)
        self._resume = False
        self._failed_again: tuple[bool, tuple[str, ...]] = False, ()
        """True if a resume also runs failed rollouts again, and only those with these causes; an empty tuple means
        all causes."""
        self._environment_counts = {name: EnvironmentTotals() for name in self.entries}
        self.on_preparation: Callable[[str], None] = log.info
        """Called with progress messages while the environment prepares this machine, before the first rollout."""
        self._supervisor: Supervisor | None = None
        self._journal: Journal | None = None
        self._streams = StreamPlans(self.environment, self.config, lambda: self.supervisor)
        self._live_state: LiveState | None = None
        self._control: ControlServer | None = None
        self._metrics: RunMetrics | None = None
        self._log: logging.Handler | None = None
        """The handler that writes JSON logs, while the engine is open."""
        self._traces = False
        """True while this engine sends traces."""
        self.on_record: Callable[[Rollout], None] | None = None
        """Called with the final record of each rollout."""
        self.on_event: Callable[[str, dict[str, Any]], None] | None = None
        """Called with the kind and the data of each event of the run."""

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        *,
        env: Environment | str | Sequence[MixtureEntry | Environment | Mapping[str, Any] | str] | None = None,
        failed: bool = False,
        causes: Collection[str] = (),
        **changes: Any,
    ) -> "Engine":
        """Return an engine that continues the run in the directory `folder`: `async for group in engine.groups()`.

        Pass `env` if the run was started with an environment object. With `failed`, rollouts that failed run again
        as well: all of them, or those with one of `causes` (`upstream` matches every cause that starts with
        `upstream.`). Their groups are delivered with all k rollouts; earlier records stay in the journal.
        `changes` are fields of `EngineConfig` to change.
        """
        if causes and not failed:
            raise UsageError("`causes` selects failed rollouts to run again: pass failed=True as well")
        if isinstance(causes, str):
            causes = (causes,)
        path = Path(folder).resolve()  # `latest` is a link
        with RunReader(path) as reader:
            config = msgspec.convert(reader.config(), EngineConfig)
        if isinstance(env, str):
            changes["environment"] = env
        if unknown := set(changes) - set(EngineConfig.__struct_fields__):
            _refuse_options("Engine.resume", unknown, {*EngineConfig.__struct_fields__, "env", "failed", "causes"})
        config = msgspec.structs.replace(config, **changes)
        if env is None and not config.environment:
            raise UsageError(
                f"{path.name} was started from Python with an environment object: resume it from Python with "
                "Engine.resume(folder, env=…)"
            )
        engine = cls(env or config.environment, config=config)
        engine.folder = path
        engine._resume = True
        engine._failed_again = failed, tuple(causes)
        return engine

    @property
    def control_url(self) -> str:
        """The URL for `connect`, with the engine's key; empty if the engine is not open."""
        return self._control.url if self._control is not None else ""

    @property
    def metrics_url(self) -> str:
        """The URL at which Prometheus scrapes this engine; empty if it serves no metrics."""
        return self._metrics.url if self._metrics is not None else ""

    @staticmethod
    async def connect(url: str | Path) -> "RemoteEngine":
        """Connect to an engine in another process.

        `url` is the engine's run directory, `unix:PATH` or `tcp://KEY@HOST:PORT`.
        """
        from rookery.engine.remote_engine import RemoteEngine

        return await RemoteEngine.connect(str(url))

    # ---- start and stop

    async def __aenter__(self) -> Self:
        if self._supervisor is not None:
            raise UsageError("this engine is already open; create another one for another run")
        if self.config.cache:  # report a cache that cannot be used before anything starts
            await asyncio.to_thread(lambda: ReplyCache(Path(self.config.cache).expanduser()).close())
        self.check_sandbox()
        for name, entry in self.entries.items():
            await entry.environment.prepare(self.sandboxes[name], self.on_preparation)
        upstreams = await check_upstreams(
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
                environments=[name for name in self.entries if name],
            )
        else:
            self._journal = Journal.open(self.folder)
        try:
            settings = build_run_settings(self.config, self.sandboxes, self.folder, ref)
            if settings.log_format == "json":
                self._log = open_log_file(
                    self.folder / "logs" / "supervisor.log",
                    make_formatter("json", run=settings.run, process="supervisor"),
                )
                events.setLevel(logging.INFO)
                logging.getLogger().addHandler(self._log)
            if settings.traces is not None:
                start_tracing(settings.traces, settings.run, "supervisor")
                self._traces = True
            self._supervisor = Supervisor(
                settings, self.environment, self._journal, self.config, self._streams.lengths
            )
            self._supervisor.records.on_record = self._on_record
            self._supervisor.records.on_event = self._on_event
            if self._resume:
                failed, causes = self._failed_again
                await asyncio.to_thread(self._streams.plan_resume, self.folder, failed=failed, causes=causes)
            self._live_state = LiveState(self._supervisor)
            if self.config.metrics:
                self._metrics = RunMetrics(self._supervisor, self.environment.title, self.config.metrics)
                await self._metrics.start()
            await self._supervisor.start()
            if problem := next(filter(None, self._provider_problems.values()), ""):
                self._supervisor.record_event(NOT_ISOLATED, {"detail": f"sandboxes will be refused: {problem}"})
            if self._no_tools_warning:
                self._supervisor.record_event("template.no_tools", {"detail": self._no_tools_warning})
            self._control = ControlServer(self, self.folder, self.config.listen)
            await self._control.start()
        except BaseException:
            await self._close("stopped")
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unfinished = any(not channel.done or channel.error for channel in self._streams.channels.values())
        await self._close("stopped" if unfinished or kind is not None else "finished")

    async def _close(self, status: Any) -> None:
        supervisor, journal, self._supervisor, self._journal = self._supervisor, self._journal, None, None
        control, self._control = self._control, None
        self._live_state = None
        metrics, self._metrics = self._metrics, None
        try:
            try:
                if metrics is not None:
                    await metrics.close()
                if control is not None:
                    await control.close()
            finally:
                if supervisor is not None:
                    for channel in self._streams.channels.values():
                        channel.notify()
                    await asyncio.shield(asyncio.ensure_future(supervisor.close()))
        finally:
            try:
                if journal is not None:
                    if journal.error is None:
                        journal.end(status)
                    await journal.aclose()
            finally:
                if self._log is not None:
                    logging.getLogger().removeHandler(self._log)
                    self._log.close()
                    self._log = None
                if self._traces:  # last, because it may take seconds
                    self._traces = False
                    await asyncio.to_thread(stop_tracing)

    def check_sandbox(self) -> None:
        """Raise `UsageError` if the sandbox provider or the environment does not support the sandbox spec."""
        for name, entry in self.entries.items():
            check_settings(
                entry.environment, self.sandboxes[name], self.config, self._out, self._provider_problems[name]
            )

    def _reference(self) -> EnvironmentRef:
        if self._environment_object is None:
            return environment_reference(self.config)
        return make_reference(self._environment_object) if self.config.runners else EnvironmentRef(source="")

    def _on_record(self, record: Rollout) -> None:
        if (counts := self._environment_counts.get(record.environment)) is not None:
            counts.add(split_outcome(record.outcome)[0], 1, record.valid, record.reward or 0.0)
        if self._metrics is not None:
            count_record(record)
        if self._log is not None:
            log_record(record)
        if self.on_record is not None:
            self.on_record(record)

    def _on_event(self, kind: str, payload: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.on_event(kind, payload)
        if self._log is not None:
            log_event(kind, payload)
        if self.on_event is not None:
            self.on_event(kind, payload)

    @property
    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise UsageError(NOT_OPEN)
        return self._supervisor

    def describe(self) -> dict[str, Any]:
        """Return the configuration as plain data, without secrets."""
        return describe_config(self.config)

    def pids(self) -> list[int]:
        """Return the process IDs of this process and its runners."""
        return [os.getpid(), *(pid for runner in self.supervisor.pool.runners for pid in runner.pids())]

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
        sampler: SamplerOption | None = None,
        buffer: int = 64,
        name: str = MAIN,
        restart: bool = False,
        load_tokens: bool = True,
        need_tokens: bool = False,
        staleness: StalenessBound | None = None,
    ) -> GroupStream:
        """Return a stream of groups. A group is the k rollouts of one task; it is delivered when all have ended.

        `tasks` defaults to the environment's own tasks, or, in a resumed run, to what is left of the run. `keep`
        filters groups: `"informative"` keeps groups whose valid rewards are not all equal; a function gets the
        group and returns whether to keep it. `want` ends the stream after that many groups; groups that the filter
        dropped do not count. `oversample` starts that many groups more than wanted and cancels the surplus.
        `epochs=None` repeats the tasks without end; `sampler` then chooses among them: `"uniform"`,
        `"skip-settled"`, `"difficulty"`, or a function that returns a `TaskSampler`. If `buffer` finished groups
        wait for the consumer, no more groups are started. Streams with different names run concurrently and share
        the engine fairly.

        A second call with the same name and tasks continues where the first stream ended: with finished groups
        that the consumer did not take, then cancelled groups, then new tasks. `want` counts from this call.
        `restart` starts again at the first task, with other seeds. A call with another list of tasks starts at the
        first task of that list. Two iterables that are not lists are assumed to yield the same tasks.

        `load_tokens=False` delivers groups without segments. `need_tokens` is for trainers: the stream raises
        `UsageError` if turns (model calls) are recorded without token IDs.
        """
        supervisor = self.supervisor
        if need_tokens:
            refuse_training(self.config)
        streams = self._streams
        streams.close_abandoned(name)
        if isinstance(keep, str):
            if keep not in KEEP:
                raise UsageError(
                    f"keep must be {' or '.join(map(repr, KEEP))}, or a function that takes a group and returns "
                    f"whether to return it, not {keep!r}"
                )
            keep = KEEP[keep]
        resumed_run = tasks is None and self._resume
        if resumed_run and restart:
            raise UsageError("a resumed run cannot be restarted: call `groups()` without restart=True")
        chosen = () if resumed_run else streams.choose_tasks(tasks)
        k = int(self.config.stream.get("k", k)) if resumed_run else k
        try:
            scheduler = GroupScheduler(k=k, want=want, oversample=oversample, buffer=buffer, staleness=staleness)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if isinstance(chosen, Sequence) and len(chosen) <= MAX_REGISTERED:
            self.register(chosen)
        cursor = None if restart else streams.find_cursor(name, tasks, chosen, resumed=resumed_run)
        if cursor is not None:
            cursor.rerun_unless_size(k)
        order = None if resumed_run else streams.choose_order(chosen, epochs, sampler, cursor)
        if order is not None:
            source: Iterable[PlannedGroup] = streams.plan_groups(name, order, 1, cursor)
        else:
            source = streams.resumed if resumed_run else streams.plan_groups(name, chosen, epochs, cursor)
        number = cursor.round if cursor is not None else streams.next_round(name)
        channel = GroupChannel(f"{name}#{number}" if number else name, scheduler, source, keep)
        if order is None:
            known = source if isinstance(source, list) else chosen
            channel.upcoming = partial(iter_upcoming, known, epochs, channel)
        channel.order = order
        channel.tasks = tuple(chosen) if isinstance(chosen, Sequence) else tasks
        if cursor is not None:
            cursor.restore(channel)
            supervisor.next_group = max(supervisor.next_group, cursor.next_group)
        channel.endless = epochs is None
        channel.loads_segments = load_tokens
        channel.needs_tokens = need_tokens
        streams.add(name, channel, number)
        supervisor.open_channel(channel)
        assert self.folder is not None
        return GroupStream(supervisor, channel, self.folder if load_tokens else None)

    def steps(
        self,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        k: int = 8,
        *,
        groups: int,
        lag: int = 1,
        keep: GroupFilter | str | None = None,
        epochs: int | None = 1,
        sampler: SamplerOption | None = None,
        name: str = MAIN,
        restart: bool = False,
    ) -> StepStream:
        """Return a stream of training steps with `groups` groups each, bounded in staleness.

        No group has tokens older than `lag` policy versions; each `upstream.sync` starts a new version. Rollouts
        run up to `lag` steps ahead while the consumer trains. The last step may have fewer groups. Other arguments
        are those of `groups`; a second call with the same name continues with the next step.
        """
        try:
            staleness = StalenessBound(groups, lag)
        except ValueError as error:
            raise UsageError(str(error)) from error
        window = (lag + 1) * groups
        stream = self.groups(
            tasks,
            k,
            keep=keep,
            epochs=epochs,
            sampler=sampler,
            buffer=window,
            name=name,
            restart=restart,
            staleness=staleness,
            need_tokens=True,
        )
        return StepStream(stream, staleness, self.upstream)

    def register(self, tasks: Sequence[Task]) -> None:
        """Write all tasks to the journal, so that a resume also knows the tasks that were not started."""
        self._streams.registry.register(tasks)

    # ---- pause, state

    @property
    def upstream(self) -> EngineUpstream:
        """Control of the policy's upstream: `pause`, `resume`, and `sync` for new weights."""
        return EngineUpstream(lambda: self.supervisor.pool.pauses, cache=self.config.cache)

    @asynccontextmanager
    async def paused(self, timeout: float = 600.0) -> AsyncIterator[None]:
        """Pause the run inside the `async with` block: no rollout starts and no model call is in progress.

        Running model calls are awaited for up to `timeout` seconds first. The run resumes at the end of the block,
        also after an exception.
        """
        pauses, holder = self.supervisor.pool.pauses, secrets.token_hex(8)
        await pauses.pause("drain", timeout=timeout, deadline=None, holder=holder)
        try:
            yield
        finally:
            await pauses.resume(holder=holder)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of every stream, and the finished groups that were not taken, as plain data.

        A trainer stores the result in its checkpoint and passes it to `load_state_dict` later.
        """
        assert self.folder is not None
        loaded = self._supervisor.records.record_load_failures if self._supervisor is not None else None
        return self._streams.dump(self.folder, loaded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Streams that are opened afterwards continue at the stored positions.

        Raises `UsageError` if the engine has another seed, or if one of the streams is open.
        """
        self._streams.load(state)

    async def drain(self, node: str) -> None:
        """Take a node out of the run: wait for its attempts, start no new ones there, and clean the node.

        `status` lists the nodes. Raises `UsageError` if there is no such node.
        """
        cluster = self.supervisor.pool.cluster
        if cluster is None:
            raise UsageError("this run has no cluster, so there is no node to drain")
        await cluster.drain(node)

    async def status(self) -> dict[str, Any]:
        """Return the current state of the run as plain data.

        It contains pauses, runners, open sandboxes, replicas of the upstreams, image downloads and streams. The
        `staleness` of a stream is how many policy versions ago its oldest group was started that was not taken.
        What runner processes report is up to a second old.
        """
        if self._live_state is None:
            raise UsageError(NOT_OPEN)
        assert self.folder is not None
        return await self._live_state.describe_run(self.folder, self._streams.channels, self._environment_counts)
