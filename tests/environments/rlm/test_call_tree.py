"""The tree of sub-calls without a REPL, whose callers may be cancelled at any moment."""

import asyncio
from typing import Any, cast

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
from tests.waiting import advance_clock, wait_until


class EchoUpstream(ScriptedUpstream):
    """Echoes prompts with unique token IDs, some event-loop steps later. Refuses or never answers some prompts."""

    def __init__(self) -> None:
        super().__init__([])
        self.answered: list[int] = []
        self.running = 0
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
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            if word.startswith("long"):
                raise Truncation("context", "too long")
            if word.startswith("never"):
                await asyncio.Event().wait()
            for _ in range(int(word.partition(" ")[2] or 0)):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
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


def make_tree(
    train: bool = True, limits: Limits | None = None, run: float = 60.0, **options: Any
) -> tuple[CallTree, Attempt, EchoUpstream]:
    attempt = Attempt(limits=limits, run=run)
    echo = EchoUpstream()
    role = attempt.session.roles["policy"]
    attempt.session.roles = {"policy": ModelRole(name="policy", upstream=echo, model=role.model)}

    async def child(_: CallTree, sub_call: SubCall) -> str:
        raise CallFailed(f"no child for {sub_call.prompt}")

    tree = CallTree(attempt.ctx, RlmOptions(train_sub=train, **options), {}, child)
    tree.begin()
    return tree, attempt, echo


def sub_call(prompt: str, depth: int = 1) -> SubCall:
    return SubCall(prompt=prompt, depth=depth)


prompts = st.lists(st.builds("{} {}".format, st.sampled_from("abc"), st.integers(0, 6)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(
    batches=st.lists(st.tuples(prompts, st.one_of(st.none(), st.integers(0, 8))), max_size=8),
    concurrency=st.integers(1, 5),
    calls=st.integers(0, 20),
    train=st.booleans(),
)
def test_every_reply_is_recorded_once_even_if_callers_are_cancelled(
    batches: list[tuple[list[str], int | None]], concurrency: int, calls: int, train: bool
) -> None:
    async def run() -> None:
        tree, attempt, echo = make_tree(train, concurrency=concurrency, max_calls=calls)
        received = 0
        for batch, steps in batches:
            asking = asyncio.ensure_future(tree.call_all([sub_call(word) for word in batch]))
            if steps is not None:  # the cell ends some event-loop steps later
                for _ in range(steps):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait({asking})
            else:
                found = await asking
                for word, one in zip(batch, found, strict=True):
                    assert one == f"re {word}" or isinstance(one, BudgetExhausted)
                received += sum(isinstance(one, str) for one in found)
        await tree.close()
        assert echo.running == 0
        assert echo.peak <= concurrency
        assert tree.budget.calls <= calls
        assert len(echo.answered) <= tree.budget.calls
        assert received <= len(echo.answered), "each reply is returned once"
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


async def test_reply_to_a_cancelled_call_is_used_by_the_next_equal_call_only() -> None:
    tree, _, echo = make_tree()
    asking = asyncio.ensure_future(tree.call(sub_call("a 5")))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert await tree.call(sub_call("b 0")) == "re b 0"
    assert await tree.call(sub_call("a 5")) == "re a 5"
    assert (len(echo.answered), tree.orphans_reused) == (2, 1)
    assert await tree.call(sub_call("a 5")) == "re a 5"
    assert (len(echo.answered), tree.orphans_reused) == (3, 1), "a further call is sampled again"
    await tree.close()


async def test_truncated_sub_call_does_not_end_the_rollout() -> None:
    tree, attempt, _ = make_tree(limits=Limits(turns=1, context=40))
    with pytest.raises(CallFailed):
        await tree.call(sub_call("long"))
    for _ in range(3):
        await tree.call(sub_call("a"))
    await tree.call(sub_call("b" * 100))
    before = attempt.session.truncated
    assert before is None
    await tree.root_chat([Message("user", "root")])
    with pytest.raises(Truncation) as caught:
        await tree.root_chat([Message("user", "root")])
    assert caught.value.reason == "turns"
    assert attempt.session.truncated == "turns"
    assert attempt.session.turns == 5
    await tree.close()


async def test_hung_sub_call_ends_at_its_own_deadline() -> None:
    tree, attempt, echo = make_tree(sub_timeout=0.05)
    with pytest.raises(CallFailed):
        await tree.call(sub_call("never"))
    assert (echo.running, attempt.session.in_flight) == (0, 0)
    await tree.close()


async def test_sub_calls_leave_time_for_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, attempt, echo = make_tree(run=1000.0)
    call = asyncio.create_task(tree.call(sub_call("never")))
    await wait_until(lambda: echo.running)
    advance_clock(monkeypatch, 960.0)  # a twentieth is reserved
    with pytest.raises((CallFailed, BudgetExhausted)):
        await call
    with pytest.raises(BudgetExhausted):
        await tree.call(sub_call("a"))
    assert tree.left(0)["seconds_left"] == 0.0
    assert (await tree.root_chat([Message("user", "a")])).text == "re a"
    assert (echo.running, attempt.session.in_flight) == (0, 0)
    await tree.close()


async def test_sub_model_with_its_own_upstream_cannot_be_trained() -> None:
    attempt = Attempt()
    policy = attempt.session.roles["policy"]
    other = EchoUpstream()
    attempt.session.roles = {
        "policy": policy,
        "sub": ModelRole(name="sub", upstream=other, model="small"),
    }
    with pytest.raises(UsageError):
        attempt.ctx.sub_model(trained=True)
    reply = await attempt.ctx.sub_model(trained=False).chat("a")
    assert (reply.text, reply.turn.role, attempt.session.turns) == ("re a", "sub", 0)


@pytest.mark.parametrize(
    ("call", "subject"),
    [
        (lambda functions: functions.llm(7), "prompt"),
        (lambda functions: functions.llm("a", max_tokens=0), "max_tokens"),
        (lambda functions: functions.llm("a", system=[]), "system"),
        (lambda functions: functions.llm_batch("abc"), "llm_batch"),
        (lambda functions: functions.llm_batch(["a"] * 10_001), "10001"),
        (lambda functions: functions.rlm("a", context="b", file="c"), "context.*file"),
        (lambda functions: functions.answer("x" * (2 << 20)), str(2 << 20)),
    ],
)
async def test_invalid_call_is_refused_by_name(call: Any, subject: str) -> None:
    tree, _, echo = make_tree()
    with pytest.raises(CallFailed, match=subject):
        await call(ReplFunctions(tree, 0, {}, cast("Any", None)))
    assert echo.answered == []
    await tree.close()
