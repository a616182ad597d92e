"""What trains is what was sampled: random conversations through the pipeline, and servers that render again."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Message, Sampling, ToolSchema
from rookery.gateway import ModelReply
from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.trajectories import build_segments
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.embedded import EmbeddedUpstream
from rookery.upstreams.protocol import Delta, ModelRequest
from tests.engine_standins import small_weights
from tests.gateway.chat_renderers.kit import TOOLS, ids_of, open_family
from tests.gateway.rooms import Room, Script, as_clients_do, exact, holds, room

ADD = ToolSchema("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
TOOLSETS: tuple[tuple[ToolSchema, ...], ...] = ((), (ADD,), TOOLS)

steps = st.lists(
    st.fixed_dictionaries(
        {
            "deed": st.sampled_from(
                ["extend", "extend", "extend", "edit", "compact", "branch", "sub-agent", "edit answer"]
            ),
            "which": st.integers(0, 7),
            "where": st.integers(0, 15),
            "text": st.sampled_from(["go on", "é語🙂", "", "a b", '{"x": 1}']),
            "tools": st.sampled_from([None, None, None, 0, 1, 2]),
            "n": st.sampled_from([1, 1, 1, 2, 3]),
            "streams": st.booleans(),
            "stop": st.sampled_from([(), (), ("e",), ("th", "\n")]),
            "most": st.sampled_from([1, 4, 24, 24]),
            "reasoning": st.booleans(),
            "spaced": st.sampled_from(["", "tight", "wide", "sorted"]),
            "choice": st.sampled_from([None, None, "auto", "none", "required"]),
        }
    ),
    min_size=1,
    max_size=10,
)


class Clients:
    """Agents that share a session: each has a history and tools, and sends back what it likes."""

    def __init__(self, made: Room) -> None:
        self.room = made
        self.histories: list[tuple[list[Message], int]] = [([Message("user", "begin")], 0)]

    async def do(self, step: dict[str, Any]) -> None:
        at = step["which"] % len(self.histories)
        history, tools = list(self.histories[at][0]), self.histories[at][1]
        where = step["where"] % len(history)
        match step["deed"]:
            case "edit":
                history[where] = Message("user", f"edited {step['text']}")
            case "compact":
                history = [Message("user", f"so far: {step['text']}")]
            case "branch":
                history = history[: where + 1]
                at = len(self.histories)
            case "sub-agent":
                history = [Message("system", "You help."), Message("user", step["text"])]
                at = len(self.histories)
            case "edit answer":
                answers = [place for place, message in enumerate(history) if message.role == "assistant"]
                if answers:
                    history[answers[step["where"] % len(answers)]] = Message("assistant", "as I would say it")
        if step["tools"] is not None:
            tools = step["tools"]
        if history[-1].role == "assistant":
            history.append(Message("user", step["text"]))
        calls = [self._call(history, tools, step) for _ in range(step["n"])]
        replies = await asyncio.gather(*calls)
        for reply in replies:
            answer = as_clients_do(reply.message, reasoning=step["reasoning"], spaced=step["spaced"])
            new = [Message("tool", step["text"], tool_call_id=call.id) for call in answer.tool_calls]
            follows = ([*history, answer, *(new or [Message("user", step["text"])])], tools)
            if at < len(self.histories):
                self.histories[at] = follows
                at = len(self.histories)
            else:
                self.histories.append(follows)

    async def _call(self, history: list[Message], tools: int, step: dict[str, Any]) -> ModelReply:
        told: list[Delta] = []

        async def on_delta(delta: Delta) -> None:
            told.append(delta)

        offered = TOOLSETS[tools]
        reply = await self.room.policy.chat(
            history,
            tools=offered,
            tool_choice=step["choice"] if offered and step["choice"] != "required" else None,
            sampling=Sampling(max_tokens=step["most"], stop=step["stop"]),
            on_delta=on_delta if step["streams"] else None,
        )
        if step["streams"]:
            assert "".join(delta.content for delta in told) == (reply.message.text or "")
            assert "".join(delta.reasoning for delta in told) == (reply.message.reasoning or "")
            assert b"".join(delta.sampled for delta in told) == reply.turn.sampled
        else:
            assert told == []
        return reply


async def play(made: Room, sequence: list[dict[str, Any]]) -> None:
    clients = Clients(made)
    for step in sequence:
        await clients.do(step)


def embedded(weights: str) -> EmbeddedUpstream:
    url = "embedded" if weights == "own" else f"embedded:{small_weights()}"
    return EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=(url,)))


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(steps, st.sampled_from(["own", "random"]), st.integers(0, 1000))
def test_in_tokens_mode_nothing_drifts_whatever_clients_do_to_their_histories(
    sequence: list[dict[str, Any]], weights: str, seed: int
) -> None:
    async def run() -> None:
        upstream = embedded(weights)
        made = room(upstream, EmbeddedRenderer(), seed=seed)
        try:
            await play(made, sequence)
        finally:
            await made.upstream.close()
        exact(made)

    asyncio.run(run())


@settings(deadline=None, max_examples=30)
@given(steps, st.integers(0, 1000))
def test_in_messages_mode_what_does_not_fit_is_counted_and_never_padded_over(
    sequence: list[dict[str, Any]], seed: int
) -> None:
    async def run() -> None:
        made = room(embedded("random"), record="messages", seed=seed)
        try:
            await play(made, sequence)
        finally:
            await made.upstream.close()
        holds(made)
        drifts = [turn for turn in made.turns if turn.parent is not None and not turn.prefix]
        assert len(drifts) <= made.session.recorder.counts.drifted

    asyncio.run(run())


# ---- a real chat format and vocabulary

PIECES = (
    "<think>\nHm, let me see.\n</think>\n\n",
    "<think>\n\n</think>\n\n",
    "Cold today.",
    " naïve 🙂 語",
    '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo","days":3}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": { "city" : "Oslo" }}\n</tool_call>\n',
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "now", "arguments": {oops}\n</tool_call>',
    "  two  spaces\n\n\n",
)


def drawn(request: ModelRequest) -> list[int]:
    """Ids as a model of the family samples them, tokenised in odd places, as nobody would encode the text."""
    family = open_family("qwen3")
    chance = random.Random(request.seed)
    ids: list[int] = []
    for text in chance.sample(PIECES, chance.randint(1, 3)):
        cut = chance.randint(0, len(text))
        ids += family.tokenizer.encode(text[:cut]) + family.tokenizer.encode(text[cut:])
    return [*ids, family.stop_token_ids[0]]


@pytest.mark.needs("tokenizers")
@settings(deadline=None, max_examples=40)
@given(steps, st.integers(0, 1000))
def test_with_a_real_vocabulary_no_sampled_token_is_ever_tokenised_again(
    sequence: list[dict[str, Any]], seed: int
) -> None:
    async def run() -> None:
        family = open_family("qwen3")
        made = room(Script(drawn, family), family, seed=seed)
        await play(made, sequence)
        exact(made)

    asyncio.run(run())


def scripted(*texts: str) -> Callable[[ModelRequest], list[int]]:
    family, left = open_family("qwen3"), list(texts)
    return lambda _: [*family.tokenizer.encode(left.pop(0)), family.stop_token_ids[0]]


THOUGHT = "<think>\nOslo, then.\n</think>\n\n"
TWO = (THOUGHT + "It is cold.", "<think>\nRome.\n</think>\n\nWarm.")


async def talked(made: Room, *, reasoning: bool = True) -> None:
    history = [Message("system", "You help."), Message("user", "How is Oslo?")]
    first = await made.policy.chat(history)
    answer = as_clients_do(first.message, reasoning=reasoning, spaced="")
    await made.policy.chat([*history, answer, Message("user", "And Rome?")])


@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize("reasoning", [True, False])
async def test_a_template_that_drops_reasoning_drifts_in_messages_mode_and_not_in_tokens_mode(
    reasoning: bool,
) -> None:
    family = open_family("qwen3")
    rendered = room(Script(scripted(*TWO), family), family)
    await talked(rendered, reasoning=reasoning)
    exact(rendered)
    assert rendered.session.recorder.counts.drifted == 0
    assert [turn.prefix > 0 for turn in rendered.turns] == [False, True]
    (segment,) = build_segments(rendered.turns)
    assert segment.turns == (0, 1)

    served = room(Script(scripted(*TWO), family), record="messages")
    await talked(served, reasoning=reasoning)
    holds(served)
    counts = served.session.recorder.counts
    assert (counts.drifted, counts.extended) == (1, 0)
    assert [(turn.parent, turn.prefix) for turn in served.turns] == [(None, 0), (0, 0)]
    assert served.turns[1].prompt == served.upstream.noted[1][1].prompt  # all of it, as the server had it
    assert [segment.turns for segment in build_segments(served.turns)] == [(0,), (1,)]


@pytest.mark.needs("tokenizers")
async def test_an_answer_that_was_cut_off_is_not_continued_as_if_it_had_ended() -> None:
    family = open_family("qwen3")
    made = room(Script(scripted(THOUGHT + "It is very cold today.", "Warm."), family), family, max_tokens=4)
    history = [Message("user", "How is Oslo?")]
    first = await made.policy.chat(history)
    assert (first.finish, len(first.turn.sampled)) == ("length", 16)
    second = await made.policy.chat([*history, first.message, Message("user", "And Rome?")])
    exact(made)
    prompt = made.upstream.noted[1][0].tokens
    if second.turn.prefix:  # extended: then its end was put there by us, and does not train
        (segment,) = build_segments(made.turns)
        assert segment.mask.count(1) == 4 + len(second.turn.sampled) // 4
        added = ids_of(prompt[len(first.turn.prompt) + 16 :])
        assert family.stop_token_ids[0] in added[: len(added) // 2]
    else:
        assert len(build_segments(made.turns)) == 2


# ---- other modes, other shapes


async def test_in_plain_mode_there_are_no_ids() -> None:
    made = room(embedded("own"), record="plain")
    try:
        reply = await made.policy.chat("What is 2 + 2?")
    finally:
        await made.upstream.close()
    assert not made.upstream.noted[0][0].want_tokens
    assert reply.text
    assert reply.turn.sampled_tokens > 0
    assert (reply.turn.prompt, reply.turn.sampled, reply.turn.logprobs) == (b"", b"", b"")
    assert build_segments(made.turns) == []


async def test_other_roles_train_nothing_and_share_nothing() -> None:
    made = room(embedded("own"), EmbeddedRenderer())
    try:
        await made.policy.chat("hello")
        assert [segment.turns for segment in build_segments(made.turns)] == [(0,)]
        assert build_segments(made.turns, "judge") == []
    finally:
        await made.upstream.close()
