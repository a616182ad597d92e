"""The registry entry for open-instruct, with a stub of its interface and real environments."""

import abc
import dataclasses
import json
import runpy
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

import rookery.environments.swe.repairs as repairs
from rookery import Context, tool
from rookery.adapters.open_instruct import check_interface, make_rows, register
from rookery.adapters.stepped_rollout import EpisodeLostError, SteppedRollout
from rookery.core import SandboxError, UsageError
from rookery.engine import RetryPolicy
from rookery.environments import ToolEnvironment
from rookery.training.advantages import compute_advantages


class Counting(ToolEnvironment):
    """The policy must add up to `data.answer`. Attempt number n of a task fails if n is in `data.lost`."""

    @tool
    async def add(self, number: int, ctx: Context) -> str:
        """Add a number."""
        ctx.state["sum"] = ctx.state.get("sum", 0) + number
        return f"the sum is {ctx.state['sum']}"

    def done(self, ctx: Context) -> bool:
        attempt = int(ctx.attempt.rsplit(".", 1)[1])
        if ctx.state["sum"] > 1 and attempt in ctx.task.data.get("lost", ()):
            raise SandboxError("the sandbox is gone")  # not during a command of the policy
        return False


TASKS = [
    {"id": "three", "prompt": "Reach 3.", "answer": "3"},
    {"id": "lost once", "prompt": "Reach 3.", "answer": "3", "lost": [1]},
    {"id": "lost", "prompt": "Reach 3.", "answer": "3", "lost": [1, 2]},
]


def open_counting(folder: Path) -> SteppedRollout:
    return SteppedRollout(Counting(), tasks=TASKS, retry=RetryPolicy(attempts=2), breaker=None, out=folder)


@pytest.fixture
def open_instruct(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stubs of open-instruct's modules, with the fields of its commit e6c3044; returns the tool registry."""

    class RLEnvironment(abc.ABC):
        config_name = ""
        response_role = "tool"

        async def setup(self) -> None:
            return

        def get_metrics(self) -> dict[str, float]:
            return {}

        @abc.abstractmethod
        async def reset(self, **kwargs: Any) -> tuple[Any, list[dict[str, Any]]]: ...

        @abc.abstractmethod
        async def step(self, call: Any) -> Any: ...

        @abc.abstractmethod
        def state(self) -> Any: ...

    @dataclasses.dataclass
    class BaseEnvConfig:
        tool_class: ClassVar[type]
        pool_size: int | None = dataclasses.field(default=None, kw_only=True)

    @dataclasses.dataclass
    class StepResult:
        result: str = ""
        reward: float = 0.0
        done: bool = False
        metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    registry: dict[str, Any] = {}
    base = types.ModuleType("open_instruct.environments.base")
    vars(base).update(
        RLEnvironment=RLEnvironment,
        BaseEnvConfig=BaseEnvConfig,
        StepResult=StepResult,
        State=types.SimpleNamespace,
    )
    tools = types.ModuleType("open_instruct.environments.tools.tools")
    vars(tools).update(TOOL_REGISTRY=registry)
    for name in ("open_instruct", "open_instruct.environments", "open_instruct.environments.tools"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules["open_instruct.environments"])["base"] = base
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, tools.__name__, tools)
    return registry


async def test_a_rollout_is_driven_by_calls_and_ends_with_its_reward(tmp_path: Path) -> None:
    rollout = open_counting(tmp_path)
    try:
        first = await rollout.reset("three")
        assert "Reach 3." in first.text
        assert {one.name for one in first.tools} == {"add", "final_answer"}
        assert (await rollout.step("add", {"number": 1})).text == "the sum is 1"
        second = await rollout.step("add", {"number": 2})
        assert (second.text, second.reward) == ("the sum is 3", None)
        assert (await rollout.step("final_answer", {"text": "3"})).reward == 1.0
        with pytest.raises(UsageError):
            await rollout.step("add", {"number": 1})
        await rollout.reset("three")
        await rollout.step("add", {"number": 1})
        assert "subtract" in (await rollout.step("subtract", {})).text
        await rollout.reset("three")  # cancels the one that runs
        assert (await rollout.step("final_answer", {"text": "4"})).reward == 0.0
        with pytest.raises(UsageError):
            await rollout.reset("unknown")
    finally:
        await rollout.aclose()


