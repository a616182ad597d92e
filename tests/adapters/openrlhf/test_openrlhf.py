"""The agent executor for OpenRLHF, with the real base class and a fake vLLM engine."""

import asyncio
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rookery import Context
from rookery.adapters.openrlhf import MissingRolloutError, make_executor
from rookery.core import SandboxError, UsageError
from rookery.engine import RetryPolicy
from rookery.training.advantages import compute_advantages
from tests.adapters.kit import ScriptedEnvironment, bigram_gradient, make_task

pytestmark = pytest.mark.needs("openrlhf")

END = 257
ROOT = Path(__file__).parents[3]


class FailsAtFirst(ScriptedEnvironment):
    """Loses its sandbox in the first `data.failures` rollouts of the process."""

    failed = 0

    async def run(self, ctx: Context) -> None:
        if self.failed < ctx.task.data.get("failures", 0):
            self.failed += 1
            raise SandboxError("the sandbox is gone")
        if ctx.task.data.get("bug"):
            raise ValueError("a bug of the environment")
        await super().run(ctx)


class FakeVllm:
    """The part of OpenRLHF's vLLM actor that executors use."""

    text = "ab"

    def __init__(self) -> None:
        self.params: list[Any] = []

    async def generate(self, tokens: list[int], params: Any, multi_modal_data: Any = None) -> Any:
        assert all(isinstance(token, int) for token in tokens)
        assert END in params.stop_token_ids
        self.params.append(params)
        sampled = [*self.text.encode(), END][: params.max_tokens]
        logprobs = [{token: SimpleNamespace(logprob=-1.0 - at)} for at, token in enumerate(sampled)]
        reason = "stop" if sampled[-1] == END else "length"
        output = SimpleNamespace(token_ids=tuple(sampled), logprobs=logprobs, finish_reason=reason, text="ab")
        return SimpleNamespace(outputs=[output])


def make_params(**fields: Any) -> Any:
    given = {"max_tokens": None, "logprobs": 1, "stop_token_ids": None, "temperature": 1.0}
    return SimpleNamespace(**given | {"top_p": 1.0, "top_k": -1} | fields)


def open_executor(folder: Path, tasks: list[dict[str, Any]], **options: Any) -> Any:
    return make_executor(
        FailsAtFirst(),
        tasks=tasks,
        rendering={"name": "embedded"},
        retry=RetryPolicy(attempts=1),
        breaker=None,
        out=folder,
        **options,
    )()


async def test_a_rollout_is_one_sequence_with_action_ranges_and_log_probabilities(tmp_path: Path) -> None:
    executor = open_executor(tmp_path, [make_task("a", [0.5])])
    vllm = FakeVllm()
    try:
        found, again = await asyncio.gather(
            executor.execute("say a", "a", make_params(), 200, None, vllm),
            executor.execute("say a", "a", make_params(logprobs=None), 200, None, vllm),
        )
    finally:
        await executor.rollouts.aclose()
    ((start, end),) = found["action_ranges"]
    assert found["observation_tokens"][start:end] == [97, 98, END]
    assert found["rollout_log_probs"] == [0.0] * start + [-1.0, -2.0, -3.0]
    assert (found["reward"], found["scores"], found["truncated"]) == (0.5, 0.5, False)
    assert (found["prompt"], found["label"], found["images"]) == ("say a", "a", None)
    assert (again["observation_tokens"], again["rollout_log_probs"]) == (found["observation_tokens"], None)
    assert {one.max_tokens for one in vllm.params} == {200 - start}


async def test_an_infrastructure_failure_is_repeated_and_never_becomes_a_reward(tmp_path: Path) -> None:
    tasks = [
        make_task("a", [1.0], failures=2),
        make_task("broken", [1.0], bug=True),
        make_task("b", [1.0], failures=9),
    ]
    executor = open_executor(tmp_path, tasks)
    try:
        found = await executor.execute("", "a", make_params(), 200, None, FakeVllm())
        assert found["reward"] == 1.0
        for name in ("broken", "b"):
            with pytest.raises(MissingRolloutError):
                await executor.execute("", name, make_params(), 200, None, FakeVllm())
    finally:
        await executor.rollouts.aclose()


