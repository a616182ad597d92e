"""Rollouts of `rlm` from end to end: a real engine, real sandboxes, and a server that plays models by a function.

The server has a tokenizer of its own (a character is an id), and tells the ids of prompts and answers: what was
sampled can be compared with what trains, id for id.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rookery import Engine
from rookery.core import Group, Rollout, Segment, Task, Turn
from rookery.engine.retry import RetryPolicy
from rookery.environments.rlm import RlmEnvironment
from rookery.journal import RunReader
from rookery.trajectories import build_segments
from tests.servers import Answer, ModelServer, Request

ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END = 5
Said = str | Answer
Plays = Callable[[list[dict[str, Any]]], Said]


def encoded(messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = []
    for message in messages:
        ids += [ROLES[message["role"]], *map(ord, message["content"] or ""), END]
    return ids


def said(messages: list[dict[str, Any]]) -> int:
    """How often the model has spoken."""
    return sum(message["role"] == "assistant" for message in messages)


class Models:
    """A server whose answers a function gives: of the root, and of sub-models."""

    def __init__(self, root: list[Said] | Plays, sub: Plays = lambda _: "sub") -> None:
        self._root = root
        self._sub = sub
        self.sampled: Counter[tuple[int, ...]] = Counter()
        self.told: list[str] = []
        """What the root was told after each cell."""
        self.subs: list[str] = []
        self.server = ModelServer(self._answer)

    def _answer(self, request: Request) -> Answer:
        messages = request.body["messages"]
        if messages[0]["role"] == "system" and "persistent" in messages[0]["content"]:
            play = self._of_root(messages)
        else:
            self.subs.append(messages[-1]["content"])
            play = self._sub(messages)
        answer = play if isinstance(play, Answer) else Answer(play)
        if answer.status == 200:
            ids = [*map(ord, answer.text or ""), END]
            answer.ids, answer.logprobs = ids, [-0.5] * len(ids)
            answer.prompt_ids = [*encoded(messages), ROLES["assistant"]]
            self.sampled[tuple(ids)] += 1
        return answer

    def _of_root(self, messages: list[dict[str, Any]]) -> Said:
        if callable(self._root):
            return self._root(messages)
        done = said(messages)
        if done:
            self.told.append(messages[-1]["content"])
        return self._root[done]


async def all_played(
    models: Models, folder: Path, tasks: list[dict[str, Any]] | list[Task], *, k: int = 1, **options: Any
) -> list[Group]:
    """The groups in the order of their tasks, from one engine."""
    engine_options: dict[str, Any] = {
        name: options.pop(name) for name in ("roles", "limits", "retry") if name in options
    }
    settings: dict[str, Any] = {"runners": 0, "sandbox": "local", "retry": RetryPolicy(attempts=1)}
    env = options.pop("env", None) or RlmEnvironment(**options)
    async with (
        models.server as server,
        Engine(env, policy=server.url, out=folder / "runs", **{**settings, **engine_options}) as engine,
    ):
        groups = [group async for group in engine.groups(tasks, k=k)]
    return sorted(groups, key=lambda group: group.index)


async def played(models: Models, folder: Path, task: dict[str, Any], *, k: int = 1, **options: Any) -> Group:
    (group,) = await all_played(models, folder, [task], k=k, **options)
    return group


async def one(models: Models, folder: Path, task: dict[str, Any], **options: Any) -> Rollout:
    return (await played(models, folder, task, **options)).rollouts[0]


def turns_of(folder: Path, rollout: Rollout) -> list[Turn]:
    (run,) = [path for path in (folder / "runs").iterdir() if path.is_dir() and not path.is_symlink()]
    with RunReader(run) as reader:
        return reader.turns(rollout)


def trained_once(models: Models, found: list[Segment]) -> bool:
    """Whether the stretches that train are, each once, the answers that were sampled."""
    stretches: Counter[tuple[int, ...]] = Counter()
    for segment in found:
        ids = memoryview(segment.tokens).cast("i")
        for span in segment.versions:
            stretches[tuple(ids[span.start : span.end])] += 1
    return stretches == models.sampled


def by_role(turns: list[Turn]) -> dict[str, list[Segment]]:
    return {role: build_segments(turns, role) for role in {turn.role for turn in turns}}


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
