"""Mixtures: several environments in one run."""

import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery import (
    Context,
    Engine,
    GroupStream,
    Limits,
    Mixture,
    MixtureEntry,
    Sampling,
    SandboxSpec,
    Stopped,
    Task,
    UsageError,
    load_environment,
)
from rookery.core import Failed, Group
from rookery.journal import RunReader
from rookery.tasks.task_order import interleave_tasks
from tests.cli.helpers import rookery, start_command
from tests.engine.conftest import build_engine
from tests.engine.mixture_envs import Broken, Fixed, Long, Short
from tests.servers import ModelServer

ENTRIES = [
    MixtureEntry(Short(), weight=2.0, limits=Limits(turns=5)),
    MixtureEntry(Long(), sampling=Sampling(temperature=0.5)),
]


def make_tasks(**counts: int) -> list[Task]:
    return [Task(id=f"{name}/{n}", environment=name) for name, count in counts.items() for n in range(count)]


# ---- order


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 12), st.floats(0.1, 9.0)), min_size=1),
    st.integers(0, 2**40),
)
def test_order_of_tasks_follows_weights_and_seed_only(mixture: dict[str, tuple[int, float]], seed: int) -> None:
    tasks = make_tasks(**{name: count for name, (count, _) in mixture.items()})
    weights = {name: weight for name, (_, weight) in mixture.items()}
    ordered = interleave_tasks(tasks, weights, seed)
    assert ordered == interleave_tasks(ordered, weights, seed)
    assert Counter(task.id for task in ordered) == Counter(task.id for task in tasks)
    for name in mixture:
        own = [task for task in ordered if task.environment == name]
        assert own == [task for task in tasks if task.environment == name], "tasks keep their order"
    seen = Counter[str]()
    for number, task in enumerate(ordered, 1):
        seen[task.environment] += 1
        for name, weight in weights.items():
            share = number * weight / sum(weights.values())
            assert abs(seen[name] - share) < len(weights)
        if any(seen[name] == count for name, (count, _) in mixture.items()):
            break  # from here on the others continue without it


def test_seed_changes_the_order() -> None:
    tasks = make_tasks(a=20, b=20, c=20)
    weights = {"a": 1.0, "b": 1.5, "c": 2.0}
    orders = {tuple(task.environment for task in interleave_tasks(tasks, weights, seed)) for seed in range(8)}
    assert len(orders) > 1


# ---- runs


async def run_mixture(
    model: ModelServer, tmp_path: Path, entries: Any = ENTRIES, k: int = 2, **options: Any
) -> list[Group]:
    async with build_engine(model, tmp_path, entries, **options) as engine:
        groups = [group async for group in engine.groups(k=k)]
    return sorted(groups, key=lambda group: group.index)


