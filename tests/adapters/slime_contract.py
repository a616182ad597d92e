"""The types and rules of slime 0.3 that its rollout plug-ins see, re-implemented for tests without slime.

slime is not on a package index. These are the documented fields, and the checks of slime's own contract tests.
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
    assert all(isinstance(token, int) for token in sample.tokens)
    assert isinstance(sample.response, str)
    assert isinstance(sample.reward, float)
    assert isinstance(sample.status, Status)
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    assert 0 < sample.response_length < len(sample.tokens)


def check_signature(function: Callable[..., Any]) -> None:
    wanted, found = inspect.signature(default_generate_rollout), inspect.signature(function)
    assert tuple(found.parameters) == tuple(wanted.parameters)
    for name, parameter in wanted.parameters.items():
        assert found.parameters[name].kind == parameter.kind
        assert found.parameters[name].default == parameter.default


def reduce_loss(data: dict[str, Any], values: list[list[float]]) -> float:
    """slime's loss: the mean over rollouts of the mean over a rollout's trained tokens of reward times value."""
    total = 0.0
    for at, row in enumerate(values):
        inner = sum(value * on for value, on in zip(row, data["loss_masks"][at], strict=True))
        total += data["rewards"][at] * inner / max(1, data["rollout_mask_sums"][at])
    return total / len(set(data["rollout_ids"]))