async def test_a_lost_sandbox_is_replaced_and_the_calls_are_replayed(tmp_path: Path) -> None:
    rollout = open_counting(tmp_path)
    try:
        for name in ("lost once", "lost"):
            await rollout.reset(name)
            assert (await rollout.step("add", {"number": 1})).text == "the sum is 1"
            if name == "lost":
                with pytest.raises(EpisodeLostError):
                    await rollout.step("add", {"number": 2})
                assert dict(rollout.missing) == {"sandbox.lost": 1}
                continue
            assert (await rollout.step("add", {"number": 2})).text == "the sum is 3"
            assert (await rollout.step("final_answer", {"text": "3"})).reward == 1.0
    finally:
        await rollout.aclose()


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_a_repair_task_runs_from_reset_to_reward(open_instruct: dict[str, Any], tmp_path: Path) -> None:
    assert check_interface(types.SimpleNamespace(RLEnvironment=object, BaseEnvConfig=object))
    config = register()
    assert open_instruct == {"rookery": config}
    settings = config(
        environment="swe",
        tasks="repairs",
        options={"sandbox": "local", "out": str(tmp_path)},
    )
    environment = config.tool_class(
        environment=settings.environment, tasks=settings.tasks, options=settings.options
    )
    (row,) = [
        row for row in make_rows("swe", "repairs") if row["env_config"]["env_configs"][0]["task"] == "clock-steps"
    ]
    solution = Path(repairs.__file__).parent / "data" / "tasks" / "clock-steps" / "solution" / "gate" / "bucket.py"
    kwargs = dict(row["env_config"]["env_configs"][0])
    del kwargs["env_name"]
    try:
        first, tools = await environment.reset(**kwargs)
        assert first.result
        assert {"bash", "submit"} <= {one["function"]["name"] for one in tools}
        call = types.SimpleNamespace
        command = f"cat > gate/bucket.py <<'END'\n{solution.read_text()}\nEND"
        done = await environment.step(call(id="1", name="bash", args={"command": command}))
        assert not done.done
        ended = await environment.step(call(id="2", name="submit", args={}))
        assert (ended.done, ended.reward) == (True, 1.0)
        assert environment.state().step_count == 2
        assert environment.get_metrics() == {}
    finally:
        await environment.rollout.aclose()


def test_example_writes_its_dataset_and_registers_the_environment(
    open_instruct: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpo_fast.py").write_text("")  # stands in for open-instruct's main program
    monkeypatch.setattr(sys.modules["open_instruct"], "__path__", [str(tmp_path)], raising=False)
    path = str(Path(__file__).parents[2] / "examples" / "open_instruct_train.py")
    for arguments in (["--write-dataset", str(tmp_path / "rows.jsonl")], ["--tools", "rookery"]):
        monkeypatch.setattr(sys, "argv", ["open_instruct_train.py", *arguments])
        runpy.run_path(path, run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert "clock-steps" in [row["env_config"]["env_configs"][0]["task"] for row in rows]
    assert list(open_instruct) == ["rookery"]


async def test_a_group_whose_member_lost_its_sandbox_has_the_rewards_of_the_group_without_a_failure(
    tmp_path: Path,
) -> None:
    """open-instruct cannot leave a sample out. The repeated calls give the reward, so its baseline is right."""
    rollout = open_counting(tmp_path)
    rewards: dict[str, list[float | None]] = {"three": [], "lost once": []}
    try:
        for name, found in rewards.items():
            for answer in ("3", "4"):
                await rollout.reset(name)
                await rollout.step("add", {"number": 1})
                await rollout.step("add", {"number": 2})
                found.append((await rollout.step("final_answer", {"text": answer})).reward)
    finally:
        await rollout.aclose()
    assert rewards["lost once"] == rewards["three"] == [1.0, 0.0]
    assert compute_advantages(rewards["lost once"]).tolist() == [1.0, -1.0]
