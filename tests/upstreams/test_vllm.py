"""The `vllm` upstream: requests and replies."""

import asyncio

import msgspec
import pytest

from rookery.core import Message, Sampling, Truncation, UpstreamError, floats, ints
from rookery.upstreams import ModelRequest, UpstreamConfig, open_upstream
from rookery.upstreams.protocol import UNLIMITED
from rookery.upstreams.vllm import VllmUpstream
from tests.upstreams.engines import DONE, Engine, Play, event
from tests.upstreams.helpers import DeltaLog, of_kind

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
TOKENS = ModelRequest(model="m", tokens=ints([1, 2, 3]))


def token(number, logprob, named=False):
    """A token as vLLM 0.32 writes it, or with its ID as its name, as earlier versions do."""
    identity = {"token": f"token_id:{number}", "bytes": None} if named else {"token_id": number, "rank": 1}
    return {**identity, "logprob": logprob}


def logprobs(*values, tops=(), named=False):
    top = [token(number, logprob, named) for number, logprob in tops]
    return {"content": [{**token(9, logprob, named), "top_logprobs": top} for logprob in values]}


def answer(*ids, finish="stop", **more):
    choice = {"index": 0, "finish_reason": finish, "token_ids": list(ids), "routed_experts": None, **more}
    choice.setdefault("logprobs", logprobs(*(-i / 8 for i in ids)))
    return {"request_id": "generate-tokens-1", "choices": [choice], "usage": None, "prompt_logprobs": None}


def test_upstream_kind_is_opened_by_name():
    up = open_upstream(UpstreamConfig(kind="vllm", urls=("http://h:1",)))
    assert isinstance(up, VllmUpstream)


async def test_token_ids_go_in_and_come_out():
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on(GENERATE, Play(answer(7, 8)))
        reply = await up.complete(TOKENS, timeout=60)
        assert (reply.prompt, reply.sampled, reply.logprobs) == (
            ints([1, 2, 3]),
            ints([7, 8]),
            floats([-7 / 8, -1.0]),
        )
        assert (reply.finish, reply.prompt_tokens, reply.sampled_tokens) == ("stop", 3, 2)
        assert engine.requests[0].body == {
            "model": "m",
            "token_ids": [1, 2, 3],
            "sampling_params": {"detokenize": False, "logprobs": 0},
        }


@pytest.mark.parametrize("named", [False, True])
async def test_all_sampling_parameters_are_sent_in_the_right_field(named):
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        max_tokens=7,
        stop=("x",),
        seed=3,
        extra={"min_p": 0.1, "cache_salt": "s", "priority": 2},
    )
    request = msgspec.structs.replace(TOKENS, sampling=sampling, stop_ids=(5, 6), top_logprobs=2, id="call-1")
    tops = ((7, -0.5), (9, -1.0))
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on(GENERATE, Play(answer(7, logprobs=logprobs(-0.5, tops=tops, named=named))))
        reply = await up.complete(request, timeout=60)
        assert (reply.tops, reply.logprob_content) == ((tops,), None)
        assert engine.requests[0].body == {
            "model": "m",
            "token_ids": [1, 2, 3],
            "sampling_params": {
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 4,
                "max_tokens": 7,
                "stop": ["x"],
                "seed": 3,
                "min_p": 0.1,
                "stop_token_ids": [5, 6],
                "logprobs": 2,
            },
            "cache_salt": "s",
            "priority": 2,
            "request_id": "call-1",
        }


async def test_stream_of_tokens_is_delivered_and_comes_back():
    stream = [event(answer(7, finish=None)), event(answer(8, 9, finish=None)), event(answer(4, finish="length"))]
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on(GENERATE, Play(events=[*stream, DONE]))
        on_delta = DeltaLog()
        reply = await up.complete(TOKENS, timeout=60, on_delta=on_delta)
        on_delta.begins(reply)
        assert (reply.sampled, reply.finish) == (ints([7, 8, 9, 4]), "length")
        assert engine.requests[0].body["stream"] is True