async def test_mixture_runs_every_task_of_every_environment_with_its_own_settings(
    model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(model, tmp_path, ENTRIES, seed=3) as engine:
        groups = [group async for group in engine.groups(k=2)]
        status = (await engine.status())["environments"]
    assert Counter(group.environment for group in groups) == {"short": 6, "long": 4}
    assert {rollout.environment for group in groups for rollout in group.rollouts} == {"short", "long"}
    assert [group.task.id for group in sorted(groups, key=lambda one: one.index)] == [
        task.id for task in Mixture(ENTRIES, seed=3).tasks()
    ]
    by_name = {group.environment: group for group in groups}
    assert by_name["short"].rollouts[0].info["limits"] == 5, "the entry overrides the environment"
    assert by_name["long"].rollouts[0].usage.turns == 3
    assert status["short"]["rollouts"] == 12
    assert status["long"]["valid"] == 8
    bodies = {body["messages"][-1]["content"].split()[0]: body for body in (one.body for one in model.requests)}
    assert (bodies["long"].get("temperature"), bodies["long"].get("max_tokens")) == (0.5, 77)
    assert "temperature" not in bodies["short"]
    with RunReader(tmp_path / "runs" / "latest") as reader:
        totals = reader.summary().environments
        assert (totals["short"].rollouts, totals["short"].valid, totals["short"].reward) == (12, 12, 8.0)
        assert totals["long"].rollouts == 8


@pytest.mark.parametrize(
    "entries",
    [
        [],
        "short",
        [{"name": "no environment"}],
        [{"environment": "arithmetic", "wieght": 2}],
        [{"environment": "arithmetic", "weight": 0}],
        [{"environment": "arithmetic", "weight": "heavy"}],
        [{"environment": "arithmetic", "name": "a/b"}],
        [{"environment": "arithmetic", "limits": {"turn": 2}}],
        ["arithmetic", "arithmetic"],
        [Mixture(["arithmetic"])],
        [7],
    ],
)
def test_wrong_entries_are_refused_at_construction(entries: Any) -> None:
    with pytest.raises(UsageError):
        Mixture(entries)


async def test_task_of_an_unknown_environment_is_refused(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, ENTRIES) as engine:
        with pytest.raises(UsageError):
            engine.groups([Task(id="x")])


def test_mixture_file_names_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "one", "prompt": "1 + 1", "data": {"answer": 2}}\n')
    file = tmp_path / "mix.toml"
    file.write_text('[[environments]]\nenvironment = "arithmetic"\nname = "sums"\ntasks = "rows.jsonl"\n')
    mixture = load_environment(str(file))
    assert isinstance(mixture, Mixture)
    assert (mixture.title, [task.id for task in mixture.tasks()]) == ("mix", ["sums/one"])
    (tmp_path / "rows.jsonl").write_text('{"q": "1 + 1?", "a": "So: #### 2"}\n')
    columns = 'row_format = "gsm8k"\ncolumns = {question = "q", answer = "a"}\n'
    file.write_text(f'[[environments]]\nenvironment = "arithmetic"\ntasks = "rows.jsonl"\n{columns}')
    mixture = load_environment(str(file))
    (task,) = mixture.tasks()
    assert isinstance(task, Task)
    assert (task.text, task.data["answer"]) == ("1 + 1?", "2")
    file.write_text(f'[[environments]]\nenvironment = "arithmetic"\n{columns}')
    with pytest.raises(UsageError):
        load_environment(str(file))
    file.write_text('[[environment]]\nenvironment = "arithmetic"\n')
    with pytest.raises(UsageError):
        load_environment(str(file))


# ---- resume


def describe_rollouts(groups: list[Group]) -> set[tuple[str, int, int]]:
    return {(rollout.task, rollout.member, rollout.seed) for group in groups for rollout in group.rollouts}


async def test_state_dict_continues_the_order_in_another_engine(model: ModelServer, tmp_path: Path) -> None:
    whole = await run_mixture(model, tmp_path, seed=5)
    taken: list[Group] = []
    async with build_engine(model, tmp_path, ENTRIES, seed=5, concurrency=3) as engine:
        async for group in engine.groups(k=2):
            taken.append(group)
            if len(taken) == 4:
                break
        state = engine.state_dict()
    async with build_engine(model, tmp_path, ENTRIES, seed=5) as engine:
        engine.load_state_dict(state)
        taken += [group async for group in engine.groups(k=2)]
    assert len(taken) == len(whole), "no group is delivered twice"
    assert describe_rollouts(taken) == describe_rollouts(whole)


MIXTURE_FILE = """
[[environments]]
environment = "arithmetic"
weight = 3
num_tasks = 12

[[environments]]
environment = "tools"
tasks = "questions.jsonl"
"""


