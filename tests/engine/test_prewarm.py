"""Prewarming of sandboxes: what a run expects, which runner prepares it, and that no surplus is created."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery import Context, Environment
from rookery.cli.progress import describe_image_pulls
from rookery.core import Message, Rollout, SandboxSpec, Task, TaskError, label
from rookery.engine.background_tasks import AttemptTasks, start_detached, task_factory
from rookery.engine.checkpoint import StreamCheckpoint, StreamCursor
from rookery.engine.group_channel import GroupChannel, PlannedGroup
from rookery.engine.prewarm import LOOK_AHEAD, Prewarmer, PrewarmPlan, iter_demand, iter_upcoming, round_robin
from rookery.engine.runner_handle import RunnerHandle
from rookery.engine.runner_pool import RunnerPool
from rookery.engine.runner_protocol import ImageUpdate, PrewarmRequest, RunSettings
from rookery.engine.sandbox_factory import SandboxFactory, build_pool_budget
from rookery.engine.scheduler import GroupScheduler
from rookery.engine.task_source import plan_groups
from rookery.environments.loader import EnvironmentRef
from rookery.sandboxes.images.progress import ImageProgress
from rookery.sandboxes.protocol import Command
from tests.engine.conftest import build_engine, events
from tests.engine.pooled import Provider
from tests.sandboxes.plugins import plugin
from tests.servers import ModelServer
from tests.waiting import wait_for_status, wait_until

MB = 1 << 20
TASKS = [Task(id=f"t{n}", prompt=(Message("user", str(n)),)) for n in range(8)]
NAMES = ["a", "b", "c", "d"]


# ---- demand and plan


class RecordingRunner(RunnerHandle):
    """A runner handle that records what it is sent."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None)  # type: ignore[arg-type]
        self.ready = True
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


def build_pool(runners: list[RecordingRunner]) -> RunnerPool:
    """Return a pool of these runners, with two attempts for each."""
    settings: Any = SimpleNamespace(sandboxes={}, sandbox=SandboxSpec())
    owner: Any = None
    pool = RunnerPool(owner, settings, Environment(), size=len(runners), capacity=2, block_limit=1.0)
    pool.runners += runners
    return pool


@given(
    st.integers(0, 12),
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(TASKS), st.integers(0, 5)), max_size=8),
            st.dictionaries(st.sampled_from(NAMES), st.integers(0, 6), max_size=4),
            st.sets(st.sampled_from([task.id for task in TASKS]), max_size=3),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_plan_assigns_no_more_than_the_demand_and_keeps_assignments(most: int, rounds: list[Any]) -> None:
    runners = [RecordingRunner(name) for name in NAMES]

    def choose(_: Task) -> RunnerHandle | None:
        shared = (runner for runner in runners if runner.is_shared)
        return min(shared, key=lambda runner: len(runner.running) + runner.planned, default=None)

    plan = PrewarmPlan(most, choose)
    before: dict[RunnerHandle, Counter[str]] = {}
    for wanted, busy, without in rounds:
        for runner in runners:
            runner.ready = runner.name in busy
            runner.running = dict.fromkeys(map(str, range(busy.get(runner.name, 0))))  # type: ignore[arg-type]
        assigned = plan.assign(iter(wanted), without)
        dealt = {runner: Counter({task.id: n for task, n in has}) for runner, has in assigned.items()}
        assert all(runner.ready for runner, has in dealt.items() if has)
        assert all(runner.planned == dealt.get(runner, Counter()).total() for runner in runners)
        window: Counter[str] = Counter()
        for task, number in wanted[: LOOK_AHEAD * most]:
            if task.id not in without:
                window[task.id] += min(number, most - window.total())
        total = sum(dealt.values(), Counter())
        assert total == (+window if busy else Counter())
        for task in window:
            now = {runner: dealt.get(runner, Counter()) for runner in before}
            kept = sum(min(has[task], now[runner][task]) for runner, has in before.items() if runner.ready)
            had = sum(has[task] for runner, has in before.items() if runner.ready)
            assert kept == min(had, window[task])
        before = dealt