async def test_aborted_stream_ends_without_a_finish_and_is_not_a_complete_reply():
    stream = [event(answer(7, finish=None)), event(answer(8, finish=None))]
    async with Engine() as engine, of_kind("vllm", engine.url, retries=0) as up:
        engine.on(GENERATE, Play(events=[*stream, DONE]), Play(events=stream))
        reply = await up.complete(TOKENS, timeout=60, on_delta=DeltaLog())
        assert (reply.finish, reply.sampled) == ("abort", ints([7, 8]))
        with pytest.raises(UpstreamError) as caught:  # not even the end of the stream was announced
            await up.complete(TOKENS, timeout=60, on_delta=DeltaLog())
        assert caught.value.code == "upstream.cut"


async def test_missing_token_endpoint_is_detected_once():
    old = {"text": "hi", "finish_reason": "stop", "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}
    async with Engine() as engine, Engine() as newer, of_kind("vllm", engine.url, newer.url) as up:
        engine.on(COMPLETIONS, Play({"choices": [old]}))
        newer.on(GENERATE, Play(answer(7, logprobs=logprobs(-0.5))))
        for _ in range(6):
            reply = await up.complete(TOKENS, timeout=60)
            assert (reply.sampled, reply.logprobs, reply.prompt) == (ints([7]), floats([-0.5]), ints([1, 2, 3]))
        assert len(engine.requests_to(GENERATE)) == 1
        assert len(engine.requests_to(COMPLETIONS)) == 3
        assert len(newer.requests_to(GENERATE)) == 3
        sent = engine.requests_to(COMPLETIONS)[0].body
        assert (sent["prompt"], sent["max_tokens"], sent["return_token_ids"]) == ([1, 2, 3], None, True)


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_completions_stream_as_well(status):
    def piece(ids, finish=None):
        values = {"token_logprobs": [-0.5] * len(ids), "top_logprobs": [{"token_id:4": -0.25}] * len(ids)}
        return event({"choices": [{"text": "ab", "token_ids": ids, "logprobs": values, "finish_reason": finish}]})

    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on(GENERATE, Play({"detail": "no"}, status=status))
        engine.on(COMPLETIONS, Play(events=[piece([7]), piece([8, 9], "stop"), DONE]))
        on_delta = DeltaLog()
        reply = await up.complete(msgspec.structs.replace(TOKENS, top_logprobs=1), timeout=60, on_delta=on_delta)
        on_delta.begins(reply)
        assert (reply.sampled, reply.message.text) == (ints([7, 8, 9]), "abab")
        assert reply.tops == (((4, -0.25),),) * 3


async def test_unknown_model_is_not_remembered_as_a_missing_endpoint():
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        not_found = {"error": {"message": "The model `m` does not exist.", "code": 404}}
        engine.on(GENERATE, Play(not_found, status=404))
        engine.on(COMPLETIONS, Play(not_found, status=404))
        with pytest.raises(UpstreamError) as caught:
            await up.complete(TOKENS, timeout=60)
        assert caught.value.code == "upstream.rejected"
        engine.on(GENERATE, Play(answer(7)))
        await up.complete(TOKENS, timeout=60)
        assert len(engine.requests_to(GENERATE)) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"choices": []},
        {"choices": [{"finish_reason": "stop"}]},
        answer(7, finish=None),
        answer(7, finish="why"),
        answer(7, logprobs=logprobs()),
        answer(7, 8, logprobs=logprobs(-1.0)),
        answer(-1),
        answer(2**31),
        {"error": {"message": "x"}},
        [],
    ],
)
async def test_reply_that_cannot_be_parsed_is_refused(body):
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on(GENERATE, Play(body))
        with pytest.raises(UpstreamError) as caught:
            await up.complete(TOKENS, timeout=60)
        assert caught.value.code == "upstream.protocol"


async def test_full_context_truncates():
    message = "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens."
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on(GENERATE, Play({"error": {"message": message, "code": 400}}, status=400))
        with pytest.raises(Truncation):
            await up.complete(TOKENS, timeout=60)


async def test_messages_go_through_chat_as_messages_or_as_json():
    raw = msgspec.Raw(b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}],"odd":1.50}')
    request = ModelRequest(model="m", messages=(Message("system", "s"), raw), id="c")
    whole = {"message": {"content": "hi"}, "finish_reason": "stop", "token_ids": [4], "logprobs": None}
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on(CHAT, Play({"choices": [whole], "prompt_token_ids": [1, 2]}))
        reply = await up.complete(request, timeout=60)
        assert (reply.prompt, reply.sampled) == (ints([1, 2]), ints([4]))
        body = engine.requests[0].body
        assert body["messages"][1] == {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "x"}}],
            "odd": 1.5,
        }
        assert (body["return_token_ids"], body["request_id"]) == (True, "c")


