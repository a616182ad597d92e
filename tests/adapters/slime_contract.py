"""The types and rules of slime 0.3 that its rollout plug-ins see, re-implemented for tests without slime.

slime is not on a package index. These are the documented fields, and the checks of slime's own contract tests
(`tests/plugin_contracts` at commit 624b824): each function here names the original after which it checks.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """The fields of a sample that a plug-in fills."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


Sample.Status = Status  # type: ignore[attr-defined]


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def default_generate_rollout(args, rollout_id, data_source, evaluation=False):  # type: ignore[no-untyped-def]
    """The signature that slime compares."""


@contextmanager
def installed_contract() -> Iterator[None]:
    """Make the types importable under slime's names inside the block."""
    names = ("slime", "slime.utils", "slime.utils.types", "slime.rollout", "slime.rollout.base_types")
    modules = {name: ModuleType(name) for name in names}
    modules["slime.utils.types"].Sample = Sample  # type: ignore[attr-defined]
    modules["slime.rollout.base_types"].__dict__.update(
        RolloutFnTrainOutput=RolloutFnTrainOutput, RolloutFnEvalOutput=RolloutFnEvalOutput
    )
    assert not set(modules) & set(sys.modules)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def check_sample(sample: Any) -> None:
    """`assert_sample_contract`, and the assertions of slime's conversion to training data."""
    assert isinstance(sample, Sample)
    assert isinstance(sample.tokens, list)
    assert all(isinstance(token, int) for token in sample.tokens)
    assert isinstance(sample.response, str)
    assert isinstance(sample.response_length, int)
    assert isinstance(sample.reward, float)
    assert isinstance(sample.status, Status)
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    assert 0 < sample.response_length < len(sample.tokens)


def check_train_output(output: Any, sizes: list[int]) -> None:
    """`assert_train_rollout_contract`: `sizes` are the numbers of samples of the groups."""
    assert isinstance(output, RolloutFnTrainOutput)
    assert [len(group) for group in output.samples] == sizes
    for group in output.samples:
        for sample in group:
            check_sample(sample)


def check_eval_output(output: Any) -> None:
    """`assert_eval_rollout_contract`."""
    assert isinstance(output, RolloutFnEvalOutput)
    assert output.data
    for data in output.data.values():
        assert set(data) >= {"rewards", "truncated", "samples"}
        assert len(data["rewards"]) == len(data["truncated"]) == len(data["samples"])
        for sample in data["samples"]:
            check_sample(sample)


def check_signature(function: Callable[..., Any]) -> None:
    """`assert_rollout_function_signature_matches_default`."""
    wanted, found = inspect.signature(default_generate_rollout), inspect.signature(function)
    assert tuple(found.parameters) == tuple(wanted.parameters)
    for name, parameter in wanted.parameters.items():
        assert found.parameters[name].kind == parameter.kind
        assert found.parameters[name].default == parameter.default


class NoArgs:
    """Arguments of slime without any option, which its contract tests pass to hooks."""


def make_foreign_sample(index: int, reward: float) -> Sample:
    """Return a sample as slime's contract tests pass it to hooks: not made by Rookery."""
    tokens = [index, index + 1]
    return Sample(
        index=index, reward=reward, tokens=tokens, response_length=2, status=Status.COMPLETED, loss_mask=[1, 1]
    )


def check_reward_post_process(function: Callable[..., Any]) -> None:
    """`invoke_reward_post_process`."""
    assert tuple(inspect.signature(function).parameters) == ("args", "samples")
    raw, rewards = function(NoArgs(), [make_foreign_sample(0, 0.5), make_foreign_sample(1, 1.5)])
    assert len(raw) == len(rewards) == 2


def check_convert_samples(function: Callable[..., Any]) -> None:
    """`invoke_convert_samples_to_train_data`."""
    assert tuple(inspect.signature(function).parameters) == ("args", "samples")
    data = function(NoArgs(), [make_foreign_sample(0, 0.5), make_foreign_sample(1, 1.5)])
    columns = {"tokens", "response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "loss_masks"}
    assert columns <= set(data)


def check_data_source(kind: Callable[..., Any]) -> None:
    """`check_data_source_path`: the arguments have none of the options that the adapter reads."""
    assert tuple(inspect.signature(kind).parameters)[:1] == ("args",)
    args = NoArgs()
    args.n_samples_per_prompt = 2  # type: ignore[attr-defined]
    (group,) = kind(args).get_samples(1)
    assert [isinstance(sample, Sample) for sample in group] == [True] * 2


class ContractDataSource:
    """The data source of slime's contract tests of rollout functions."""

    def __init__(self) -> None:
        self._next = 0

    def get_samples(self, number: int) -> list[list[Sample]]:
        groups = []
        for _ in range(number):
            groups.append([Sample(index=self._next + at, prompt=f"prompt-{self._next + at}") for at in range(2)])
            self._next += 2
        return groups


def check_rollout_function(function: Callable[..., Any]) -> None:
    """`assert_rollout_function_matches_default_contract`: slime's arguments are None."""
    check_signature(function)
    check_train_output(function(None, 2, ContractDataSource(), evaluation=False), [2])
    check_eval_output(function(None, 2, ContractDataSource(), evaluation=True))


def reduce_loss(data: dict[str, Any], values: list[list[float]]) -> float:
    """slime's loss: the mean over rollouts of the mean over a rollout's trained tokens of reward times value."""
    total = 0.0
    for at, row in enumerate(values):
        inner = sum(value * on for value, on in zip(row, data["loss_masks"][at], strict=True))
        total += data["rewards"][at] * inner / max(1, data["rollout_mask_sums"][at])
    return total / len(set(data["rollout_ids"]))