async def test_new_rollouts_are_assigned_to_the_least_loaded_runner() -> None:
    runners = [RecordingRunner(name) for name in "abc"]
    for runner, running in zip(runners, (3, 0, 1), strict=True):
        runner.running = dict.fromkeys(map(str, range(running)))  # type: ignore[arg-type]
    plan = PrewarmPlan(8, build_pool(runners).find_runner_to_prewarm)
    dealt = plan.assign([(TASKS[0], 4), (TASKS[1], 2)])
    loads = [len(runner.running) + runner.planned for runner in runners]
    assert max(loads) - min(loads) <= 1
    chosen = plan.start_rollout("t1")
    assert chosen is not None
    assert "t1" in {task.id for task, _ in dealt[chosen]}
    assert plan.start_rollout("unheard of") is None


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(0, 8)),
    st.integers(0, 2),
    st.lists(st.sampled_from(["begin", "end", "again", "take", "drop"]), max_size=40),
)
def test_demand_never_exceeds_the_rollouts_that_will_start(
    k: int, count: int, want: int | None, oversample: int, actions: list[str]
) -> None:
    """Compare the demand at every moment with all rollouts that the stream can still start without a retry."""
    tasks = TASKS[:count]
    schedule = GroupScheduler(k=k, want=want, oversample=oversample, buffer=2)
    channel = GroupChannel("main", schedule, (PlannedGroup(n, n, task) for n, task in enumerate(tasks)), None)
    flying = []
    begun: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for action in actions:
        if action == "begin":
            pick = schedule.next_rollout(0.0)
            while pick is None and schedule.can_start_group() and (found := channel.next_group()) is not None:
                schedule.start_group(found.ordinal, found.task, 0.0)
                pick = schedule.next_rollout(0.0)
            if pick is not None:
                flying.append(pick)
                begun[pick.group.task.id] += 1
        elif action == "again" and flying:
            pick = flying.pop()
            again[pick.group.task.id] += 1
            schedule.requeue(pick, 0.0, 0.0)
        elif action in ("end", "drop") and flying:
            pick = flying.pop(0)
            name = pick.id
            record = Rollout(id=name, group=0, member=pick.member, task="t", outcome=None)  # type: ignore[arg-type]
            if schedule.finish(pick, record):
                schedule.resolve_group(pick.group, kept=action == "end")
                for group in schedule.pop_surplus():
                    flying = [one for one in flying if one.group is not group]
        elif action == "take" and schedule.buffered:
            schedule.mark_taken()
        expected: Counter[str] = Counter()
        for task, number in iter_demand(schedule, iter_upcoming(tasks, 1, channel)):
            expected[task.id] += number
        for task in tasks:
            assert expected[task.id] <= k + again[task.id] - begun[task.id]
        if want is not None and schedule.delivered >= want:
            assert not expected
        if want is not None:
            assert expected.total() <= k * (want + oversample) + again.total()


@given(st.integers(1, 5), st.sampled_from([1, 2, 3]), st.integers(0, 12), st.data())
def test_demand_after_a_checkpoint_matches_the_tasks_to_come(
    count: int, epochs: int, admitted: int, data: st.DataObject
) -> None:
    tasks = TASKS[:count]
    admitted = min(admitted, epochs * count)
    open_ = data.draw(st.lists(st.integers(0, admitted - 1), unique=True).map(sorted)) if admitted else []
    state = StreamCheckpoint(admitted=admitted, taken=0, open=open_, finished=[])
    cursor = StreamCursor.from_checkpoint(state, lambda _: 0)
    channel = GroupChannel("main", GroupScheduler(k=3), plan_groups(tasks, epochs, lambda _: 0, cursor), None)
    cursor.restore(channel)
    while True:
        seen = [task.id for task, number in iter_upcoming(tasks, epochs, channel) if number == 3]
        drawn = channel.next_group()
        if drawn is None:
            assert seen == []
            return
        assert seen[0] == drawn.task.id


