"""The workflow for AReaL, with the real package and a stand-in for its inference engine."""

import asyncio
import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from rookery.adapters import areal as adapter
from rookery.core import Sampling, Task, UsageError
from rookery.engine import RetryPolicy
from rookery.training.rows import make_rows
from tests.adapters.kit import ScriptedEnvironment, bigram_gradient, make_task, save_model
from tests.training.kit import group, rollout, segment

pytestmark = pytest.mark.needs("areal")

ROOT = Path(__file__).parents[3]
END = 257


class FakeEngine:
    """The part of `InferenceEngine` that workflows use. The weights change before the last token of a reply."""

    def __init__(self) -> None:
        self.calls = 0

    async def agenerate(self, request: Any) -> Any:
        from areal.api import ModelRequest, ModelResponse

        assert isinstance(request, ModelRequest)
        assert request.gconfig.n_samples == 1
        assert END in request.gconfig.stop_token_ids
        self.calls += 1
        tokens = [97 + self.calls % 3, 98, END][: request.gconfig.max_new_tokens]
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=tokens,
            output_logprobs=[-1.0 - at for at in range(len(tokens))],
            output_versions=[3] * (len(tokens) - 1) + [4],
            stop_reason="stop",
        )


def make_gconfig(**changes: Any) -> Any:
    from areal.api.cli_args import GenerationHyperparameters

    return GenerationHyperparameters(**{"max_new_tokens": 8, "max_tokens": 200, **changes})


def make_workflow(folder: Path, k: int, task: dict[str, Any] | Task, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "gconfig": make_gconfig(),
        "actor": SimpleNamespace(reward_norm=None, adv_norm=None),
        "rendering": {"name": "embedded"},
        "retry": RetryPolicy(attempts=1),
    }
    return adapter.make_workflow(
        ScriptedEnvironment(), k=k, tasks=[task], breaker=None, out=folder, **{**settings, **options}
    )


async def run(folder: Path, rewards: list[float | None], **data: Any) -> dict[str, Any] | None:
    workflow = make_workflow(folder, len(rewards), make_task("a", rewards, **data))
    try:
        found: dict[str, Any] | None = await workflow.arun_episode(FakeEngine(), {"task": "a"})
        return found
    finally:
        await workflow.rollouts.aclose()


def compute_gradient(batch: dict[str, Any] | None) -> np.ndarray[Any, Any]:
    assert batch is not None
    return bigram_gradient(
        (tokens[: sum(attention)], mask[: sum(attention)], reward)
        for tokens, mask, attention, reward in zip(
            *(batch[name].tolist() for name in ("input_ids", "loss_mask", "attention_mask", "rewards")),
            strict=True,
        )
    )


async def test_rows_have_the_version_of_every_token_and_advantages_as_rewards(tmp_path: Path) -> None:
    import torch

    batch = await run(tmp_path, [1.0, 0.0, None], conversations=2)
    assert batch is not None
    assert {name: one.dtype for name, one in batch.items()} == {
        "input_ids": torch.int32,
        "loss_mask": torch.int32,
        "logprobs": torch.float32,
        "versions": torch.int32,
        "attention_mask": torch.bool,
        "rewards": torch.float32,
    }
    assert batch["rewards"].tolist() == [1.0, 1.0, -1.0, -1.0]  # leave-one-out; two segments of each rollout
    assert len({one.shape for name, one in batch.items() if name != "rewards"}) == 1
    for at in range(4):
        trained = batch["loss_mask"][at].bool()
        assert batch["input_ids"][at][trained].tolist()[-2:] == [98, END]
        assert batch["logprobs"][at][trained].tolist() == [-1.0, -2.0, -3.0]
        assert batch["versions"][at][trained].tolist() == [3, 3, 4]
        assert set(batch["versions"][at][~trained].tolist()) == {-1}


async def test_the_gradient_of_a_group_with_a_failed_member_is_that_of_the_group_without_it(
    tmp_path: Path,
) -> None:
    rewards = (1.0, 0.0, 0.25)
    members = [rollout(0, at, reward, [segment([0, 0, 1, 1], first=10 * at)]) for at, reward in enumerate(rewards)]
    found, expected = (
        compute_gradient(adapter.make_tensors([row for row in make_rows([one]) if row.trained]))
        for one in (group(0, *members, rollout(0, 3, None)), group(0, *members))
    )
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert await run(tmp_path, [None, None]) is None


async def test_normalisation_by_areal_and_other_sampling_parameters_are_refused(tmp_path: Path) -> None:
    task = make_task("a", [1.0, 0.0])
    for options in (
        {"actor": SimpleNamespace(reward_norm=SimpleNamespace(group_size=2), adv_norm=None)},
        {"actor": SimpleNamespace(reward_norm=None, adv_norm=SimpleNamespace())},
        {"rendering": {}},
        {"sampling": {"temperature": 0.5}},
        {"gconfig": make_gconfig(top_k=20), "sampling": {"top_k": 30}},
        {"limits": {"context": 201}},
    ):
        with pytest.raises(UsageError):
            make_workflow(tmp_path, 2, task, **options)
    with pytest.raises(UsageError):
        make_workflow(tmp_path, 2, Task(id="b", sampling=Sampling(temperature=0.5)))
    with pytest.raises(UsageError):
        make_workflow(tmp_path, 1, task)


