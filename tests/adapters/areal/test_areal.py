"""The workflow for AReaL, with the real base class and a fake inference engine."""

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rookery.adapters import areal as adapter
from rookery.core import UsageError
from rookery.engine import RetryPolicy
from rookery.training.rows import make_rows
from tests.adapters.kit import ScriptedEnvironment, bigram_gradient, make_task
from tests.training.kit import group, rollout, segment

pytestmark = pytest.mark.needs("areal")

END = 257


@pytest.fixture(autouse=True)
def importable_part(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `areal.api` importable without `areal/__init__.py`, which imports Ray, Flask and the trainers."""
    found = importlib.util.find_spec("areal")
    assert found is not None
    package = types.ModuleType("areal")
    package.__path__ = list(found.submodule_search_locations or ())
    monkeypatch.setitem(sys.modules, "areal", package)
    monkeypatch.setattr(adapter, "_make_request", SimpleNamespace)
    yield
    for name in [name for name in sys.modules if name.startswith("areal.")]:
        del sys.modules[name]


class Settings(SimpleNamespace):
    """The part of `GenerationHyperparameters` that the adapter uses."""

    def new(self, **changes: Any) -> "Settings":
        return Settings(**{**self.__dict__, **changes})


class FakeEngine:
    """The part of `InferenceEngine` that workflows use. The weights change before the last token of a reply."""

    def __init__(self) -> None:
        self.calls = 0

    async def agenerate(self, request: Any) -> Any:
        assert request.gconfig.n_samples == 1
        assert END in request.gconfig.stop_token_ids
        self.calls += 1
        tokens = [97 + self.calls % 3, 98, END][: request.gconfig.max_new_tokens]
        return SimpleNamespace(
            output_tokens=tokens,
            output_logprobs=[-1.0 - at for at in range(len(tokens))],
            output_versions=[3] * (len(tokens) - 1) + [4],
            stop_reason="stop",
        )


def make_workflow(folder: Path, k: int, task: dict[str, Any], **options: Any) -> Any:
    settings: dict[str, Any] = {
        "gconfig": Settings(temperature=1.0, top_p=1.0, max_new_tokens=8, stop_token_ids=[], n_samples=k),
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
    ):
        with pytest.raises(UsageError):
            make_workflow(tmp_path, 2, task, **options)
    with pytest.raises(UsageError):
        make_workflow(tmp_path, 1, task)
