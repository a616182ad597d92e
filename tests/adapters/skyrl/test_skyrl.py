"""The generator for SkyRL, checked by the function with which SkyRL checks generators."""

import ast
import importlib.util
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rookery.adapters.skyrl import RookeryGenerator, parse_sampling
from rookery.core import Sampling, UsageError
from rookery.engine import RetryPolicy
from rookery.journal import RunReader, load_segments
from tests.adapters.kit import ScriptedEnvironment, bigram_gradient, make_task
from tests.adapters.trl_kit import tiny

pytestmark = pytest.mark.needs("skyrl")


class TrajectoryID(SimpleNamespace):
    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def load_validator() -> Callable[..., None]:
    """Return SkyRL's `validate_generator_output` without its module, whose imports need a GPU and Python 3.12."""
    found = importlib.util.find_spec("skyrl")
    assert found is not None
    assert found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0]) / "train" / "utils" / "trainer_utils.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {"validate_generator_output", "_validate_per_token_side_channels", "_validate_step_wise_fields"}
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in names]
    assert len(functions) == len(names)
    scope: dict[str, Any] = {
        "np": np,
        "logger": logging.getLogger("skyrl"),
        "GeneratorOutput": dict,
        "SAMPLE_SUPPORT_FIELD": "rollout_sample_support",
    }
    exec(compile(ast.Module(functions, []), str(path), "exec"), scope)
    validate: Callable[..., None] = scope["validate_generator_output"]
    return validate


def make_config(*, step_wise: bool = False, std: bool = False, estimator: str = "grpo") -> Any:
    algorithm = SimpleNamespace(advantage_estimator=estimator, grpo_norm_by_std=std)
    return SimpleNamespace(
        trainer=SimpleNamespace(algorithm=algorithm),
        generator=SimpleNamespace(step_wise_trajectories=step_wise),
    )


@asynccontextmanager
async def generating(
    folder: Path, tasks: list[dict[str, Any]], **settings: Any
) -> AsyncIterator[RookeryGenerator]:
    folder.mkdir(exist_ok=True)
    tiny(folder / "policy.safetensors")
    generator = RookeryGenerator(
        ScriptedEnvironment(),
        config=settings.pop("config", make_config()),
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


def make_batch(generator: RookeryGenerator, k: int) -> dict[str, Any]:
    rows = [row for row in generator.rollouts.make_rows() for _ in range(k)]
    return {
        "prompts": [row["prompt"] for row in rows],
        "env_classes": ["rookery"] * len(rows),
        "env_extras": [{"task": row["task"]} for row in rows],
        "sampling_params": {"temperature": 1.0, "max_tokens": 5, "logprobs": 1},
        "trajectory_ids": [
            TrajectoryID(instance_id=row["task"], repetition_id=at % k) for at, row in enumerate(rows)
        ],
        "batch_metadata": None,
    }


def compute_gradient(output: dict[str, Any], keys: list[str]) -> np.ndarray[Any, Any]:
    """Return the policy gradient with SkyRL's GRPO advantages without standard deviation."""
    rewards = defaultdict(list)
    for key, reward in zip(keys, output["rewards"], strict=True):
        rewards[key].append(reward)
    return bigram_gradient(
        (prompt + response, [0] * len(prompt) + mask, reward - float(np.mean(rewards[key])))
        for prompt, response, mask, reward, key in zip(
            *(output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rewards")),
            keys,
            strict=True,
        )
    )


@pytest.mark.parametrize("missing", ["mask", "mean"])
async def test_output_is_valid_in_order_and_has_the_tokens_of_the_journal(missing: Any, tmp_path: Path) -> None:
    tasks = [make_task("a", [1.0, 0.0, 0.5]), make_task("b", [1.0, None, 0.0])]
    async with generating(tmp_path, tasks, missing=missing) as generator:
        output = await generator.generate(make_batch(generator, 3))
        folder = generator.rollouts.engine.folder
    load_validator()(6, output)
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
    async with generating(tmp_path / "1", tasks, config=make_config(step_wise=True)) as generator:
        output = await generator.generate(make_batch(generator, 2))
    load_validator()(2, output, step_wise=True)
    assert output["is_last_step"] == [False, True, False, True]
    assert output["rewards"] == [0.0, 1.0, 0.0, 0.0]
    async with generating(tmp_path / "2", tasks) as generator:
        with pytest.raises(UsageError):
            await generator.generate(make_batch(generator, 2))
    async with generating(tmp_path / "3", tasks, segments="most") as generator:
        output = await generator.generate(make_batch(generator, 2))
    load_validator()(2, output)
    assert output["rollout_metrics"]["rookery/tokens_left_out"] > 0


@pytest.mark.parametrize("config", [make_config(std=True), make_config(estimator="rloo")])
def test_a_mean_for_missing_members_is_refused_if_it_would_change_the_scale(config: Any) -> None:
    with pytest.raises(UsageError):
        RookeryGenerator(ScriptedEnvironment(), config=config, policy="embedded", missing="mean")


def test_other_sampling_parameters_reach_the_inference_engine() -> None:
    params = {"temperature": 0.7, "max_tokens": 3, "min_p": 0.1, "stop": ["X"], "logprobs": 1, "top_k": None}
    assert parse_sampling(params) == Sampling(temperature=0.7, max_tokens=3, stop=("X",), extra={"min_p": 0.1})
