"""The `sglang` upstream: requests and replies."""

import asyncio
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import Message, Sampling, Span, Truncation, UpstreamError, floats, ints
from rookery.upstreams import ModelRequest, UpstreamConfig, open_upstream
from rookery.upstreams.format import ReplyContext, ReplyFormatError
from rookery.upstreams.protocol import UNLIMITED
from rookery.upstreams.sglang import Generate, SglangUpstream
from tests.upstreams.engines import DONE, Engine, Play, event
from tests.upstreams.helpers import REQUEST, DeltaLog, of_kind, overdue

GENERATE, CHAT = "/generate", "/v1/chat/completions"
TOKENS = ModelRequest(model="m", tokens=ints([1, 2, 3]))
STOP = {"type": "stop", "matched": 2}


def answer(ids, *, text="", finish=STOP, total=None, logged=None, version="default", **meta):
    logged = [[-i / 8, i, None] for i in ids] if logged is None else logged
    return {
        "text": text,
        "output_ids": list(ids),
        "meta_info": {
            "id": "r",
            "finish_reason": finish,
            "prompt_tokens": 3,
            "weight_version": version,
            "completion_tokens": len(ids) if total is None else total,
            "input_token_logprobs": [],
            "output_token_logprobs": logged,
            "output_token_logprobs_length": len(ids),
            **meta,
        },
    }


def test_upstream_kind_is_opened_by_name():
    assert isinstance(open_upstream(UpstreamConfig(kind="sglang", urls=("http://h:1",))), SglangUpstream)


async def test_token_ids_go_in_and_come_out_with_the_servers_version():
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(GENERATE, Play(answer([7, 8], text="hi", version="12")))
        reply = await up.complete(TOKENS, timeout=60)
        assert (reply.prompt, reply.sampled, reply.version) == (ints([1, 2, 3]), ints([7, 8]), 12)
        assert (reply.logprobs, reply.finish) == (floats([-7 / 8, -1.0]), "stop")
        body = engine.requests[0].body
        assert len(body.pop("rid")) >= 16
        assert body == {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": None},
            "return_logprob": True,
        }


async def test_all_sampling_parameters_are_sent_in_the_right_field():
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        max_tokens=7,
        stop=("x",),
        seed=3,
        extra={"min_p": 0.1, "lora_path": "a"},
    )
    request = msgspec.structs.replace(TOKENS, sampling=sampling, stop_ids=(5,), top_logprobs=2, id="call-1")
    tops = [[[-0.5, 7, None], [-1.0, 9, None]]]
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(GENERATE, Play(answer([7], output_top_logprobs=tops)))
        reply = await up.complete(request, timeout=60)
        assert reply.tops == (((7, -0.5), (9, -1.0)),)
        assert engine.requests[0].body == {
            "input_ids": [1, 2, 3],
            "sampling_params": {
                "temperature": 0.5,
                "top_p": 0.9,
                "max_new_tokens": 7,
                "stop": ["x"],
                "stop_token_ids": [5],
                "sampling_seed": 3,
                "min_p": 0.1,
            },
            "lora_path": "a",
            "return_logprob": True,
            "top_logprobs_num": 2,
            "rid": "call-1",
        }


# ------------------------------------------------------------------------------------------------------ streams

ids = st.lists(st.integers(0, 300) | st.sampled_from([1, 12, 123, 2, 23]), min_size=1, max_size=30)


def events(tokens, cuts, *, incremental, logprobs, tops=False, finish=STOP, versions=None):
    """Return a stream as the server writes it: cumulative, or incremental."""
    bounds = sorted({min(cut, len(tokens)) for cut in cuts} - {0}) or [len(tokens)]
    if bounds[-1] != len(tokens):
        bounds.append(len(tokens))
    begin, written = 0, []
    for end in bounds:
        first = begin if incremental else 0
        part = tokens[first:end]
        meta = {"output_top_logprobs": [[[-0.5, i, None], [-1.5, 1, None]] for i in part]} if tops else {}
        written.append(
            answer(
                part,
                text="".join(chr(97 + i % 26) for i in part),
                finish=finish if end == len(tokens) else None,
                total=end,
                logged=[[-i / 8, i, None] for i in part] if logprobs else None,
                version=versions(end) if versions else "default",
                **meta,
            )
        )
        if not logprobs:
            for name in ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"):
                del written[-1]["meta_info"][name]
        begin = end
    return [event(one) for one in written]