@pytest.mark.long
async def test_sigkill_and_resume_of_a_mixture_give_the_same_rollouts(model: ModelServer, tmp_path: Path) -> None:
    rows = [f'{{"id": "q{n}", "prompt": "question {n}", "data": {{"answer": "ok"}}}}\n' for n in range(8)]
    (tmp_path / "questions.jsonl").write_text("".join(rows))
    (tmp_path / "mix.toml").write_text(MIXTURE_FILE)
    run = ("run", "mix.toml", "--policy", model.url, "-k", "2", "-c", "2", "--runners", "1", "--seed", "4")
    async with start_command(*run, "-o", "killed", cwd=tmp_path) as process:
        await model.wait_for_requests(9)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    (tmp_path / "mix.toml").unlink()  # the journal has a copy of its content
    assert (await rookery("resume", "latest", "--runs", "killed", cwd=tmp_path)).code == 0
    (tmp_path / "mix.toml").write_text(MIXTURE_FILE)
    assert (await rookery(*run, "-o", "whole", cwd=tmp_path)).code == 0
    found = {}
    for name in ("killed", "whole"):
        with RunReader((tmp_path / name / "latest").resolve()) as reader:
            found[name] = [(one.id, one.task, one.environment, one.seed) for one in reader.iter_rollouts()]
            totals = reader.summary().environments
        assert {name: (one.rollouts, one.reward) for name, one in totals.items()} == {
            "arithmetic": (24, 0.0),
            "tools": (16, 16.0),
        }
    assert found["killed"] == found["whole"]


# ---- failing environments


async def collect(stream: GroupStream, groups: list[Group]) -> None:
    """Add all groups of a stream to the list, also those before an error."""
    async for group in stream:
        groups.append(group)  # noqa: PERF401  (keeps the groups before an error)


async def test_failing_environment_stops_and_the_others_finish(model: ModelServer, tmp_path: Path) -> None:
    entries = [MixtureEntry(Broken()), MixtureEntry(Short(size=60), weight=2.0)]
    events: list[str] = []
    groups: list[Group] = []
    async with build_engine(model, tmp_path, entries, concurrency=4) as engine:
        engine.on_event = lambda kind, _: events.append(kind)
        with pytest.raises(Stopped):
            await collect(engine.groups(k=1), groups)
        status = (await engine.status())["environments"]
        state = engine.state_dict()
    assert events.count("environment.stopped") == 1
    assert status["broken"]["stopped"]
    assert status["short"] == {
        "rollouts": 60,
        "failed": 0,
        "valid": 60,
        "reward": 30.0,
        "mean_reward": 0.5,
        "stopped": "",
    }
    ended = Counter(group.environment for group in groups)
    assert ended["short"] == 60
    assert 20 <= ended["broken"] < 30
    with RunReader(tmp_path / "runs" / "latest") as reader:
        assert reader.status == "stopped"
    async with build_engine(model, tmp_path, [MixtureEntry(Fixed()), entries[1]], concurrency=4) as engine:
        engine.load_state_dict(state)
        groups += [group async for group in engine.groups(k=1)]
    assert Counter(group.environment for group in groups) == {"short": 60, "broken": 40}, "the skipped groups run"
    assert len({group.task.id for group in groups}) == 100


async def test_run_stops_if_all_environments_fail(model: ModelServer, tmp_path: Path) -> None:
    entries = [MixtureEntry(Broken()), MixtureEntry(Broken(), name="other")]
    async with build_engine(model, tmp_path, entries) as engine:
        with pytest.raises(Stopped):
            await collect(engine.groups(k=1, epochs=None), [])
    with RunReader(tmp_path / "runs" / "latest") as reader:
        assert reader.status == "stopped"


# ---- parts of rewards


class Parts(Short):
    """Returns a reward of two parts."""

    name = "parts"
    part_weights = MappingProxyType({"good": 0.5})

    async def score(self, ctx: Context) -> Any:
        level = ctx.task.data["level"]
        return {"good": 1.0, "level": float(level) / 4} if level < 3 else {"good": float("nan")}


async def test_parts_of_a_reward_are_summed_with_the_weights_of_the_environment(
    model: ModelServer, tmp_path: Path
) -> None:
    groups = await run_mixture(model, tmp_path, Parts(size=4), k=1)
    found = [(group.rollouts[0].reward, group.rollouts[0].rewards) for group in groups]
    assert found[:3] == [(0.5 + level / 4, {"good": 1.0, "level": level / 4}) for level in (0, 1, 2)]
    outcome = groups[3].rollouts[0].outcome
    assert isinstance(outcome, Failed)
    assert outcome.cause == "bug.reward"


# ---- samplers


