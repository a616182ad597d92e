"""Run `rlm` rollouts end to end: a real engine, real sandboxes, and an inference engine that is driven by a
function.

The server has its own tokenizer, in which each character is a token, and returns the token IDs of prompts and
replies. Tests can therefore compare the sampled tokens with the trained ones.
"""

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
Reply = str | Answer
PlayFunction = Callable[[list[dict[str, Any]]], Reply]


def encode(messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = []
    for message in messages:
        ids += [ROLES[message["role"]], *map(ord, message["content"] or ""), END]
    return ids


def count_replies(messages: list[dict[str, Any]]) -> int:
    """Return how many replies of the model a conversation contains."""
    return sum(message["role"] == "assistant" for message in messages)


class Models:
    """An inference engine that answers the root from a list or function, and sub-models from a function."""

    def __init__(self, root: list[Reply] | PlayFunction, sub: PlayFunction = lambda _: "sub") -> None:
        self._root = root
        self._sub = sub
        self.sampled: Counter[tuple[int, ...]] = Counter()
        self.observations: list[str] = []
        """The text that the root read after each cell. Only recorded if the root's replies are a list."""
        self.subs: list[str] = []
        """The prompts of the sub-calls."""
        self.server = ModelServer(self._answer)

    def _answer(self, request: Request) -> Answer:
        messages = request.body["messages"]
        if messages[0]["role"] == "system" and "persistent" in messages[0]["content"]:
            reply = self._play_root(messages)
        else:
            self.subs.append(messages[-1]["content"])
            reply = self._sub(messages)
        answer = reply if isinstance(reply, Answer) else Answer(reply)
        if answer.status == 200:
            ids = [*map(ord, answer.text or ""), END]
            answer.ids, answer.logprobs = ids, [-0.5] * len(ids)
            answer.prompt_ids = [*encode(messages), ROLES["assistant"]]
            self.sampled[tuple(ids)] += 1
        return answer

    def _play_root(self, messages: list[dict[str, Any]]) -> Reply:
        if callable(self._root):
            return self._root(messages)
        done = count_replies(messages)
        if done:
            self.observations.append(messages[-1]["content"])
        return self._root[done]


async def run_tasks(
    models: Models, folder: Path, tasks: list[dict[str, Any]] | list[Task], *, k: int = 1, **options: Any
) -> list[Group]:
    """Run tasks with one engine and return their groups in order."""
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


async def run_group(models: Models, folder: Path, task: dict[str, Any], *, k: int = 1, **options: Any) -> Group:
    (group,) = await run_tasks(models, folder, [task], k=k, **options)
    return group


async def run_rollout(models: Models, folder: Path, task: dict[str, Any], **options: Any) -> Rollout:
    return (await run_group(models, folder, task, **options)).rollouts[0]


def read_turns(folder: Path, rollout: Rollout) -> list[Turn]:
    (run,) = [path for path in (folder / "runs").iterdir() if path.is_dir() and not path.is_symlink()]
    with RunReader(run) as reader:
        return reader.turns(rollout)


def trains_each_reply_once(models: Models, segments: list[Segment]) -> bool:
    """Return whether the trained spans are exactly the sampled replies, each once."""
    trained: Counter[tuple[int, ...]] = Counter()
    for segment in segments:
        ids = memoryview(segment.tokens).cast("i")
        for span in segment.versions:
            trained[tuple(ids[span.start : span.end])] += 1
    return trained == models.sampled


def segments_by_role(turns: list[Turn]) -> dict[str, list[Segment]]:
    return {role: build_segments(turns, role) for role in {turn.role for turn in turns}}
