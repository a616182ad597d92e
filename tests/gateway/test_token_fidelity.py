"""Exactly the sampled tokens train, for random conversations and for servers that render again."""

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
from tests.gateway.session_kit import (
    SessionSetup,
    TokenScriptUpstream,
    check_exact_recording,
    check_recording,
    open_session,
    resend_message,
)

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
    """Agents that share a session; each has its own history and tools and may edit the history."""

    def __init__(self, setup: SessionSetup) -> None:
        self.setup = setup
        self.histories: list[tuple[list[Message], int]] = [([Message("user", "begin")], 0)]

    async def perform(self, step: dict[str, Any]) -> None:
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
            answer = resend_message(reply.message, reasoning=step["reasoning"], spacing=step["spaced"])
            new = [Message("tool", step["text"], tool_call_id=call.id) for call in answer.tool_calls]
            follows = ([*history, answer, *(new or [Message("user", step["text"])])], tools)
            if at < len(self.histories):
                self.histories[at] = follows
                at = len(self.histories)
            else:
                self.histories.append(follows)

    async def _call(self, history: list[Message], tools: int, step: dict[str, Any]) -> ModelReply:
        deltas: list[Delta] = []

        async def on_delta(delta: Delta) -> None:
            deltas.append(delta)

        offered = TOOLSETS[tools]
        reply = await self.setup.policy.chat(
            history,
            tools=offered,
            tool_choice=step["choice"] if offered and step["choice"] != "required" else None,
            sampling=Sampling(max_tokens=step["most"], stop=step["stop"]),
            on_delta=on_delta if step["streams"] else None,
        )
        if step["streams"]:
            assert "".join(delta.content for delta in deltas) == (reply.message.text or "")
            assert "".join(delta.reasoning for delta in deltas) == (reply.message.reasoning or "")
            assert b"".join(delta.sampled for delta in deltas) == reply.turn.sampled
        else:
            assert deltas == []
        return reply


async def perform_all(setup: SessionSetup, sequence: list[dict[str, Any]]) -> None:
    clients = Clients(setup)
    for step in sequence:
        await clients.perform(step)


def embedded_upstream(weights: str) -> EmbeddedUpstream:
    url = "embedded" if weights == "own" else f"embedded:{small_weights()}"
    return EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=(url,)))


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(steps, st.sampled_from(["own", "random"]), st.integers(0, 1000))
def test_tokens_mode_records_exactly_what_was_sampled_for_any_edited_history(
    sequence: list[dict[str, Any]], weights: str, seed: int
) -> None:
    async def run() -> None:
        upstream = embedded_upstream(weights)
        setup = open_session(upstream, EmbeddedRenderer(), seed=seed)
        try:
            await perform_all(setup, sequence)
        finally:
            await setup.upstream.close()
        check_exact_recording(setup)

    asyncio.run(run())


@settings(deadline=None, max_examples=30)
@given(steps, st.integers(0, 1000))
def test_messages_mode_counts_drifted_turns(sequence: list[dict[str, Any]], seed: int) -> None:
    async def run() -> None:
        setup = open_session(embedded_upstream("random"), record="messages", seed=seed)
        try:
            await perform_all(setup, sequence)
        finally:
            await setup.upstream.close()
        check_recording(setup)
        drifts = [turn for turn in setup.turns if turn.parent is not None and not turn.prefix]
        assert len(drifts) <= setup.session.recorder.counts.drifted

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


def sample_ids(request: ModelRequest) -> list[int]:
    """Return token IDs of a plausible reply, split at places where no encoder would split the text."""
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
def test_sampled_tokens_of_a_real_vocabulary_are_never_tokenised_again(
    sequence: list[dict[str, Any]], seed: int
) -> None:
    async def run() -> None:
        family = open_family("qwen3")
        setup = open_session(TokenScriptUpstream(sample_ids, family), family, seed=seed)
        await perform_all(setup, sequence)
        check_exact_recording(setup)

    asyncio.run(run())