async def test_state_dict_keeps_the_memory_of_the_sampler(model: ModelServer, tmp_path: Path) -> None:
    """Tasks of levels 2 and 3 are never solved, and those below always, so that all of them rest in turn."""
    options: dict[str, Any] = {"seed": 9, "concurrency": 1}
    stream: dict[str, Any] = {"k": 2, "epochs": None, "sampler": {"short": "skip-settled"}, "buffer": 1}

    async def take(count: int, state: Any = None) -> tuple[list[tuple[str, int]], Any]:
        async with build_engine(model, tmp_path, ENTRIES, **options) as engine:
            if state is not None:
                engine.load_state_dict(state)
            groups = engine.groups(**stream, want=count)
            found = [(group.task.id, group.rollouts[0].seed) async for group in groups]
            return found, engine.state_dict()

    whole, _ = await take(40)
    first, state = await take(17)
    rest, _ = await take(23, state)
    assert first + rest == whole
    names = Counter(task.split("/")[0] for task, _ in whole)
    assert names["short"] in range(24, 30), "two of three, whatever rests"
    solved = Counter(task for task, _ in whole if task in ("short/t0", "short/t2"))
    assert solved["short/t0"] < solved["short/t2"], "solved tasks rest longer"


# ---- long rollouts


async def test_longest_first_changes_only_the_order_in_which_rollouts_start(
    model: ModelServer, tmp_path: Path
) -> None:
    entries = [MixtureEntry(Short(size=8)), MixtureEntry(Long())]
    started: dict[bool, list[str]] = {}
    found: dict[bool, set[tuple[str, int, int]]] = {}
    for longest in (False, True):
        model.requests.clear()
        groups = await run_mixture(model, tmp_path, entries, k=1, concurrency=1, seed=2, longest_first=longest)
        started[longest] = [request.body["messages"][-1]["content"].split()[0] for request in model.requests]
        found[longest] = describe_rollouts(groups)
    assert found[True] == found[False]
    assert Counter(started[True]) == Counter(started[False]) == {"short": 8, "long": 12}
    # The first four groups start in the planned order, since nothing is known about their lengths. After that,
    # up to four groups are sorted at a time: two windows, each with its long rollouts first.
    rest = started[True][sum(3 if "long" in name else 1 for name in planned_names(entries)[:4]) :]
    changes = sum(before != after for before, after in pairwise(rest))
    assert changes <= 3
    assert rest[0] == "long"


async def test_state_dict_keeps_the_predicted_lengths(model: ModelServer, tmp_path: Path) -> None:
    entries = [MixtureEntry(Short(size=2)), MixtureEntry(Long())]
    options: dict[str, Any] = {"concurrency": 1, "seed": 2, "longest_first": True}
    async with build_engine(model, tmp_path, entries, **options) as engine:
        assert [group async for group in engine.groups(k=1)]
        lengths = engine.supervisor.lengths.get_state()
        state, folder = engine.state_dict(), engine.folder
    assert folder is not None
    assert set(lengths.environments) == {"short", "long"}
    async with build_engine(model, tmp_path, entries, **options) as engine:
        engine.load_state_dict(state)
        assert engine.supervisor.lengths.get_state() == lengths
    async with Engine.resume(folder, env=entries) as resumed:
        assert resumed.supervisor.lengths.get_state() == lengths


def planned_names(entries: list[MixtureEntry]) -> list[str]:
    return [task.environment for task in Mixture(entries, seed=2).tasks()]


async def test_runner_processes_load_environment_objects_and_their_own_sandboxes(
    model: ModelServer, tmp_path: Path
) -> None:
    entries = [
        MixtureEntry(Short(size=2), name="small", sandbox=SandboxSpec(provider="subprocess", pids=40)),
        {"environment": "tests.engine.mixture_envs:Short", "arguments": {"size": 3}, "name": "other"},
    ]
    async with build_engine(model, tmp_path, entries, runners=1) as engine:
        groups = [group async for group in engine.groups(k=1)]
    assert (engine.sandboxes["small"].provider, engine.sandboxes["small"].pids) == ("subprocess", 40)
    assert engine.sandboxes["other"].pids != 40
    assert Counter(group.environment for group in groups) == {"small": 2, "other": 3}
    assert all(group.valid for group in groups)