class EchoVllm(FakeVllm):
    """Replies with a letter that depends on the prompt, so that the rollouts of two tasks differ."""

    async def generate(self, tokens: list[int], params: Any, multi_modal_data: Any = None) -> Any:
        self.text = chr(ord("a") + sum(tokens) % 26)
        return await super().generate(tokens, params, multi_modal_data)


async def test_a_group_with_a_repeated_member_has_the_gradient_of_the_group_without_a_failure(
    tmp_path: Path,
) -> None:
    """OpenRLHF calls the executor once for each member and computes the baseline over all of them."""
    gradients = []
    for failures in (0, 1):
        rewards = {"a": 1.0, "b": 0.0, "c": 0.25}
        tasks = [make_task(name, [reward], failures=failures) for name, reward in rewards.items()]
        executor = open_executor(tmp_path, tasks)
        try:
            found = [await executor.execute("", name, make_params(), 200, None, EchoVllm()) for name in rewards]
        finally:
            await executor.rollouts.aclose()
        gains = compute_advantages([one["reward"] for one in found])
        rows = []
        for one, gain in zip(found, gains, strict=True):
            ((first, end),) = one["action_ranges"]
            length = len(one["observation_tokens"])
            rows.append((one["observation_tokens"], [int(first <= at < end) for at in range(length)], float(gain)))
        gradients.append(bigram_gradient(rows))
    assert np.abs(gradients[0]).max() > 0
    np.testing.assert_allclose(gradients[1], gradients[0], atol=1e-12)


async def test_sampling_parameters_that_openrlhf_changes_are_used(tmp_path: Path) -> None:
    executor = open_executor(tmp_path, [make_task("a", [0.5])], limits={"context": 150})
    vllm = FakeVllm()
    try:
        for temperature in (1.0, 0.0):
            await executor.execute("", "a", make_params(temperature=temperature), 200, None, vllm)
        assert [one.temperature for one in vllm.params] == [1.0, 0.0]
        with pytest.raises(UsageError):  # the trainer takes less than the limit
            await executor.execute("", "a", make_params(), 149, None, vllm)
    finally:
        await executor.rollouts.aclose()


async def test_several_segments_and_images_are_refused(tmp_path: Path) -> None:
    tasks = [make_task("a", [1.0], conversations=2)]
    for segments in ("error", "most"):
        executor = open_executor(tmp_path, tasks, segments=segments)
        try:
            if segments == "most":
                found = await executor.execute("", "a", make_params(), 200, None, FakeVllm())
                assert len(found["action_ranges"]) == 1
                continue
            with pytest.raises(UsageError):
                await executor.execute("", "a", make_params(), 200, None, FakeVllm())
            with pytest.raises(UsageError):
                await executor.execute("", "a", make_params(), 200, None, FakeVllm(), images=["x"])
        finally:
            await executor.rollouts.aclose()


class OtherTokenizer:
    def __len__(self) -> int:
        return 300

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "other text"


async def test_another_tokenizer_is_noticed_with_the_first_rollout(tmp_path: Path) -> None:
    executor = open_executor(tmp_path, [make_task("a", [0.5])])
    vllm = FakeVllm()
    vllm.text = "abc"
    try:
        with pytest.raises(UsageError):
            await executor.execute("", "a", make_params(), 200, OtherTokenizer(), vllm)
    finally:
        await executor.rollouts.aclose()


@pytest.mark.parametrize("options", [{"sampling": {"temperature": 0.5}}, {"rendering": {}}, {"concurrency": 0}])
def test_invalid_settings_are_refused_when_the_executor_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_executor(ScriptedEnvironment(), **{"rendering": {"name": "embedded"}, **options})()


def test_example_prints_its_dataset_and_defines_the_executor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from openrlhf.utils.agent import AgentExecutorBase

    path = str(ROOT / "examples" / "openrlhf_agent.py")
    monkeypatch.setattr(sys, "argv", ["openrlhf_agent.py", "tests.adapters.kit:ScriptedEnvironment"])
    runpy.run_path(path, run_name="__main__")
    assert json.loads(capsys.readouterr().out) == {"prompt": "say two", "label": "two"}
    assert issubclass(runpy.run_path(path)["AgentExecutor"], AgentExecutorBase)