def gathered(stream, *, tops=0, cut=None):
    request = msgspec.structs.replace(TOKENS, top_logprobs=tops, model="m", sampling=Sampling())
    gather = Generate().stream_parser(request)
    on_delta = DeltaLog()
    for one in stream:
        if (delta := gather.feed(one)) is not None:
            on_delta.deltas.append(delta)
    assert not gather.ended()
    return gather.reply(ReplyContext(version=3)), on_delta


@given(ids, st.lists(st.integers(1, 30)), st.booleans(), st.booleans(), st.booleans())
def test_cumulative_and_incremental_streams_give_the_same_reply(tokens, cuts, incremental, logprobs, tops):
    stream = events(tokens, cuts, incremental=incremental, logprobs=logprobs, tops=tops)
    reply, on_delta = gathered(stream, tops=2 if tops else 0)
    on_delta.begins(reply)
    assert (reply.sampled, reply.finish, reply.version) == (ints(tokens), "stop", 3)
    assert reply.logprobs == (floats([-i / 8 for i in tokens]) if logprobs else b"")
    assert reply.message.text == "".join(chr(97 + i % 26) for i in tokens)
    assert reply.tops == (tuple(((i, -0.5), (1, -1.5)) for i in tokens) if tops else ())


@given(ids, st.lists(st.integers(1, 30)), st.booleans(), st.integers(0, 30))
def test_version_changes_within_a_stream_are_reported_by_token(tokens, cuts, incremental, at):
    stream = events(
        tokens, cuts, incremental=incremental, logprobs=True, versions=lambda end: "4" if end <= at else "5"
    )
    reply, _ = gathered(stream)
    spans = reply.spans or (Span(0, len(tokens), reply.version),)
    assert spans[0].start == 0
    assert spans[-1].end == len(tokens)
    assert all(one.end == two.start and one.version < two.version for one, two in pairwise(spans))
    assert reply.version == spans[0].version
    for span in spans:
        assert (span.end <= at) == (span.version == 4)


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("sent", [0, 1, 3, 5])
def test_abort_keeps_the_sampled_tokens_whatever_the_finish_reason(incremental, sent):
    """The last event of a call that was aborted in the queue has all logprobs and only the last ID."""
    tokens = [3, 1, 4, 1, 5]
    stream = events(tokens[:sent], [1, 2], incremental=incremental, logprobs=True, finish=None) if sent else []
    last = answer(
        tokens[-1:],
        total=5,
        finish={"type": "abort", "message": "Abort"},
        logged=[[-i / 8, i, None] for i in tokens],
    )
    reply, on_delta = gathered([*stream, event(last)])
    on_delta.begins(reply)
    assert (reply.finish, reply.sampled) == ("abort", ints(tokens))
    assert reply.logprobs == floats([-i / 8 for i in tokens])


@pytest.mark.parametrize("incremental", [True, False])
def test_abort_of_a_running_request_is_a_normal_event(incremental):
    stream = events(
        [3, 1, 4], [1, 2], incremental=incremental, logprobs=True, finish={"type": "abort", "message": "x"}
    )
    reply, on_delta = gathered(stream)
    on_delta.begins(reply)
    assert (reply.finish, reply.sampled) == ("abort", ints([3, 1, 4]))


@pytest.mark.parametrize(
    "bad",
    [
        answer([1, 2], total=4, finish=None),
        answer([1], logged=[[-0.5, 2, None]]),
        answer([1], logged=[]),
        answer([-1]),
        answer([1], finish={"type": "why"}),
        {"text": "x"},
        {"meta_info": 4},
    ],
)
def test_event_that_cannot_be_parsed_is_refused(bad):
    good = events([9], [], incremental=False, logprobs=True, finish=None)
    with pytest.raises(ReplyFormatError):
        gathered([*good, event(bad)])


