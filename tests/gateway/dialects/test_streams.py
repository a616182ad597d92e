"""For any split of a reply, the client libraries join the stream to the same content as the whole response."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from anthropic import Anthropic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI

from rookery.core import Finish, Message, ToolCall, UpstreamError
from rookery.gateway.dialects.shared import CallEvent, CallSequencer
from rookery.gateway.reply_reader import drop_incomplete_call
from rookery.upstreams.protocol import CallDelta, Delta
from tests.gateway.kit import ADMIN_KEY, InProcessGateway, run_shard_in_thread
from tests.gateway.scripted_upstream import ANY_SPEED, ScriptedReply, ScriptedUpstream

FEW = settings(ANY_SPEED, max_examples=15, suppress_health_check=list(HealthCheck))
words = st.text('ab"\\\n\u2028é😀{}', min_size=1, max_size=6)
arguments = st.sampled_from(
    ["", "{}", '{"a": 1.50,  "b": "é\\n"}', '{"a":', "[1]", '{"a":1,"a":2}', '{"a":"\\ud800"}']
)


@dataclass
class GeneratedReply:
    """A reply and its deltas."""

    message: Message
    finish: Finish
    deltas: tuple[Delta, ...] = ()


@st.composite
def replies(draw: Any) -> GeneratedReply:
    calls: list[ToolCall] = []
    pieces: list[Delta] = []
    text, thought = [""], [""]
    for step in draw(st.lists(st.sampled_from(["text", "text", "thought", "call", "nothing"]), max_size=8)):
        if step == "text":
            text.append(draw(words))
            pieces.append(Delta(content=text[-1]))
        elif step == "thought":
            thought.append(draw(words))
            pieces.append(Delta(reasoning=thought[-1]))
        elif step == "nothing":
            pieces.append(Delta())
        else:
            call = ToolCall(f"call_{len(calls)}", draw(st.sampled_from(["look", "stop"])), draw(arguments))
            at = draw(st.integers(0, len(call.arguments)))
            index = len(calls)
            silent = call.arguments == "{}" and draw(st.booleans())  # engines may send no arguments at all
            events = "" if silent else call.arguments
            pieces.append(Delta(tool_calls=(CallDelta(index, call.id, call.name, events[:at]),)))
            pieces += [Delta(tool_calls=(CallDelta(index, arguments=one),)) for one in events[at:]]
            calls.append(call)
    response_content = "".join(text)
    message = Message(
        "assistant",
        response_content if response_content or not calls else None,
        tuple(calls),
        reasoning="".join(thought) or None,
    )
    finish: Finish = draw(st.sampled_from(["stop", "length"]))
    return GeneratedReply(message, "tool_calls" if calls and finish == "stop" else finish, tuple(pieces))


@dataclass
class StreamSetup:
    gateway: InProcessGateway
    upstream: ScriptedUpstream
    base: str = ""
    secret: str = ""
    plays: list[ScriptedReply] = field(default_factory=list)

    def play(self, answer: GeneratedReply) -> None:
        """Script the same reply for the whole and for the streamed call."""
        play = ScriptedReply(
            "", deltas=answer.deltas, reply_fields={"message": answer.message, "finish": answer.finish}
        )
        self.upstream.then(play, play)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamSetup]:
    upstreams: list[ScriptedUpstream] = []

    def upstream() -> ScriptedUpstream:
        upstreams.append(ScriptedUpstream())
        return upstreams[0]

    with run_shard_in_thread(tmp_path_factory.mktemp("gateway"), upstream) as gateway:
        opened = requests.post(
            f"{gateway.url}/rollouts",
            json={"id": "one"},
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            timeout=60,
        ).json()
        yield StreamSetup(gateway, upstreams[0], f"{gateway.url}/v1/rollouts/one", opened["secret"])


def message_content(message: Any) -> Any:
    """Return the content of an Anthropic message, independent of its division into blocks."""
    blocks = message.content
    return (
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        "".join(block.text for block in blocks if block.type == "text"),
        [(block.id, block.name, block.input) for block in blocks if block.type == "tool_use"],
        (message.stop_reason, message.stop_sequence, message.usage.output_tokens),
        bool([block for block in blocks if block.type != "thinking"]),
    )


def test_anthropic_library_joins_the_stream_to_the_whole_message(setup: StreamSetup) -> None:
    with Anthropic(base_url=setup.base, api_key=setup.secret) as client:

        @FEW
        @given(replies())
        def play(answer: GeneratedReply) -> None:
            setup.play(answer)
            params: Any = {
                "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}],
                "thinking": {"type": "adaptive"},
            }  # fmt: skip
            whole = client.messages.create(**params)
            with client.messages.stream(**params) as stream:
                final = stream.get_final_message()
            assert message_content(final) == message_content(whole)
            assert message_content(whole)[:2] == (answer.message.reasoning or "", answer.message.text)

        play()


def response_content(response: Any) -> Any:
    """Return the content of a response, independent of its division into items."""
    items = response.output
    return (
        "".join(part.text for item in items if item.type == "reasoning" for part in item.content or ()),
        "".join(part.text for item in items if item.type == "message" for part in item.content),
        [(item.call_id, item.name, item.arguments) for item in items if item.type == "function_call"],
        (response.status, response.incomplete_details, response.usage),
        any(item.type != "reasoning" for item in items),
    )


def test_openai_library_joins_the_stream_to_the_whole_response(setup: StreamSetup) -> None:
    with OpenAI(base_url=setup.base, api_key=setup.secret) as client:

        @FEW
        @given(replies())
        def play(answer: GeneratedReply) -> None:
            setup.play(answer)
            whole = client.responses.create(model="m", input="x")
            final: Any = None
            with client.responses.stream(model="m", input="x") as stream:
                for sequence, event in enumerate(stream):
                    assert event.sequence_number == sequence
                    if event.type in ("response.completed", "response.incomplete"):
                        final = event.response
            assert response_content(final) == response_content(whole)
            message = drop_incomplete_call(answer.message, answer.finish)
            calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
            assert response_content(whole)[:3] == (message.reasoning or "", message.text, calls)

        play()


# ---- sequences of tool calls


def test_delta_of_an_earlier_call_raises_upstream_error() -> None:
    calls = CallSequencer()
    _ = list(calls.feed(CallDelta(0, "a", "look", "{}")))
    _ = list(calls.feed(CallDelta(1, "b", "look", "{")))
    with pytest.raises(UpstreamError) as caught:
        _ = list(calls.feed(CallDelta(0, arguments="x")))
    assert caught.value.code == "upstream.protocol"


def test_call_without_a_name_is_withheld_until_the_end() -> None:
    calls = CallSequencer()
    events = [
        *calls.feed(CallDelta(0, "a")),
        *calls.feed(CallDelta(0, name="look")),
        *calls.feed(CallDelta(0, arguments="{}")),
    ]
    assert events == []
    assert [one.kind for one in calls.finish((ToolCall("a", "look", "{}"),))] == ["begin", "more", "end"]


@settings(ANY_SPEED)
@given(replies())
def test_every_call_is_sent_once_and_complete(answer: GeneratedReply) -> None:
    calls = CallSequencer()
    events: list[CallEvent] = [
        one for piece in answer.deltas for call in piece.tool_calls for one in calls.feed(call)
    ]
    events += calls.finish(answer.message.tool_calls)
    ends = [ToolCall(one.id, one.name, one.text) for one in events if one.kind == "end"]
    assert tuple(ends) == answer.message.tool_calls
    for at, call in enumerate(answer.message.tool_calls):
        call_events = [one for one in events if one.at == at]
        assert [call_events[0].kind, call_events[-1].kind] == ["begin", "end"]
        assert "".join(one.text for one in call_events[1:-1]) == call.arguments
    assert [one.at for one in events] == sorted(one.at for one in events)
