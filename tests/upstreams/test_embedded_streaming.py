"""The text of a reply that can be sent while it is sampled."""

from collections.abc import Iterable

from hypothesis import example, given
from hypothesis import strategies as st

from rookery.core import Message, ToolCall
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.streaming import DecodedDelta, DeltaDecoder, completion_text, count_withheld

TEXTS = st.text(alphabet='ab{}" \u00e9\u20ac\U0001f426', max_size=12).map(lambda text: list(text.encode()))
PIECES = st.one_of(
    TEXTS,
    st.just([chat.CALL]),
    st.just([chat.CALL, *b'python{"']),
    st.lists(st.integers(0, chat.VOCAB - 1), max_size=4),
    st.lists(st.integers(128, 255), max_size=4),
)
TOKENS = st.lists(PIECES, min_size=1, max_size=8).map(
    lambda pieces: [token for piece in pieces for token in piece]
)
MAX_STOPS = st.lists(st.text(alphabet='ab{"\u20ac', min_size=1, max_size=4), max_size=3).map(
    lambda texts: tuple(text.encode() for text in texts)
)


def drawn(tokens: Iterable[int], stop: tuple[bytes, ...]) -> SamplingJob:
    """Return a job that has sampled these tokens, up to its end."""
    sampled = list(tokens)
    job = SamplingJob([0], max_tokens=len(sampled), seed=0, ends=chat.ENDS, stop=stop)
    for token in sampled:
        if job.take(token, -1.0):
            break
    return job


def joined(deltas: Iterable[DecodedDelta]) -> tuple[str, list[ToolCall]]:
    text = ""
    calls: list[ToolCall] = []
    for delta in deltas:
        text += delta.text
        assert len({call.index for call in delta.calls}) == len(delta.calls)
        for call in delta.calls:
            if call.id:
                assert call.index == len(calls)
                calls.append(ToolCall(call.id, call.name, call.arguments))
            else:
                old = calls[call.index]
                calls[call.index] = ToolCall(old.id, old.name, old.arguments + call.arguments)
    return text, calls


@given(TOKENS.filter(bool), MAX_STOPS, st.sampled_from(["", "<call>", "<call>python"]), st.data())
def test_joined_deltas_are_the_unstreamed_reply(
    tokens: list[int], stop: tuple[bytes, ...], begun: str, data: st.DataObject
) -> None:
    job = drawn(tokens, stop)
    looks = data.draw(st.lists(st.integers(0, len(job.tokens)), max_size=10).map(sorted))
    whole = chat.answer(job.tokens[: job.text_tokens], begun, at=5)
    deltas = DeltaDecoder(prefix=begun, prompt_length=5, stop=job.stop)
    parts = [deltas.feed(job.tokens, count) for count in looks]
    parts.append(deltas.finish(job.tokens, job.text_tokens))
    text, calls = joined(parts)
    assert Message("assistant", text if text or not calls else None, tuple(calls)) == whole
    assert deltas.calls == len(calls)


@given(TOKENS.filter(bool), MAX_STOPS, st.data())
def test_streamed_completion_has_the_same_text(
    tokens: list[int], stop: tuple[bytes, ...], data: st.DataObject
) -> None:
    job = drawn(tokens, stop)
    looks = data.draw(st.lists(st.integers(0, len(job.tokens)), max_size=10).map(sorted))
    deltas = DeltaDecoder(stop=job.stop, calls_as_text=True)
    text = "".join(deltas.feed(job.tokens, count).text for count in looks)
    text += deltas.finish(job.tokens, job.text_tokens).text
    assert text == completion_text(job.tokens[: job.text_tokens])


@given(TOKENS, MAX_STOPS)
@example(list(b"abab"), (b"abac",))
def test_only_a_possible_stop_string_is_withheld(tokens: list[int], stop: tuple[bytes, ...]) -> None:
    def begins(tail: list[int]) -> bool:
        return all(token < 256 for token in tail) and any(text.startswith(bytes(tail)) for text in stop)

    longest = max((size for size in range(1, len(tokens) + 1) if begins(tokens[-size:])), default=0)
    assert count_withheld(tokens, len(tokens), stop) == longest


def test_character_is_delivered_when_complete() -> None:
    tokens = list("a\u20acb".encode())
    deltas = DeltaDecoder()
    assert [deltas.feed(tokens, count).text for count in range(1, 6)] == ["a", "", "", "\u20ac", "b"]


def test_tool_call_starts_with_its_name() -> None:
    tokens = [*b"so ", chat.CALL, *b'add{"a":1}', chat.CALL, *b"stop", chat.END]
    deltas = DeltaDecoder(prompt_length=7)
    parts = [deltas.feed(tokens, count) for count in range(1, len(tokens) + 1)]
    parts.append(deltas.finish(tokens, len(tokens) - 1))
    pieces = [call for delta in parts for call in delta.calls]
    assert (pieces[0].id, pieces[0].name, pieces[0].arguments) == ("call_7_0", "add", "{")
    assert all(not piece.id and not piece.name for piece in pieces[1:-1])
    assert "".join(piece.arguments for piece in pieces[:-1]) == '{"a":1}'
    assert (pieces[-1].index, pieces[-1].name, pieces[-1].arguments) == (1, "stop", "")


def test_completions_write_a_call_as_text() -> None:
    assert (
        completion_text([*b"so ", chat.CALL, *b'add{"a":1}', 270, chat.END, *b"no more"])
        == 'so <call>add{"a":1}\ufffd'
    )