async def test_cost_of_an_event_does_not_grow_with_the_stream():
    """Only the new part of a growing list is decoded; the test counts what reaches the decoder."""
    tokens = list(range(600))
    stream = events(tokens, range(600), incremental=False, logprobs=True)
    lengths = []
    import rookery.upstreams.sglang as module

    original = module.decode_entries
    module.decode_entries = lambda text: lengths.append(len(text)) or original(text)
    try:
        reply, _ = gathered(stream)
    finally:
        module.decode_entries = original
    assert reply.sampled == ints(tokens)
    assert max(lengths) < 100


async def test_stream_over_http():
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(GENERATE, Play(events=[*events([5, 6, 7], [1, 2], incremental=False, logprobs=True), DONE]))
        on_delta = DeltaLog()
        reply = await up.complete(TOKENS, timeout=60, on_delta=on_delta)
        on_delta.begins(reply)
        assert reply.sampled == ints([5, 6, 7])


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ({"error": {"message": "bad input", "code": 400}}, "upstream.rejected"),
        (answer([], finish={"type": "abort", "message": "out of memory", "status_code": 500}), "upstream.error"),
        (answer([], finish={"type": "abort", "message": "busy", "status_code": 503}), "upstream.overloaded"),
    ],
)
async def test_error_in_a_stream_is_raised(last, cause):
    async with Engine() as engine, of_kind("sglang", engine.url, retries=0) as up:
        engine.on(GENERATE, Play(events=[event(last), DONE]))
        with pytest.raises(UpstreamError) as caught:
            await up.complete(TOKENS, timeout=60, on_delta=DeltaLog())
        assert caught.value.code == cause


async def test_full_context_truncates():
    message = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(GENERATE, Play({"error": {"message": message}}, status=400))
        with pytest.raises(Truncation):
            await up.complete(TOKENS, timeout=60)


# --------------------------------------------------------------------------------------------------------- chat


async def test_chat_whose_tokens_are_wanted_is_not_streamed_and_delivered_in_one_piece():
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi", "reasoning_content": "hm", "tool_calls": None},
        "logprobs": {"content": [{"token": "hi", "logprob": -0.5, "bytes": [1], "top_logprobs": []}]},
        "finish_reason": "stop",
        "prompt_token_ids": [1, 2],
        "response_token_ids": [7],
    }
    whole = {"choices": [choice], "metadata": {"weight_version": "9"}, "usage": {"prompt_tokens": 2}}
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(CHAT, Play(whole))
        on_delta = DeltaLog()
        reply = await up.complete(REQUEST, timeout=60, on_delta=on_delta)
        on_delta.begins(reply)
        assert len(on_delta.deltas) == 1
        assert (reply.prompt, reply.sampled, reply.logprobs) == (ints([1, 2]), ints([7]), floats([-0.5]))
        assert (reply.version, reply.message) == (9, Message("assistant", "hi", reasoning="hm"))
        body = engine.requests[0].body
        assert "stream" not in body
        assert (body["return_token_ids"], body["return_prompt_token_ids"]) == (True, True)


async def test_chat_whose_tokens_are_not_wanted_is_streamed():
    pieces = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in "ab"]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(CHAT, Play(events=[*map(event, pieces), event(last), DONE]))
        request = ModelRequest(model="m", messages=REQUEST.messages, want_tokens=False)
        reply = await up.complete(request, timeout=60, on_delta=DeltaLog())
        assert reply.message.text == "ab"
        body = engine.requests[0].body
        assert body["stream"] is True
        assert not {"return_token_ids", "return_prompt_token_ids", "logprobs"} & set(body)


