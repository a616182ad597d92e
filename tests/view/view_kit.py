"""Runs for the tests of the viewer: journals with chosen rewards, failures, transcripts and tokens."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rookery.core import (
    Attempt,
    Failed,
    Message,
    Outcome,
    Rollout,
    Task,
    Timing,
    Truncated,
    Turn,
    Usage,
    floats,
    ints,
)
from rookery.core.outcomes import Completed
from rookery.journal import Journal, TokenWriter, encode_turn

Reward = float | None
"""None is a failed rollout."""

LOST = Failed("infra", "sandbox.lost", "the sandbox was lost", "run", "Traceback (most recent call last):\n  boom")


def decode_columns(data: bytes) -> dict[str, Any]:
    """Decode what `RunIndex.encode_columns` returned: its header, with the columns in place of their names."""
    length = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + length])
    names = ["task", "label", *header["numbers"], *header["metrics"]]
    rows = header["count"] - header["start"]
    values = np.frombuffer(data, offset=4 + length)
    assert len(values) == rows * len(names)
    columns = [[None if math.isnan(one) else one for one in part] for part in values.reshape(len(names), rows)]
    split = 2 + len(header["numbers"])
    return {
        **header,
        "task": [int(one) for one in columns[0]],
        "label": [int(one) for one in columns[1]],
        "numbers": dict(zip(header["numbers"], columns[2:split], strict=True)),
        "metrics": dict(zip(header["metrics"], columns[split:], strict=True)),
    }


def simple_turns(rollout_id: str, text: str, *, prompt: str = "What is 6 * 7?") -> list[Turn]:
    """Return one turn of a byte-level policy whose reply is `text`."""
    sampled = list(text.encode())[:1000] or [0]
    return [
        Turn(
            attempt=f"{rollout_id}.1",
            index=0,
            messages=(Message("user", prompt),),
            response=Message("assistant", text),
            prompt=ints([256, *prompt.encode()]),
            sampled=ints(sampled),
            logprobs=floats([-0.25] * len(sampled)),
            version=3,
            prompt_tokens=1 + len(prompt),
            sampled_tokens=len(sampled),
            started=1_700_000_000.0,
            seconds=0.5,
            queued=0.1,
        )
    ]


def make_run(
    folder: Path,
    rewards: Mapping[str, Sequence[Reward]],
    *,
    turns: Mapping[str, list[Turn]] | None = None,
    config: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    truncated: Sequence[str] = (),
) -> Path:
    """Create a finished run with one group per task, and return its directory.

    `turns` are the model calls of rollouts by ID; other rollouts have one turn. `truncated` lists the IDs of
    rollouts that ran out of turns. `data` is the data of every task. The ID of a task in a mixture begins with the
    name of its environment and a slash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokens").mkdir(exist_ok=True)
    with (
        Journal.create(folder, dict(config or {}), env="sums", model="scripted") as journal,
        TokenWriter(folder / "tokens", "w") as tokens,
    ):
        prompt = (Message("user", "What is 6 * 7?"),)
        for group, (task, members) in enumerate(rewards.items()):
            journal.add_tasks([Task(id=task, prompt=prompt, data=dict(data or {}))], start=group)
            journal.add_group(group, stream="main", position=group, task=group, k=len(members))
            for member, reward in enumerate(members):
                rollout_id = f"{group}.{member}"
                own = (turns or {}).get(rollout_id, simple_turns(rollout_id, f"answer {reward}"))
                extents = tuple(tokens.append(encode_turn(turn)) for turn in own)
                journal.add_rollout(_record(group, member, task, reward, extents, own, rollout_id in truncated))
        tokens.flush()
        journal.end("finished")
    return folder


def _record(
    group: int, member: int, task: str, reward: Reward, extents: Any, turns: list[Turn], truncated: bool
) -> Rollout:
    rollout_id = f"{group}.{member}"
    outcome: Outcome = LOST if reward is None else Truncated("turns") if truncated else Completed()
    start = 1_700_000_000.0 + group
    attempts = [
        Attempt(id=f"{rollout_id}.1", number=1, outcome=outcome, runner="r0", started=start, ended=start + 2)
    ]
    if reward is None:
        attempts.append(
            Attempt(id=f"{rollout_id}.2", number=2, outcome=LOST, runner="r1", started=start + 2, ended=start + 3)
        )
    return Rollout(
        id=rollout_id,
        group=group,
        member=member,
        task=task,
        environment=task.partition("/")[0] if "/" in task else "",
        outcome=outcome,
        reward=reward,
        rewards={} if reward is None else {"exact": reward},
        metrics={"level": float(group)},
        info={"grade": {"stdout": f"checked {rollout_id}"}},
        attempts=tuple(attempts),
        usage=Usage(
            turns=len(turns),
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            sampled_tokens=sum(turn.sampled_tokens for turn in turns),
        ),
        timing=Timing(queue=0.1, setup=0.2, run=1.0, score=0.3, model=0.6, sandbox=0.2),
        tokens=extents,
    )