def test_demand_of_a_resumed_run_is_its_missing_rollouts() -> None:
    sources = [PlannedGroup(0, 0, TASKS[0], finished={0: None, 2: None}), PlannedGroup(1, 1, TASKS[1])]  # type: ignore[dict-item]
    channel = GroupChannel("main", GroupScheduler(k=4), sources, None)
    assert list(iter_upcoming(sources, 1, channel)) == [(TASKS[0], 2), (TASKS[1], 4)]
    channel.next_group()
    assert list(iter_upcoming(sources, 1, channel)) == [(TASKS[1], 4)]


def test_demand_takes_nothing_from_an_iterator() -> None:
    drawn = []

    def source() -> Iterator[Task]:
        for task in TASKS:
            drawn.append(task)
            yield task

    tasks = source()
    assert list(iter_upcoming(tasks, 1, GroupChannel("main", GroupScheduler(k=1), (), None))) == []
    assert drawn == []


def test_round_robin_alternates_between_streams() -> None:
    one, two = ([(task, 1) for task in some] for some in (TASKS[:3], TASKS[3:5]))
    assert [task.id for task, _ in round_robin([iter(one), iter(two)])] == ["t0", "t3", "t1", "t4", "t2"]


# ---- runs


class Working(Environment):
    """Requests the memory that its task names, and fails if its sandbox is not empty."""

    name = "working"

    @property
    def needs_sandbox(self) -> bool:
        return True

    def sandbox_for(self, task: Task, spec: SandboxSpec) -> SandboxSpec:
        from msgspec.structs import replace

        if "broken" in task.data:
            raise TaskError(f"task {task.id} asks for {task.data['broken']}")
        return replace(spec, memory=task.data.get("memory", 64) * MB)

    async def run(self, ctx: Context) -> None:
        sandbox = await ctx.sandbox()
        found = await sandbox.exec(Command(argv=("ls", "-A")))
        ctx.info |= {"files": found.stdout.decode(), "memory": ctx.spec.memory, "sandbox": sandbox.id}
        await sandbox.write("mine", ctx.attempt.encode())
        await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx: Context) -> float:
        return 1.0


class Idle(Working):
    """Never requests a sandbox."""

    @property
    def needs_sandbox(self) -> bool:
        return False

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat(ctx.task.prompt)


class Undecided(Working):
    """Requests another sandbox than it declared."""

    async def run(self, ctx: Context) -> None:
        await ctx.sandbox(SandboxSpec(memory=99 * MB))
        await ctx.policy.chat(ctx.task.prompt)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Provider]:
    folder = tmp_path / "plugins"
    folder.mkdir()
    plugin(folder, "slow", check="return []", module="tests.engine.pooled")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("rookery.sandboxes.pools.WAIT_SECONDS", 30.0)  # a slow machine must have hits too
    Provider.created, Provider.ended, Provider.fetch = [], [], None
    return Provider


def count_prewarmed(slow: type[Provider]) -> list[SandboxSpec]:
    return [spec for attempt, spec in slow.created if attempt == "pool"]


