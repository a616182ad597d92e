"""The loop of model and tool calls, and the construction of tool environments."""

import asyncio
import threading
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import (
    Limits,
    Message,
    Task,
    TaskError,
    ToolCall,
    Truncation,
    UpstreamError,
    UsageError,
)
from rookery.environments import Context, ToolEnvironment, tool
from rookery.environments.text import render
from rookery.upstreams.protocol import ModelReply
from tests.environments.helpers import Attempt, calls


@tool
def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


@tool
async def shout(text: str) -> str:
    """Says it louder."""
    return text.upper()


# ---- the loop


async def test_the_policy_calls_tools_until_it_answers():
    attempt = Attempt([calls(("add", '{"a": 41}')), calls(("shout", '{"text": "so"}')), "It is 42."])
    env = ToolEnvironment([add, shout], system_prompt="Be brief.")
    await env.run(attempt.ctx)
    asked = attempt.upstream.requests
    assert [message.role for message in asked[0].messages] == ["system", "user"]
    assert [schema.name for schema in asked[0].tools.schemas] == ["add", "shout"]
    assert [message.role for message in asked[2].messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert attempt.observations == ["42", "SO"]
    assert env.answer(attempt.ctx) == "It is 42."
    assert attempt.ctx.tool_calls == 2
    assert await env.score(attempt.ctx) == 1.0
    assert [turn.parent for turn in attempt.turns] == [None, 0, 1]
    assert attempt.watch.waits_started.count("tool") == 2


async def test_system_message_of_the_task_overrides_that_of_the_environment():
    prompt = (Message("system", "Mine."), Message("user", "?"))
    attempt = Attempt(["42"], task=Task(id="t", prompt=prompt, data={"answer": "42"}))
    await ToolEnvironment(system_prompt="Ours.").run(attempt.ctx)
    assert attempt.upstream.requests[0].messages == prompt


@pytest.mark.parametrize("parallel", [False, True])
async def test_calls_of_one_turn_get_one_result_each_in_order(parallel):
    together = [
        ToolCall("x", "add", '{"a": 1}'),
        ToolCall("", "nothing", "{}"),
        ToolCall("x", "add", "oops"),
        ToolCall("", "shout", '{"text": "a"}'),
    ]
    attempt = Attempt([together, "42"])
    await ToolEnvironment([add, shout], parallel=parallel).run(attempt.ctx)
    replies = [message for message in attempt.ctx.state["messages"] if message.role == "tool"]
    assert [reply.tool_call_id for reply in replies] == ["x", "", "x", ""]
    assert replies[0].text == "2"
    assert all(name in replies[1].text for name in ("'nothing'", "add, shout"))
    assert "JSON" in replies[2].text
    assert replies[3].text == "A"
    assert attempt.ctx.tool_calls == 4
    assert attempt.ctx.metrics["bad_tool_calls"] == 2


async def test_calls_of_a_turn_run_in_order_unless_parallel():
    met = asyncio.Barrier(2)
    order: list[str] = []

    async def meet(name: str) -> None:
        await met.wait()

    async def note(name: str) -> None:
        order.append(name)

    two = calls(("meet", '{"name": "a"}'), ("meet", '{"name": "b"}'))
    attempt = Attempt([two, "42"])
    await ToolEnvironment([meet], parallel=True).run(attempt.ctx)
    assert attempt.observations == ["(no output)"] * 2
    attempt = Attempt([calls(*[("note", f'{{"name": "{n}"}}') for n in "abc"]), "42"])
    await ToolEnvironment([note]).run(attempt.ctx)
    assert order == ["a", "b", "c"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
arguments = st.one_of(
    st.text(),
    json_values.map(render),
    st.fixed_dictionaries({}, optional={"a": json_values, "b": json_values}).map(render),
)


@given(st.lists(st.tuples(st.sampled_from(["add", "shout", "", "x"]), arguments), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_every_call_gets_exactly_one_result(pairs):
    async def play() -> None:
        attempt = Attempt([calls(*pairs), "done"])
        env = ToolEnvironment([add, shout])
        await env.run(attempt.ctx)
        replies = [message for message in attempt.ctx.state["messages"] if message.role == "tool"]
        assert [reply.tool_call_id for reply in replies] == [f"call_{n}" for n in range(len(pairs))]
        assert all(isinstance(reply.content, str) for reply in replies)
        assert env.answer(attempt.ctx) == "done"

    asyncio.run(play())


async def test_reply_cut_at_its_token_limit_is_truncated_and_not_an_answer():
    cut = ModelReply(message=Message("assistant", "It is 42, because"), finish="length")
    attempt = Attempt([cut])
    env = ToolEnvironment([add])
    with pytest.raises(Truncation) as caught:
        await env.run(attempt.ctx)
    assert caught.value.reason == "tokens"
    assert env.answer(attempt.ctx) == ""
    assert await env.score(attempt.ctx) == 0.0


async def test_call_cut_at_the_token_limit_gets_a_result():
    cut = ModelReply(message=Message("assistant", None, (ToolCall("c", "add", '{"a": 1'),)), finish="length")
    attempt = Attempt([cut, "42"])
    await ToolEnvironment([add]).run(attempt.ctx)
    assert "JSON" in attempt.observations[0]


async def test_reply_aborted_by_the_server_is_an_upstream_error():
    attempt = Attempt([ModelReply(message=Message("assistant", "42"), finish="abort")])
    with pytest.raises(UpstreamError):
        await ToolEnvironment([add]).run(attempt.ctx)


async def test_exhausted_turns_truncate():
    attempt = Attempt([calls(("add", '{"a": 1}'))] * 3, limits=Limits(turns=2))
    with pytest.raises(Truncation):
        await ToolEnvironment([add]).run(attempt.ctx)
    assert len(attempt.observations) == 2


async def test_tool_may_set_the_answer_and_end_the_attempt():
    class Submits(ToolEnvironment):
        @tool
        def submit(self, answer: str, ctx: Context) -> str:
            """Hands in."""
            ctx.state["answer"] = answer
            return "thanks"

        def done(self, ctx: Context) -> bool:
            return "answer" in ctx.state

    attempt = Attempt([calls(("submit", '{"answer": "42"}'))])
    env = Submits()
    await env.run(attempt.ctx)
    assert await env.score(attempt.ctx) == 1.0


# ---- building


async def test_reading_schemas_starts_nothing():
    before = set(threading.enumerate())
    (schema,) = ToolEnvironment().tools()
    assert schema.name == "python"
    assert schema.parameters["required"] == ["code"]
    assert schema.parameters["properties"].keys() == {"code"}
    assert set(threading.enumerate()) <= before


class Calculator(ToolEnvironment):
    toolset: ClassVar = [add]
    system_prompt = "Count."

    def __init__(self, step: int = 1, **options: Any) -> None:
        self.step = step
        super().__init__(**options)

    @tool
    async def next(self, n: int) -> int:
        """The next one."""
        return n + self.step

    @staticmethod
    @tool
    def double(n: int) -> int:
        """Twice."""
        return 2 * n


class Less(Calculator):
    next = None


async def test_methods_of_a_subclass_are_bound_tools():
    attempt = Attempt([calls(("next", '{"n": 1}'), ("double", '{"n": 4}')), "42"])
    env = Calculator(3)
    assert [schema.name for schema in env.tools()] == ["add", "next", "double"]
    await env.run(attempt.ctx)
    assert attempt.observations == ["4", "8"]
    assert [schema.name for schema in Less().tools()] == ["add", "double"]
    assert [schema.name for schema in Calculator(tools=[]).tools()] == ["next", "double"]
    assert env.title == "Calculator"
    assert ToolEnvironment().title == "tools"


def test_tools_exist_without_the_base_constructor():
    class Forgets(ToolEnvironment):
        def __init__(self) -> None:
            pass

    assert [schema.name for schema in Forgets().tools()] == ["python"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tools": [add, add]}, "'add'"),
        ({"tools": [lambda x: x]}, "lambda"),
        ({"tools": [Calculator.next]}, "next"),
        ({"max_turns": 0}, "max_turns"),
        ({"tool_errors": "ignore"}, "tool_errors"),
        ({"max_result": 0}, "max_result"),
    ],
)
def test_invalid_arguments_are_refused_at_construction(options, named):
    with pytest.raises(UsageError, match=named):
        ToolEnvironment(**options)


def test_max_turns_sets_the_turn_limit():
    assert ToolEnvironment(max_turns=3).limits == Limits(turns=3)
    assert ToolEnvironment.limits == Limits()


@pytest.mark.parametrize("data", [{}, {"answer": None}, {"answer": [1]}, {"answer": ""}])
async def test_task_without_an_answer_fails_before_a_model_call(data):
    attempt = Attempt(["42"], task=Task(id="row7", prompt=(Message("user", "?"),), data=data))
    with pytest.raises(TaskError, match=r"row7.*data\.answer") as caught:
        await ToolEnvironment([add]).run(attempt.ctx)
    assert caught.value.code == "task.invalid"
    assert not attempt.upstream.requests


async def test_task_without_a_prompt_fails():
    attempt = Attempt(["42"], task=Task(id="row7", data={"answer": 1}))
    with pytest.raises(TaskError, match="row7"):
        await ToolEnvironment([add]).run(attempt.ctx)
