"""The generator for SkyRL, with SkyRL's own configuration, types, validation and advantages."""

import asyncio
import os
import runpy
import sys
import typing
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typing_extensions

from rookery.adapters.compatibility import parse_sampling
from rookery.adapters.skyrl import RookeryGenerator
from rookery.core import Sampling, UsageError
from rookery.engine import RetryPolicy
from rookery.journal import RunReader, load_segments
from tests.adapters.kit import ByteTokenizer, ScriptedEnvironment, bigram_gradient, make_task
from tests.adapters.trl_kit import tiny

pytestmark = pytest.mark.needs("skyrl")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def typed_dict() -> Iterator[None]:
    """Let pydantic accept SkyRL's typed dictionaries on Python 3.11: SkyRL declares 3.12."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        yield


def make_config(**changes: Any) -> Any:
    """Return SkyRL's own configuration with GRPO without standard deviation, and these changes."""
    from skyrl.train.config import SkyRLTrainConfig

    options = {
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.grpo_norm_by_std": "false",
        "generator.sampling_params.max_generate_length": 5,
        "trainer.max_prompt_length": 100,
        **changes,
    }
    return SkyRLTrainConfig.from_cli_overrides([f"{name}={value}" for name, value in options.items()])


STEP_WISE = {"generator.step_wise_trajectories": "true"}


@asynccontextmanager
async def generating(
    folder: Path, tasks: list[dict[str, Any]], **settings: Any
) -> AsyncIterator[RookeryGenerator]:
    folder.mkdir(exist_ok=True)
    tiny(folder / "policy.safetensors")
    generator = RookeryGenerator(
        ScriptedEnvironment(),
        config=settings.pop("config", None) or make_config(),
        policy=f"embedded:{folder / 'policy.safetensors'}",
        tasks=tasks,
        runners=0,
        retry=RetryPolicy(attempts=1),
        breaker=None,
        out=folder / "runs",
        **settings,
    )
    try:
        yield generator
    finally:
        await generator.rollouts.aclose()


def make_batch(generator: RookeryGenerator, k: int, phase: Any = "train", **params: Any) -> dict[str, Any]:
    """Return a batch as SkyRL's trainer makes it."""
    from skyrl.train.generators.base import BatchMetadata, TrajectoryID

    rows = [row for row in generator.rollouts.make_rows() for _ in range(k)]
    return {
        "prompts": [row["prompt"] for row in rows],
        "env_classes": ["rookery"] * len(rows),
        "env_extras": [{"task": row["task"]} for row in rows],
        "sampling_params": {"temperature": 1.0, "max_tokens": 5, "logprobs": 1, **params},
        "trajectory_ids": [
            TrajectoryID(instance_id=row["task"], repetition_id=at % k) for at, row in enumerate(rows)
        ],
        "batch_metadata": BatchMetadata(global_step=1, training_phase=phase),
    }


def validate(count: int, output: dict[str, Any], **options: Any) -> None:
    from skyrl.train.utils.trainer_utils import validate_generator_output

    validate_generator_output(count, output, **options)