# ----------------------------------------------------------------------------------------------- control requests


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("how", ["cancelled", "timeout", "on_delta"])
async def test_cancelled_call_is_aborted_by_its_id(streamed, how):
    async def on_delta(_: object) -> None:
        if how == "on_delta":
            raise ValueError("no more")

    stream = events([5, 6, 7], [1, 2], incremental=False, logprobs=True)
    play = Play(events=stream, stall=asyncio.Event()) if streamed else Play(answer([5]), hold=asyncio.Event())
    if how == "on_delta" and not streamed:
        return
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(GENERATE, play)
        engine.on("/abort_request", Play({}))
        call = asyncio.create_task(up.complete(TOKENS, timeout=60, on_delta=on_delta if streamed else None))
        await engine.until(lambda: engine.requests_to(GENERATE))
        if how == "cancelled":
            call.cancel()
        elif how == "timeout":
            overdue(up)
        with pytest.raises((asyncio.CancelledError, UpstreamError, ValueError)):
            await call
        await engine.until(lambda: engine.requests_to("/abort_request"))
        assert engine.requests_to("/abort_request")[0].body == {"rid": engine.requests_to(GENERATE)[0].body["rid"]}


@pytest.mark.parametrize("given", ["", "c"])
async def test_id_of_a_retry_does_not_begin_with_an_earlier_id(given):
    async with Engine() as engine, of_kind("sglang", engine.url, retries=2) as up:
        busy = Play({"error": {"message": "busy"}}, status=503)
        engine.on(GENERATE, busy, busy, Play(answer([7])))
        await up.complete(msgspec.structs.replace(TOKENS, id=given), timeout=60)
        ids = [request.body["rid"] for request in engine.requests_to(GENERATE)]
    assert len(ids) == 3
    assert not any(late.startswith(early) for at, early in enumerate(ids) for late in ids[at + 1 :])
    assert all(len(one) >= 16 for one in ids) if not given else ids == ["c", "1.c", "2.c"]


async def test_finished_call_is_not_aborted_and_a_retry_has_another_id():
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(GENERATE, Play({}, cut=0), Play(answer([7])))
        await up.complete(msgspec.structs.replace(TOKENS, id="c"), timeout=60)
        assert [request.body["rid"] for request in engine.requests] == ["c", "1.c"]
        assert not engine.requests_to("/abort_request")
        assert not up.maintenance.tasks or all(
            task.done() or "_update_concurrency_limit" in repr(task) for task in up.maintenance.tasks
        )


async def test_failed_abort_does_not_fail_a_call():
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(GENERATE, Play(answer([5]), hold=asyncio.Event()))
        engine.on("/abort_request", Play({}, cut=3))
        call = asyncio.create_task(up.complete(TOKENS, timeout=60))
        await engine.until(lambda: engine.requests_to(GENERATE))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.gather(*up.maintenance.tasks)


async def test_freezing_and_thawing():
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on("/pause_generation", Play({"status": "ok"}))
        engine.on("/continue_generation", Play({"status": "ok"}))
        assert await up.freeze("keep", timeout=60)
        assert await up.freeze("abort", timeout=60)
        await up.thaw(timeout=60)
        assert [(r.path, r.body) for r in engine.requests] == [
            ("/pause_generation", {"mode": "retract"}),
            ("/pause_generation", {"mode": "abort"}),
            ("/continue_generation", {}),
        ]


@pytest.mark.parametrize(
    ("info", "limit"),
    [
        ({"max_running_requests": 64, "internal_states": []}, 64),
        (
            {"max_running_requests": None, "internal_states": [{"effective_max_running_requests_per_dp": 24}] * 2},
            48,
        ),
        ({"max_running_requests": None}, UNLIMITED),
        ({"max_running_requests": -5}, UNLIMITED),
        ([], UNLIMITED),
    ],
)
@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_concurrency_limit_is_read_from_the_engine(path, info, limit):
    async with Engine() as engine, of_kind("sglang", engine.url) as up:
        engine.on(path, Play(info))
        engine.on(GENERATE, Play(answer([7])))
        await up.complete(TOKENS, timeout=60)
        await asyncio.gather(*up.maintenance.tasks)
        assert up.replicas[0].limit == limit
