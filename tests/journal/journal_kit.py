"""Rollout records and turns for the tests of the journal."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from rookery.core import (
    Attempt,
    Completed,
    Extent,
    Failed,
    Message,
    Outcome,
    Rollout,
    Timing,
    ToolCall,
    Turn,
    Usage,
    floats,
    ints,
)
from rookery.journal import TokenWriter, encode_turn

Mount = Callable[[int], Path]


def turns(rollout_id: str, salt: int = 0) -> list[Turn]:
    """Return two turns; the second extends the first."""
    first = Turn(
        attempt=f"{rollout_id}.1",
        index=0,
        messages=(Message("user", "What is 2+2?"),),
        response=Message("assistant", None, (ToolCall("c1", "add", '{"a": 2, "b": 2}'),)),
        prompt=ints([1, 2, 3 + salt]),
        sampled=ints([10, 11]),
        logprobs=floats([-0.1, -0.2]),
        version=3,
        finish="tool_calls",
        prompt_tokens=3,
        sampled_tokens=2,
    )
    second = Turn(
        attempt=f"{rollout_id}.1",
        index=1,
        parent=0,
        messages=(Message("tool", "4", tool_call_id="c1"),),
        response=Message("assistant", "Four."),
        prefix=5,
        prompt=ints([20, 21]),
        sampled=ints([30, 31, 32]),
        logprobs=floats([-0.3, -0.4, -0.5]),
        version=4,
        prompt_tokens=7,
        sampled_tokens=3,
    )
    return [first, second]


def record(
    group: int,
    member: int,
    *,
    reward: float | None = 0.5,
    outcome: Outcome | None = None,
    tokens: tuple[Extent, ...] = (),
) -> Rollout:
    rollout_id = f"{group}.{member}"
    outcome = outcome or Completed()
    return Rollout(
        id=rollout_id,
        group=group,
        member=member,
        task=f"task-{group}",
        outcome=outcome,
        seed=7,
        reward=None if isinstance(outcome, Failed) else reward,
        rewards={"exact": 0.5},
        metrics={"calls": 1.0},
        info={"note": "x", "list": [1, None]},
        attempts=(Attempt(id=f"{rollout_id}.1", number=1, outcome=outcome, runner="r1", started=1.0, ended=2.0),),
        usage=Usage(turns=2, prompt_tokens=10, sampled_tokens=5, others={"judge": 3}),
        timing=Timing(run=1.0, model=0.5),
        tokens=tokens,
    )


def record_with_tokens(folder: Path, group: int, member: int, *, writer: str = "w") -> Rollout:
    """Return a record whose tokens are on disk."""
    with TokenWriter(folder / "tokens", writer) as tokens:
        extents = tuple(tokens.append(encode_turn(turn)) for turn in turns(f"{group}.{member}", group))
    return record(group, member, tokens=extents)


def remount_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
