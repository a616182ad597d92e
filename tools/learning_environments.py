"""Environments for `tools/prove_learning.py`, with infrastructure that fails on purpose."""

import os
import signal
from difflib import SequenceMatcher
from random import Random

from rookery import Context, Environment, Message, Sampling, SandboxError, Score, Task, UpstreamError
from rookery.environments.arithmetic import Arithmetic


class FaultyArithmetic(Arithmetic):
    """Arithmetic in which a share of the attempts is killed: the sandbox, the model server or the runner fails.

    A runner takes all of its attempts with it, `neighbours` on average, so runners are killed less often.
    """

    def __init__(self, share: float = 0.1, neighbours: int = 32, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.share, self.neighbours = share, neighbours

    async def run(self, ctx: Context) -> None:
        draw = Random(f"{ctx.seed}-{ctx.attempt}").random() / self.share  # noqa: S311
        if draw < 0.45:
            raise SandboxError("the sandbox was killed on purpose")
        if draw < 0.9:
            raise UpstreamError("the model server was stopped on purpose", cause="upstream.unreachable")
        if draw < 0.9 + 0.1 / self.neighbours:
            os.kill(os.getpid(), signal.SIGKILL)
        await super().run(ctx)


class Detour(Environment):
    """Two ways to answer. The tool path earns 0.9, and its infrastructure fails in 20% of the attempts. Guessing
    earns 0.75 and never fails.

    The first byte of the reply chooses: even is the tool path. With `failures="missing"` a failure is raised, so
    that Rookery excludes the rollout. With `failures="zero"` it is recorded as reward 0, as is common practice.
    """

    name = "detour"
    sampling = Sampling(max_tokens=1)

    def __init__(self, failures: str = "missing") -> None:
        super().__init__()
        self.failures = failures

    def tasks(self) -> list[Task]:
        texts = ("Hi", "a b", "?", "Hi b", "a ?", "b b", "Hi a", "a a")
        return [Task(id=f"t{at}", prompt=(Message("user", text),)) for at, text in enumerate(texts)]

    async def run(self, ctx: Context) -> None:
        reply = await ctx.policy.chat(ctx.task.prompt)
        first = reply.text.encode()[:1]
        ctx.state["tool"] = bool(first) and first[0] % 2 == 0
        ctx.state["failed"] = ctx.state["tool"] and ctx.rng.random() < 0.2
        if ctx.state["failed"] and self.failures == "missing":
            raise SandboxError("the tool's sandbox failed on purpose")

    async def score(self, ctx: Context) -> Score:
        tool = ctx.state["tool"]
        reward = float(ctx.rng.random() < (0.9 if tool else 0.75)) * (not ctx.state["failed"])
        return Score(reward, metrics={"tool": float(tool)})


WORDS = (
    "apple river stone cloud tiger paper green music table light horse bread seven ocean chair plant "
    "glass dream sugar piano lemon night house train field smile watch brown eagle storm honey queen"
)


class ReverseText(Environment):
    """Write the words of a text in reverse order. The reward is the similarity to the right answer, up to 1."""

    name = "reverse-text"
    system_prompt = "Write the words of the text in reverse order."
    sampling = Sampling(max_tokens=64)

    def __init__(self, size: int = 4000, seed: int = 0) -> None:
        super().__init__()
        self.size, self.seed = size, seed

    def tasks(self) -> list[Task]:
        return self._make("train", self.size)

    def held_out_tasks(self, count: int) -> list[Task]:
        return self._make("held-out", count)

    def _make(self, split: str, count: int) -> list[Task]:
        rng = Random(f"{split}-{self.seed}")  # noqa: S311
        tasks = []
        for number in range(count):
            chosen = rng.choices(WORDS.split(), k=rng.randrange(5, 13))
            text, answer = " ".join(chosen), " ".join(reversed(chosen))
            tasks.append(Task(id=f"{split}-{number}", prompt=(Message("user", text),), data={"answer": answer}))
        return tasks

    async def run(self, ctx: Context) -> None:
        reply = await ctx.policy.chat((Message("system", self.system_prompt), *ctx.task.prompt))
        ctx.state["reply"] = reply.text

    async def score(self, ctx: Context) -> float:
        answer, reply = str(ctx.task.data["answer"]).split(), ctx.state["reply"].split()
        return SequenceMatcher(None, answer, reply, autojunk=False).ratio()