# ----------------------------------------------------------------------------------------------- control requests


async def test_freezing_reaches_every_replica():
    async with Engine() as one, Engine() as two, of_kind("vllm", one.url, two.url) as up:
        for engine in (one, two):
            engine.on("/pause", Play({"status": "paused"}))
            engine.on("/resume", Play({"status": "resumed"}))
        assert await up.freeze("keep", timeout=60)
        assert await up.freeze("abort", timeout=60)
        assert not await up.freeze("drain", timeout=60)
        await up.thaw(timeout=60)
        for engine in (one, two):
            assert [r.path for r in engine.requests] == ["/pause?mode=keep", "/pause?mode=abort", "/resume"]
            assert {r.method for r in engine.requests} == {"POST"}


async def test_server_that_cannot_be_frozen_says_so_and_one_that_fails_raises():
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        assert not await up.freeze("abort", timeout=60)
        await up.thaw(timeout=60)
        engine.on("/pause", Play({"error": "broken"}, status=500))
        with pytest.raises(UpstreamError):
            await up.freeze("keep", timeout=60)


async def test_server_that_is_gone_does_not_keep_others_from_freezing():
    async with Engine() as engine, Engine() as stopped, of_kind("vllm", engine.url, stopped.url) as up:
        await stopped.stop()
        engine.on("/pause", Play({"status": "paused"}))
        assert await up.freeze("abort", timeout=60)


async def test_frozen_time_is_not_part_of_a_deadline():
    hold = asyncio.Event()
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on("/pause", Play({"status": "paused"}))
        engine.on("/resume", Play({"status": "resumed"}))
        engine.on(GENERATE, Play(answer(7), hold=hold))
        call = asyncio.create_task(up.complete(TOKENS, timeout=60))
        await engine.until(lambda: engine.requests_to(GENERATE))
        assert await up.freeze("keep", timeout=60)
        (deadline,) = up.replicas[0].deadlines
        assert deadline.when() is None
        await up.thaw(timeout=60)
        left = deadline.when() - asyncio.get_running_loop().time()
        assert 0 < left <= 60
        hold.set()
        await call


async def test_concurrency_limit_is_read_from_the_engine():
    info = {
        "vllm_config": {"scheduler_config": {"max_num_seqs": 48}, "parallel_config": {"data_parallel_size": 2}},
        "vllm_env": {},
    }
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on("/server_info", Play(info))
        engine.on(GENERATE, Play(answer(7)))
        assert up.replicas[0].limit == UNLIMITED
        await up.complete(TOKENS, timeout=60)
        await asyncio.gather(*up.maintenance.tasks)
        assert up.replicas[0].limit == 96
        assert engine.requests_to("/server_info?config_format=json")[0].method == "GET"
        for _ in range(3):
            await up.complete(TOKENS, timeout=60)
        assert len(engine.requests_to("/server_info?config_format=json")) == 1, (
            "the limit is not requested again so soon"
        )


async def test_configured_concurrency_is_not_requested_from_the_engine():
    async with Engine() as engine, of_kind("vllm", engine.url, concurrency=3) as up:
        engine.on(GENERATE, Play(answer(7)))
        await up.complete(TOKENS, timeout=60)
        assert not up.maintenance.tasks
        assert up.replicas[0].limit == 3


@pytest.mark.parametrize(
    "play", [Play({}, status=404), Play({"vllm_config": "text"}), Play(b"?"), Play({}, cut=5)]
)
async def test_without_a_reported_size_the_replica_is_not_limited(play):
    async with Engine() as engine, of_kind("vllm", engine.url) as up:
        engine.on("/server_info", play)
        engine.on(GENERATE, Play(answer(7)))
        await up.complete(TOKENS, timeout=60)
        await asyncio.gather(*up.maintenance.tasks)
        assert up.replicas[0].limit == UNLIMITED
