"""An environment whose rollouts fail and score as their tasks say, and the gradient of a tiny policy."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rookery import Context, Environment, Limits
from rookery.core import SandboxError
from rookery.sandboxes import Command
from rookery.upstreams.embedded import Weights
from rookery.upstreams.embedded.chat import VOCAB
from tests.adapters.trl_kit import tiny

Sequence_ = tuple[Sequence[int], Sequence[int], float]
"""Token IDs, loss mask and advantage of one training sequence."""


class ScriptedEnvironment(Environment):
    """Holds `data.conversations` conversations, each of which becomes a segment. It needs no sandbox.

    Member n gets the reward `data.rewards[n]`; if that is None, it loses its sandbox after the first model call.
    """

    name = "scripted"
    limits = Limits(turns=8, setup=60.0, run=60.0, score=60.0)

    def tasks(self) -> list[dict[str, Any]]:
        return [make_task("two", [1.0, 0.0])]

    async def run(self, ctx: Context) -> None:
        member = int(ctx.attempt.split(".")[1])
        for number in range(int(ctx.task.data.get("conversations", 1))):
            await ctx.policy.chat(f"{ctx.task.text} {number}")
            if ctx.task.data["rewards"][member] is None:
                raise SandboxError("the sandbox is gone")

    async def score(self, ctx: Context) -> float:
        return float(ctx.task.data["rewards"][int(ctx.attempt.split(".")[1])])


class SleepingEnvironment(ScriptedEnvironment):
    """Also runs the command `data.command` in a sandbox, if the task has one."""

    name = "sleeping"

    async def run(self, ctx: Context) -> None:
        await super().run(ctx)
        if command := ctx.task.data.get("command"):
            sandbox = await ctx.sandbox()
            result = await sandbox.exec(Command(argv=tuple(command.split()), wall=600))
            if not result.ok:
                raise SandboxError(f"the command was {result.status}", cause="sandbox.lost")


def make_task(name: str, rewards: Sequence[float | None], **data: Any) -> dict[str, Any]:
    return {"id": name, "prompt": f"say {name}", "rewards": list(rewards), **data}


class ByteTokenizer:
    """Decodes the embedded policy's tokens, shifted by `shift`."""

    def __init__(self, size: int = 300, shift: int = 0) -> None:
        self.size = size
        self.shift = shift

    def __len__(self) -> int:
        return self.size

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token + self.shift for token in token_ids if token < 256 - self.shift).decode("latin-1")


def bigram_gradient(sequences: Iterable[Sequence_]) -> np.ndarray[Any, Any]:
    """Return the policy gradient of a uniform bigram model: the mean over trained tokens of advantage times
    the gradient of the token's log probability."""
    gradient = np.zeros((VOCAB, VOCAB))
    trained = 0
    for tokens, mask, advantage in sequences:
        for before, token, trains in zip(tokens[:-1], tokens[1:], mask[1:], strict=True):
            if trains:
                gradient[before] -= advantage / VOCAB
                gradient[before, token] += advantage
                trained += 1
    return gradient / max(1, trained)


def save_model(folder: Path) -> Weights:
    """Save a tiny Llama with random weights and the embedded policy's tokenizer, as transformers reads them."""
    from rookery.adapters.embedded import embedded_tokenizer

    weights = tiny(folder)
    embedded_tokenizer().save_pretrained(folder)
    return weights