class ChangingEngine(FakeEngine):
    """Changes a sampling parameter of AReaL's `gconfig` during the first model call, as a callback could."""

    def __init__(self, gconfig: Any, name: str, value: Any) -> None:
        super().__init__()
        self.gconfig = gconfig
        self.change = (name, value)
        self.sampled_with: list[Any] = []

    async def agenerate(self, request: Any) -> Any:
        setattr(self.gconfig, *self.change)
        self.sampled_with.append(getattr(request.gconfig, self.change[0]))
        return await super().agenerate(request)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7),
        ("greedy", True),
        ("top_k", 20),
        ("frequency_penalty", 0.5),
        ("min_new_tokens", 2),
        ("stop", ["x"]),
        ("ignore_eos", True),
    ],
)
async def test_changed_sampling_parameter_does_not_reach_the_group_and_ends_the_next(
    tmp_path: Path, name: str, value: Any
) -> None:
    gconfig = make_gconfig()
    before = getattr(gconfig, name)
    workflow = make_workflow(tmp_path, 2, make_task("a", [1.0, 0.0], conversations=2), gconfig=gconfig)
    engine = ChangingEngine(gconfig, name, value)
    try:
        assert await workflow.arun_episode(engine, {"task": "a"}) is not None
        assert engine.sampled_with == [before] * 4
        with pytest.raises(UsageError):
            await workflow.arun_episode(engine, {"task": "a"})
    finally:
        await workflow.rollouts.aclose()


async def test_greedy_is_temperature_zero(tmp_path: Path) -> None:
    gconfig = make_gconfig(greedy=True, stop=["x"], frequency_penalty=0.5)
    task = make_task("a", [1.0, 0.0])
    with pytest.raises(UsageError):
        make_workflow(tmp_path, 2, task, gconfig=gconfig, sampling={"temperature": 1.0})
    workflow = make_workflow(tmp_path, 2, task, gconfig=gconfig, sampling={"temperature": 0.0})
    try:
        assert await workflow.arun_episode(FakeEngine(), {"task": "a"}) is not None
    finally:
        await workflow.rollouts.aclose()


class OtherTokenizer:
    def __len__(self) -> int:
        return 200  # the policy samples 257

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return ""


async def test_another_tokenizer_is_noticed_with_the_first_rollouts(tmp_path: Path) -> None:
    workflow = make_workflow(tmp_path, 2, make_task("a", [1.0, 0.0]), tokenizer=OtherTokenizer())
    try:
        with pytest.raises(UsageError):
            await workflow.arun_episode(FakeEngine(), {"task": "a"})
    finally:
        await workflow.rollouts.aclose()


EIGHT = "tests.adapters.areal.test_areal:EightMembers"


class EightMembers(ScriptedEnvironment):
    """A task with rewards for the eight members of a group, one of which fails."""

    def tasks(self) -> list[dict[str, Any]]:
        return [make_task("eight", [1.0, 0.0, None, 0.0, 1.0, 0.0, 1.0, 0.0])]


def test_example_reads_areals_configuration_and_runs_its_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AReaL parses the configuration; a stand-in for its trainer, which needs a GPU, runs the workflow."""
    import areal

    batches = []

    class Trainer:
        def __init__(self, config: Any, *, train_dataset: Any, valid_dataset: Any) -> None:
            self.rows = list(train_dataset)

        def __enter__(self) -> "Trainer":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def train(self, *, workflow: Any) -> None:
            async def run() -> None:
                batches.extend([await workflow.arun_episode(FakeEngine(), row) for row in self.rows])
                await workflow.rollouts.aclose()

            asyncio.run(run())

    save_model(tmp_path / "model")
    for name in ("swanlab", "tabulate", "tensorboardX", "trackio", "wandb"):  # trackers of experiments
        monkeypatch.setitem(sys.modules, name, MagicMock(__spec__=ModuleSpec(name, None)))
    (tmp_path / "grpo.yaml").write_text(
        f"""
experiment_name: example
trial_name: test
cluster: {{fileroot: {tmp_path / "areal"}, name_resolve: {{nfs_record_root: {tmp_path / "areal"}}}}}
tokenizer_path: {tmp_path / "model"}
gconfig: {{n_samples: 1, max_new_tokens: 8}}
rollout: {{backend: "sglang:d1"}}
actor:
  {{backend: "fsdp:d1", experiment_name: example, trial_name: test, path: x, reward_norm: null, adv_norm: null}}
train_dataset: {{path: unused, type: rl}}
saver: &names {{experiment_name: example, trial_name: test, fileroot: {tmp_path / "areal"}}}
evaluator: *names
recover: *names
stats_logger: *names
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROOKERY_ENV", EIGHT)
    monkeypatch.setenv("ROOKERY_RENDERING", '{"name": "embedded"}')
    monkeypatch.setitem(vars(areal), "PPOTrainer", Trainer)
    monkeypatch.setattr(sys, "argv", ["areal_train.py", "--config", str(tmp_path / "grpo.yaml")])
    runpy.run_path(str(ROOT / "examples" / "areal_train.py"), run_name="__main__")
    (batch,) = batches
    assert batch is not None
    assert len(batch["rewards"]) == 7
    assert float(batch["rewards"].sum()) == pytest.approx(0.0, abs=1e-6)
