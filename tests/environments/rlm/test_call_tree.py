"""The tree of sub-calls without a REPL: whoever asks may go away at any moment."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Limits, Message, Truncation, UsageError, ints
from rookery.environments.rlm.budget import BudgetExhausted, CallFailed
from rookery.environments.rlm.call_tree import CallTree, SubCall
from rookery.environments.rlm.functions import ReplFunctions
from rookery.environments.rlm.options import RlmOptions
from rookery.gateway import ModelRole
from rookery.trajectories import build_segments
from rookery.upstreams.protocol import ModelReply, ModelRequest, OnDelta, OnWait
from tests.environments.helpers import Attempt, ScriptedUpstream


class Echo(ScriptedUpstream):
    """Answers with ids of its own, some steps of the loop later; some prompts it refuses, or never answers."""

    def __init__(self) -> None:
        super().__init__([])
        self.answered: list[int] = []
        self.at_once = 0
        self.peak = 0

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        message = request.messages[-1]
        assert isinstance(message, Message)
        word = message.text
        self.at_once += 1
        self.peak = max(self.peak, self.at_once)
        try:
            if word.startswith("long"):
                raise Truncation("context", "too long")
            if word.startswith("never"):
                await asyncio.Event().wait()
            for _ in range(int(word.partition(" ")[2] or 0)):
                await asyncio.sleep(0)
        finally:
            self.at_once -= 1
        number = 1000 + len(self.answered)
        self.answered.append(number)
        return ModelReply(
            message=Message("assistant", f"re {word}"),
            finish="stop",
            prompt=ints([1, *map(ord, word)]),
            sampled=ints([number, 2]),
            sampled_tokens=2,
            prompt_tokens=len(word) + 1,
        )


def made(
    train: bool = True, limits: Limits | None = None, run: float = 60.0, **options: Any
) -> tuple[CallTree, Attempt, Echo]:
    attempt = Attempt(limits=limits, run=run)
    echo = Echo()
    role = attempt.session.roles["policy"]
    attempt.session.roles = {"policy": ModelRole(name="policy", upstream=echo, model=role.model)}

    async def child(_: CallTree, asked: SubCall) -> str:
        raise CallFailed(f"no child for {asked.prompt}")

    tree = CallTree(attempt.ctx, RlmOptions(train_sub=train, **options), {}, child)
    tree.begin()
    return tree, attempt, echo


def asked(prompt: str, depth: int = 1) -> SubCall:
    return SubCall(prompt=prompt, depth=depth)


prompts = st.lists(st.builds("{} {}".format, st.sampled_from("abc"), st.integers(0, 6)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(
    batches=st.lists(st.tuples(prompts, st.one_of(st.none(), st.integers(0, 8))), max_size=8),
    concurrency=st.integers(1, 5),
    calls=st.integers(0, 20),
    train=st.booleans(),
)
def test_every_answer_is_recorded_once_even_if_callers_disappear(
    batches: list[tuple[list[str], int | None]], concurrency: int, calls: int, train: bool
) -> None:
    async def run() -> None:
        tree, attempt, echo = made(train, concurrency=concurrency, max_calls=calls)
        got = 0
        for words, leaves in batches:
            asking = asyncio.ensure_future(tree.call_all([asked(word) for word in words]))
            if leaves is not None:  # the cell dies some steps later
                for _ in range(leaves):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait({asking})
            else:
                found = await asking
                for word, one in zip(words, found, strict=True):
                    assert one == f"re {word}" or isinstance(one, BudgetExhausted)
                got += sum(isinstance(one, str) for one in found)
        await tree.close()
        assert echo.at_once == 0
        assert echo.peak <= concurrency
        assert tree.budget.calls <= calls
        assert len(echo.answered) <= tree.budget.calls
        assert got <= len(echo.answered), "an answer is given once"
        role = "policy" if train else "sub"
        trained = [
            memoryview(part.tokens).cast("i")[span.start]
            for part in build_segments(attempt.turns, role)
            for span in part.versions
        ]
        assert sorted(trained) == echo.answered
        assert tree.budget.tokens == 2 * len(echo.answered)
        assert attempt.session.in_flight == 0
        assert not any(attempt.watch.waits.values())

    asyncio.run(run())


async def test_a_cached_reply_is_used_by_the_next_equal_call_alone() -> None:
    tree, _, echo = made()
    asking = asyncio.ensure_future(tree.call(asked("a 5")))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert await tree.call(asked("b 0")) == "re b 0"
    assert await tree.call(asked("a 5")) == "re a 5"
    assert (len(echo.answered), tree.orphans_reused) == (2, 1)
    assert await tree.call(asked("a 5")) == "re a 5"
    assert (len(echo.answered), tree.orphans_reused) == (3, 1), "asked again, it is sampled again"
    await tree.close()


async def test_what_ends_a_sub_call_does_not_end_the_rollout() -> None:
    tree, attempt, _ = made(limits=Limits(turns=1, context=40))
    with pytest.raises(CallFailed, match="refused: too long"):
        await tree.call(asked("long"))
    for _ in range(3):
        await tree.call(asked("a"))
    await tree.call(asked("b" * 100))
    before = attempt.session.truncated
    assert before is None
    await tree.root_chat([Message("user", "root")])
    with pytest.raises(Truncation, match="all 1 turns"):
        await tree.root_chat([Message("user", "root")])
    assert attempt.session.truncated == "turns"
    assert attempt.session.turns == 5
    await tree.close()


async def test_a_call_that_never_ends_is_ended_by_its_own_deadline() -> None:
    tree, attempt, echo = made(sub_timeout=0.05)
    with pytest.raises(CallFailed, match=r"took longer than its 0\.05 s"):
        await tree.call(asked("never"))
    assert (echo.at_once, attempt.session.in_flight) == (0, 0)
    await tree.close()


async def test_sub_calls_leave_the_root_a_part_of_the_time() -> None:
    tree, attempt, echo = made(run=0.4)
    with pytest.raises((CallFailed, BudgetExhausted)):
        await tree.call(asked("never"))
    with pytest.raises(BudgetExhausted, match="the time for sub-calls is over"):
        await tree.call(asked("a"))
    assert tree.left(0)["seconds_left"] == 0.0
    assert (await tree.root_chat([Message("user", "a")])).text == "re a"
    assert (echo.at_once, attempt.session.in_flight) == (0, 0)
    await tree.close()


async def test_a_sub_model_with_an_upstream_cannot_train() -> None:
    attempt = Attempt()
    policy = attempt.session.roles["policy"]
    other = Echo()
    attempt.session.roles = {
        "policy": policy,
        "sub": ModelRole(name="sub", upstream=other, model="small"),
    }
    with pytest.raises(UsageError, match="cannot train the policy"):
        attempt.ctx.sub_model(trained=True)
    reply = await attempt.ctx.sub_model(trained=False).chat("a")
    assert (reply.text, reply.turn.role, attempt.session.turns) == ("re a", "sub", 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda functions: functions.llm(7), "prompt must be"),
        (lambda functions: functions.llm("a", max_tokens=0), "max_tokens must be"),
        (lambda functions: functions.llm("a", system=[]), "system must be"),
        (lambda functions: functions.llm_batch("abc"), "takes a list"),
        (lambda functions: functions.llm_batch(["a"] * 10_001), "the batch has"),
        (lambda functions: functions.rlm("a", context="b", file="c"), "not both"),
        (lambda functions: functions.answer("x" * (2 << 20)), "characters"),
    ],
)
async def test_what_is_wrong_with_a_call_is_reported(call: Any, words: str) -> None:
    tree, _, echo = made()
    with pytest.raises(CallFailed, match=words):
        await call(ReplFunctions(tree, 0, {}))
    assert echo.answered == []
    await tree.close()