def scripted_ids(*texts: str) -> Callable[[ModelRequest], list[int]]:
    family, left = open_family("qwen3"), list(texts)
    return lambda _: [*family.tokenizer.encode(left.pop(0)), family.stop_token_ids[0]]


THOUGHT = "<think>\nOslo, then.\n</think>\n\n"
TWO = (THOUGHT + "It is cold.", "<think>\nRome.\n</think>\n\nWarm.")


async def hold_conversation(setup: SessionSetup, *, reasoning: bool = True) -> None:
    history = [Message("system", "You help."), Message("user", "How is Oslo?")]
    first = await setup.policy.chat(history)
    answer = resend_message(first.message, reasoning=reasoning, spacing="")
    await setup.policy.chat([*history, answer, Message("user", "And Rome?")])


@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize("reasoning", [True, False])
async def test_template_that_drops_reasoning_drifts_only_in_messages_mode(
    reasoning: bool,
) -> None:
    family = open_family("qwen3")
    tokens_setup = open_session(TokenScriptUpstream(scripted_ids(*TWO), family), family)
    await hold_conversation(tokens_setup, reasoning=reasoning)
    check_exact_recording(tokens_setup)
    assert tokens_setup.session.recorder.counts.drifted == 0
    assert [turn.prefix > 0 for turn in tokens_setup.turns] == [False, True]
    (segment,) = build_segments(tokens_setup.turns)
    assert segment.turns == (0, 1)

    messages_setup = open_session(TokenScriptUpstream(scripted_ids(*TWO), family), record="messages")
    await hold_conversation(messages_setup, reasoning=reasoning)
    check_recording(messages_setup)
    counts = messages_setup.session.recorder.counts
    assert (counts.drifted, counts.extended) == (1, 0)
    assert [(turn.parent, turn.prefix) for turn in messages_setup.turns] == [(None, 0), (0, 0)]
    # The turn holds the whole prompt as the server rendered it.
    assert messages_setup.turns[1].prompt == messages_setup.upstream.calls[1][1].prompt
    assert [segment.turns for segment in build_segments(messages_setup.turns)] == [(0,), (1,)]


@pytest.mark.needs("tokenizers")
async def test_truncated_reply_is_closed_with_untrained_tokens() -> None:
    family = open_family("qwen3")
    setup = open_session(
        TokenScriptUpstream(scripted_ids(THOUGHT + "It is very cold today.", "Warm."), family),
        family,
        max_tokens=4,
    )
    history = [Message("user", "How is Oslo?")]
    first = await setup.policy.chat(history)
    assert (first.finish, len(first.turn.sampled)) == ("length", 16)
    second = await setup.policy.chat([*history, first.message, Message("user", "And Rome?")])
    check_exact_recording(setup)
    prompt = setup.upstream.calls[1][0].tokens
    if second.turn.prefix:  # extended: the end token was added by us and does not train
        (segment,) = build_segments(setup.turns)
        assert segment.mask.count(1) == 4 + len(second.turn.sampled) // 4
        added = ids_of(prompt[len(first.turn.prompt) + 16 :])
        assert family.stop_token_ids[0] in added[: len(added) // 2]
    else:
        assert len(build_segments(setup.turns)) == 2


# ---- other modes


async def test_plain_mode_records_no_token_ids() -> None:
    setup = open_session(embedded_upstream("own"), record="plain")
    try:
        reply = await setup.policy.chat("What is 2 + 2?")
    finally:
        await setup.upstream.close()
    assert not setup.upstream.calls[0][0].want_tokens
    assert reply.text
    assert reply.turn.sampled_tokens > 0
    assert (reply.turn.prompt, reply.turn.sampled, reply.turn.logprobs) == (b"", b"", b"")
    assert build_segments(setup.turns) == []


async def test_segments_hold_only_turns_of_their_own_role() -> None:
    setup = open_session(embedded_upstream("own"), EmbeddedRenderer())
    try:
        await setup.policy.chat("hello")
        assert [segment.turns for segment in build_segments(setup.turns)] == [(0,)]
        assert build_segments(setup.turns, "judge") == []
    finally:
        await setup.upstream.close()