async def test_attempts_use_prewarmed_sandboxes_and_no_surplus_is_created(
    slow: type[Provider], model: ModelServer, tmp_path: Path
) -> None:
    tasks = [{"prompt": str(n), "memory": 64 + 16 * (n % 2)} for n in range(6)]
    async with build_engine(model, tmp_path, Working(), sandbox="slow", concurrency=2) as engine:
        groups = [group async for group in engine.groups(tasks, k=2)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * 12
    assert {rollout.info["files"] for rollout in rollouts} == {""}
    assert len({rollout.info["sandbox"] for rollout in rollouts}) == 12
    for group in groups:
        assert {one.info["memory"] for one in group.rollouts} == {group.task.data["memory"] * MB}
    (event,) = events(tmp_path, "sandboxes.opened")
    assert event["prewarmed"] + event["on_demand"] == 12
    assert len(slow.created) == 12
    assert event["prewarmed"] >= 8  # all but the first attempts, which request at once
    assert {spec.memory for spec in count_prewarmed(slow)} == {64 * MB, 80 * MB}


async def test_used_sandbox_is_never_given_to_another_attempt(
    slow: type[Provider], model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(model, tmp_path, Working(), sandbox="slow", concurrency=1) as engine:
        groups = [group async for group in engine.groups(["q"], k=5)]
    (group,) = groups
    assert [one.info["files"] for one in group.rollouts] == [""] * 5
    assert len({one.info["sandbox"] for one in group.rollouts}) == 5


async def test_evaluating_one_task_creates_one_sandbox(
    slow: type[Provider], model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(model, tmp_path, Working(), sandbox="slow", warm=500) as engine:
        assert len([group async for group in engine.groups(["q"], k=1)]) == 1
    assert len(slow.created) == 1


@pytest.mark.parametrize("environment", [Idle, Working])
async def test_nothing_is_prewarmed_without_requests_or_without_a_pool(
    slow: type[Provider], model: ModelServer, tmp_path: Path, environment: type[Working]
) -> None:
    warm = 0 if environment is Working else 8
    async with build_engine(model, tmp_path, environment(), sandbox="slow", warm=warm, concurrency=2) as engine:
        assert len([group async for group in engine.groups(["a", "b", "c", "d"])]) == 4
    assert count_prewarmed(slow) == []


async def test_prewarming_stops_if_attempts_request_another_sandbox_than_declared(
    slow: type[Provider], model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(model, tmp_path, Undecided(), sandbox="slow", warm=2, concurrency=1) as engine:
        groups = [group async for group in engine.groups([str(n) for n in range(12)])]
    assert len(groups) == 12
    assert len(count_prewarmed(slow)) <= 4
    assert len(slow.ended) == len(slow.created)


async def test_task_with_an_invalid_sandbox_fails_in_setup_and_others_continue(
    slow: type[Provider], model: ModelServer, tmp_path: Path
) -> None:
    tasks = [{"prompt": "a", "broken": "the moon"}, {"prompt": "b"}]
    async with build_engine(model, tmp_path, Working(), sandbox="slow") as engine:
        groups = sorted([group async for group in engine.groups(tasks, k=2)], key=lambda one: one.index)
    broken, well = groups
    for rollout in broken.rollouts:
        assert rollout.outcome.fault == "task"  # type: ignore[union-attr]
        assert rollout.outcome.stage == "setup"  # type: ignore[union-attr]
        assert "the moon" in rollout.outcome.detail  # type: ignore[union-attr]
    assert [label(rollout.outcome) for rollout in well.rollouts] == ["completed"] * 2


@pytest.mark.long
@pytest.mark.usefixtures("slow")
async def test_runner_processes_get_prewarm_requests(model: ModelServer, tmp_path: Path) -> None:
    tasks = [{"prompt": str(n), "memory": 64 + 16 * n} for n in range(10)]
    env = "tests.engine.test_prewarm:Working"
    async with build_engine(model, tmp_path, env, sandbox="slow", runners=2, concurrency=2) as engine:
        groups = [group async for group in engine.groups(tasks, k=2)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * 20
    opened = events(tmp_path, "sandboxes.opened")
    assert {one["runner"] for one in opened} <= {"runner-1", "runner-2"}
    assert sum(one["prewarmed"] + one["on_demand"] for one in opened) == 20
    assert sum(one["prewarmed"] for one in opened) > 0


async def test_rollout_goes_to_the_runner_that_prewarmed_it_and_unchanged_requests_are_not_sent() -> None:
    links = [RecordingRunner("a"), RecordingRunner("b")]
    pool = build_pool(links)
    prewarmer = Prewarmer(pool, 4)
    channel = GroupChannel(
        "main", GroupScheduler(k=1), (PlannedGroup(n, n, task) for n, task in enumerate(TASKS)), None
    )
    channel.upcoming = lambda: iter_upcoming(TASKS, 1, channel)
    prewarmer.update([channel])
    (first,), (second,) = (link.messages for link in links)
    assert [task.id for task in first.tasks] == ["t0", "t2"]
    assert [task.id for task in second.tasks] == ["t1", "t3"]
    for task, link in zip(TASKS[:2], links, strict=True):
        assert prewarmer.find_runner(task.id) is link
        link.running[task.id] = None
        channel.next_group()
    prewarmer.update([channel])
    assert [one.counts for one in links[0].messages[1:]] == [[("t2", 1), ("t4", 1)]]
    assert [[task.id for task in one.tasks] for one in links[0].messages[1:]] == [["t4"]]
    counts = [len(link.messages) for link in links]
    prewarmer.update([channel])
    assert [len(link.messages) for link in links] == counts
    assert pool.find_free_runner(preferred=links[0]) is links[0]
    links[0].running.update(dict.fromkeys("abcd"))
    assert pool.find_free_runner(preferred=links[0]) is links[1]  # the other one already has twice its share
    prewarmer.update([])
    assert [link.prewarmed for link in links] == [[], []]


async def test_status_shows_image_pulls_until_they_end(
    slow: type[Provider], model: ModelServer, tmp_path: Path
) -> None:
    slow.fetch = asyncio.Event()
    async with build_engine(model, tmp_path, Working(), sandbox="slow") as engine:
        stream = engine.groups(["q"])
        first = asyncio.ensure_future(anext(stream))
        status = await wait_for_status(engine, lambda status: status["images"])
        (line,) = describe_image_pulls(status["images"])
        assert line.endswith(" python:3.12 34%")
        slow.fetch.set()
        await first
        assert (await engine.status())["images"] == []
    assert events(tmp_path, "image.fetching") == [{"runner": "local-1", "image": "python:3.12", "bytes": 100}]
    assert len(events(tmp_path, "image.ready")) == 1


def test_progress_lists_each_image_once_and_only_a_few() -> None:
    images = [{"image": f"i{n % 4}", "step": "unpacking", "done": n, "total": 0} for n in range(8)]
    assert [re.findall(r"\bi?\d\b", line) for line in describe_image_pulls(images)] == [["i0"], ["i1"], ["2"]]


# ---- one factory


def settings(tmp_path: Path, **others: Any) -> RunSettings:
    return RunSettings(
        run="run",
        folder=str(tmp_path),
        environment=EnvironmentRef(source=""),
        upstreams={},
        sandbox=SandboxSpec(provider="slow"),
        limits=Working.limits,
        **others,
    )


async def test_nothing_is_prewarmed_during_a_pause(slow: type[Provider], tmp_path: Path) -> None:
    factory = SandboxFactory(settings(tmp_path, warm=4), {"": Working()}, lambda _: None, paused=True)
    factory.prewarm(PrewarmRequest([("t0", 2)], [TASKS[0]]))
    asked = await factory.open(factory.build_spec(TASKS[0]), "1.0.1")  # a request is still served
    assert [attempt for attempt, _ in slow.created] == ["1.0.1"]
    factory.pause_prewarming(paused=False)
    await wait_until(lambda: len(count_prewarmed(slow)) > 0)
    await asked.close()
    await factory.close()
    assert len(slow.ended) == len(slow.created)


async def test_warm_sandbox_is_kept_for_an_attempt_that_has_not_requested_it(
    slow: type[Provider], tmp_path: Path
) -> None:
    factory = SandboxFactory(settings(tmp_path, warm=4), {"": Working()}, lambda _: None, paused=False)
    factory.prewarm(PrewarmRequest([("t0", 1)], [TASKS[0]]))
    await wait_until(lambda: len(slow.created) == 1)
    factory.expect("1.0.1", TASKS[0])
    factory.prewarm(PrewarmRequest([], []))
    sandbox = await factory.open(factory.build_spec(TASKS[0]), "1.0.1")
    assert [attempt for attempt, _ in slow.created] == ["pool"]
    await sandbox.close()
    factory.expect("1.1.1", TASKS[0])
    await wait_until(lambda: len(slow.created) == 2)
    factory.stop_expecting("1.1.1")  # it never requested one
    await wait_until(lambda: len(slow.ended) == 2)
    await factory.close()


async def test_requested_sandbox_is_subtracted_once_from_the_expected_ones(
    slow: type[Provider], tmp_path: Path
) -> None:
    factory = SandboxFactory(settings(tmp_path, warm=4), {"": Working()}, lambda _: None, paused=False)
    for name in ("1.0.1", "1.1.1"):
        factory.expect(name, TASKS[0])
    await wait_until(lambda: sum(len(pool.warm_sandboxes) for pool in factory._pools.values()) == 2)
    before = asyncio.current_task()
    opening = asyncio.create_task(factory.open(factory.build_spec(TASKS[0]), "1.0.1"))
    while not asyncio.all_tasks() - {
        before,
        opening,
    }:  # the request was made, and the pool has not processed it yet
        await asyncio.sleep(0)
    factory.prewarm(PrewarmRequest([], []))
    opened = [await opening, await factory.open(factory.build_spec(TASKS[0]), "1.1.1")]
    assert [attempt for attempt, _ in slow.created] == ["pool", "pool"]
    assert not slow.ended
    for sandbox in opened:
        await sandbox.close()
    await factory.close()


@pytest.fixture
async def with_attempts() -> AsyncIterator[None]:
    """Use the task factory of a runner, which assigns tasks to attempts."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    loop.set_task_factory(task_factory)
    yield
    loop.set_task_factory(before)


@pytest.mark.usefixtures("with_attempts")
async def test_end_of_an_attempt_does_not_cancel_prewarming_for_others(
    slow: type[Provider], tmp_path: Path
) -> None:
    slow.fetch = asyncio.Event()
    factory = SandboxFactory(settings(tmp_path, warm=4), {"": Working()}, lambda _: None, paused=False)
    tasks = AttemptTasks()

    async def attempt() -> None:
        tasks.track()
        factory.prewarm(PrewarmRequest([("t0", 1)], [TASKS[0]]))
        await wait_until(lambda: len(slow.created) == 1)
        assert await tasks.cancel_all(1.0) == set()

    await asyncio.create_task(attempt())
    slow.fetch.set()
    await (await factory.open(factory.build_spec(TASKS[0]), "1.0.1")).close()
    assert [attempt for attempt, _ in slow.created] == ["pool"]
    await factory.close()


async def test_sandbox_ready_at_the_moment_of_cancellation_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = SandboxFactory(settings(tmp_path), {"": Working()}, lambda _: None, paused=False)

    def cancelled_in_time(work: Any) -> Any:
        monkeypatch.undo()
        started = start_detached(work)
        started.add_done_callback(lambda _: opening.cancel())  # before it learns that the sandbox exists
        return started

    monkeypatch.setattr("rookery.engine.sandbox_factory.start_detached", cancelled_in_time)
    opening = asyncio.create_task(factory.open(SandboxSpec(provider="local"), "1.0.1"))
    await asyncio.wait({opening})
    assert opening.cancelled()
    assert len(factory._closing) == 1
    await wait_until(lambda: not factory._closing)
    await factory.close()


def test_pool_budget_is_divided_among_the_runners(tmp_path: Path) -> None:
    alone, shared = (build_pool_budget(settings(tmp_path, warm=10, runner_count=count)) for count in (1, 4))
    assert (alone.max_warm, shared.max_warm) == (10, 3)
    assert (alone.max_starting, shared.max_starting) == (4, 1)
    assert (alone.max_creating, shared.max_creating) == (16, 4)
    assert alone.memory is not None
    assert shared.memory is not None
    assert 0 < shared.memory < alone.memory


def test_image_progress_is_sent_at_each_step_and_at_intervals(tmp_path: Path) -> None:
    sent: list[Any] = []
    factory = SandboxFactory(settings(tmp_path), {"": Working()}, sent.append, paused=False)
    for done in range(1000):
        factory.on_image(ImageProgress(image="i", step="fetching", done=done, total=1000))
    factory.on_image(ImageProgress(image="i", step="unpacking"))
    factory.on_image(ImageProgress(image="i", step="ready"))
    assert [one.step for one in sent[-2:]] == ["unpacking", "ready"]
    assert sent[0] == ImageUpdate("i", "fetching", 0, 1000)
    assert len(sent) < 100