def compute_gradient(output: dict[str, Any], keys: list[str]) -> np.ndarray[Any, Any]:
    """Return the policy gradient with the advantages that SkyRL's GRPO computes without standard deviation."""
    import torch
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage

    rewards = torch.tensor(output["rewards"], dtype=torch.float64)[:, None]
    gains, _ = compute_grpo_outcome_advantage(
        rewards, torch.ones_like(rewards), np.array(keys), grpo_norm_by_std=False
    )
    columns = (output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks"))
    return bigram_gradient(
        (prompt + response, [0] * len(prompt) + mask, gain)
        for prompt, response, mask, gain in zip(*columns, gains[:, 0].tolist(), strict=True)
    )


@pytest.mark.parametrize("missing", ["mask", "mean"])
async def test_output_is_valid_in_order_and_has_the_tokens_of_the_journal(missing: Any, tmp_path: Path) -> None:
    tasks = [make_task("a", [1.0, 0.0, 0.5]), make_task("b", [1.0, None, 0.0])]
    async with generating(tmp_path, tasks, missing=missing) as generator:
        output = await generator.generate(make_batch(generator, 3))
        folder = generator.rollouts.engine.folder
    validate(6, output)
    assert folder is not None
    with RunReader(folder) as reader:
        recorded = {}
        for one in reader.rollouts():
            loaded = load_segments(one, reader.tokens)
            recorded[one.task, one.member] = loaded.segments[0] if loaded.segments else None
    for at, (task, member) in enumerate((task, member) for task in "ab" for member in range(3)):
        segment = recorded[task, member]
        if missing == "mask" and task == "b":
            assert sum(output["loss_masks"][at]) == 0
            assert output["rewards"][at] == 0.0
        elif segment is None:
            assert sum(output["loss_masks"][at]) == 0
            assert output["rewards"][at] == 0.5  # the mean of the valid rewards
        else:
            tokens = output["prompt_token_ids"][at] + output["response_ids"][at]
            assert tokens == memoryview(segment.tokens).cast("i").tolist()
            assert sum(output["loss_masks"][at]) == segment.trained <= 5
    metrics = output["rollout_metrics"]
    assert metrics["rookery/missing"] == pytest.approx(1 / 6)
    assert metrics.get("rookery/masked_rows", 0.0) == (2.0 if missing == "mask" else 0.0)


async def test_sequences_are_clipped_to_skyrls_maximum(tmp_path: Path) -> None:
    """The inference engine renders prompts, so the last reply may exceed the context length."""
    config = make_config(**{"trainer.max_prompt_length": 10})
    async with generating(tmp_path, [make_task("long", [1.0, 0.0])], config=config) as generator:
        output = await generator.generate(make_batch(generator, 2))
    validate(2, output)
    sequences = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    assert [len(prompt) + len(response) for prompt, response in sequences] == [15, 15]
    assert output["stop_reasons"] == ["length", "length"]
    assert all(any(mask) for mask in output["loss_masks"])


async def test_the_gradient_of_a_group_with_a_failed_member_is_that_of_the_group_without_it(
    tmp_path: Path,
) -> None:
    async with generating(tmp_path, [make_task("b", [1.0, None, 0.0, 0.25])], missing="mean") as generator:
        output = await generator.generate(make_batch(generator, 4))
    whole = compute_gradient(output, ["b"] * 4)
    rest = {name: values[:1] + values[2:] for name, values in output.items() if isinstance(values, list)}
    expected = compute_gradient(rest, ["b"] * 3)
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(whole, expected, atol=1e-12)


async def test_several_segments_need_step_wise_trajectories(tmp_path: Path) -> None:
    tasks = [make_task("a", [1.0, 0.0], conversations=2)]
    async with generating(tmp_path / "1", tasks, config=make_config(**STEP_WISE)) as generator:
        output = await generator.generate(make_batch(generator, 2))
    validate(2, output, step_wise=True)
    assert output["is_last_step"] == [False, True, False, True]
    assert output["rewards"] == [0.0, 1.0, 0.0, 0.0]
    async with generating(tmp_path / "2", tasks) as generator:
        with pytest.raises(UsageError):
            await generator.generate(make_batch(generator, 2))
    async with generating(tmp_path / "3", tasks, segments="most") as generator:
        output = await generator.generate(make_batch(generator, 2))
    validate(2, output)
    assert output["rollout_metrics"]["rookery/tokens_left_out"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.algorithm.grpo_norm_by_std": "true"},
        {"trainer.algorithm.advantage_estimator": "rloo"},
        {"trainer.algorithm.temperature": 0.5},
    ],
)
def test_settings_under_which_the_gradient_would_be_wrong_are_refused(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    with pytest.raises(UsageError):
        RookeryGenerator(ScriptedEnvironment(), config=config, policy="embedded", missing="mean")


async def test_sampling_parameters_that_skyrl_changed_are_noticed(tmp_path: Path) -> None:
    async with generating(tmp_path, [make_task("a", [1.0])]) as generator:
        for changed in ({"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 20}):
            with pytest.raises(UsageError):
                await generator.generate(make_batch(generator, 1, **changed))
        output = await generator.generate(make_batch(generator, 1, "eval", temperature=0.0))
    validate(1, output)
    with pytest.raises(UsageError):  # the trainer takes 100 tokens of a prompt and 5 of a reply
        RookeryGenerator(ScriptedEnvironment(), config=make_config(), policy="embedded", limits={"context": 106})


async def test_another_tokenizer_is_noticed_with_the_first_rollouts(tmp_path: Path) -> None:
    async with generating(tmp_path, [make_task("a", [1.0])]) as generator:
        generator.rollouts.tokenizer = ByteTokenizer(shift=1)
        with pytest.raises(UsageError):
            await generator.generate(make_batch(generator, 1))


def test_other_sampling_parameters_reach_the_inference_engine() -> None:
    params = {"temperature": 0.7, "max_tokens": 3, "min_p": 0.1, "stop": ["X"], "logprobs": 1, "top_k": None}
    found = parse_sampling(params)
    assert found == Sampling(temperature=0.7, max_tokens=3, stop=("X",), extra={"min_p": 0.1})


def test_example_writes_its_dataset_and_generates_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the GPU is real: SkyRL parses and validates the configuration, and checks the output."""
    import datasets
    import ray
    import skyrl.train.utils.utils as utils
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.generators.utils import prepare_generator_input

    outputs = []

    def run(experiment: Any) -> None:
        written = datasets.Dataset.from_parquet(str(tmp_path / "tasks.parquet"))
        rows = [{**row, "uid": str(at), "env_extras": {"task": row["task"]}} for at, row in enumerate(written)]
        batch, _ = prepare_generator_input(rows, 2, {"temperature": 1.0, "max_tokens": 5}, "rookery", "train", 1)

        async def generate() -> None:
            client = SimpleNamespace(get_endpoint_url=lambda: f"embedded:{tmp_path / 'policy.safetensors'}")
            generator = experiment.get_generator(experiment.cfg, None, client)
            outputs.append(await generator.generate(batch))
            await generator.rollouts.aclose()

        asyncio.run(generate())

    tiny(tmp_path / "policy.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROOKERY_ENV", "tests.adapters.kit:ScriptedEnvironment")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")  # for runners
    monkeypatch.setattr(ray, "remote", lambda **_: lambda function: SimpleNamespace(remote=function))
    monkeypatch.setattr(ray, "get", lambda found: found)
    monkeypatch.setattr(utils, "initialize_ray", lambda _: None)
    monkeypatch.setattr(BasePPOExp, "__init__", lambda self, cfg: setattr(self, "cfg", cfg))
    monkeypatch.setattr(BasePPOExp, "run", run)
    for arguments in (
        ["--write-dataset", str(tmp_path / "tasks.parquet")],
        ["trainer.algorithm.advantage_estimator=grpo", "trainer.logger=console"],
    ):
        monkeypatch.setattr(sys, "argv", ["skyrl_main.py", *arguments])
        runpy.run_path(str(ROOT / "examples" / "skyrl_main.py"), run_name="__main__")
    (output,) = outputs
    validate(2, output)
    assert output["rewards"] == [1.0, 0.0]
