"""Pauses, aborts and weight updates of the stand-ins, as in the scheduler of SGLang."""

import asyncio

import pytest

from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.sampler import TokenChoice
from rookery.upstreams.embedded.weights import Weights
from rookery.upstreams.sampling_thread import PendingSequence, handle_events
from tests.engine_standins import StandinServer, small_weights, standin
from tests.engine_standins.batch import StandinBatch, StandinJob
from tests.waiting import wait_until

PROMPT = [256, 72, 105, 32, 116, 104, 101, 114, 101]


class PreparedRequest:
    """One request to `/generate`, and its reply."""

    def __init__(self, server: StandinServer, name: str, *, most: int = 40) -> None:
        self._server = server
        params = {"temperature": 0, "max_new_tokens": most, "ignore_eos": True}
        self.body = {"input_ids": PROMPT, "sampling_params": params, "rid": name, "return_logprob": True}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> tuple[list[int], list[float], str]:
        status, reply = await self._server.post("/generate", self.body)
        assert status == 200, reply
        meta = reply["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        return reply["output_ids"], logprobs, meta["finish_reason"]["type"]

    async def answer(self) -> tuple[list[int], list[float], str]:
        async with asyncio.timeout(60):
            return await self.task


async def pause(server: StandinServer, mode: str) -> None:
    status, reply = await server.post("/pause_generation", {"mode": mode})
    assert status == 200, reply


async def resume(server: StandinServer) -> None:
    assert (await server.post("/continue_generation", {}))[0] == 200


async def update(server: StandinServer, path: str) -> None:
    status, reply = await server.post("/update_weights_from_disk", {"model_path": path, "flush_cache": False})
    assert status == 200, reply


def llama(seed: int) -> Llama:
    return Llama(Weights.load(small_weights(seed, seed)))


def drawn(batch: StandinBatch, job: StandinJob) -> StandinJob:
    batch.add(job)
    while not job.finish:
        batch.step()
    return job


def greedy(prompt: list[int], most: int) -> StandinJob:
    return StandinJob(prompt, max_tokens=most, seed=0, choice=TokenChoice(temperature=0.0))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_kept_sequence_continues_with_the_new_weights(mode: str) -> None:
    async with standin("sglang", weights=small_weights(1, 1)) as server:
        with server.freezing(10):
            request = PreparedRequest(server, "a")
            await server.frozen(10)
        await pause(server, mode)
        await update(server, str(small_weights(2, 2)))
        assert not request.task.done()
        await resume(server)
        tokens, logprobs, finish = await request.answer()
    assert finish == "length"
    old = StandinBatch(llama(1))
    before = greedy(PROMPT, 40)
    old.add(before)
    for _ in range(10):
        old.step()
    assert tokens[:10] == before.tokens
    anew = drawn(StandinBatch(llama(2)), greedy([*PROMPT, *tokens[:10]], 30))
    if mode == "retract":
        assert tokens[10:] == anew.tokens
        assert logprobs[10:] == pytest.approx(anew.logprobs, abs=1e-4)
        return
    old.replace(llama(2))
    while not before.finish:
        old.step()
    assert tokens == before.tokens
    assert logprobs == pytest.approx(before.logprobs, abs=1e-4)
    assert logprobs[10] != pytest.approx(anew.logprobs[0], abs=1e-4), "the old keys and values have no effect"


async def test_kept_sequence_without_new_weights_is_unchanged() -> None:
    async with standin("sglang") as server:
        undisturbed = await PreparedRequest(server, "a").answer()
        for mode in ("retract", "in_place"):
            with server.freezing(7):
                request = PreparedRequest(server, "a")
                await server.frozen(7)
            await pause(server, mode)
            await resume(server)
            tokens, logprobs, finish = await request.answer()
            assert (tokens, finish) == (undisturbed[0], undisturbed[2])
            assert logprobs == undisturbed[1]


async def test_abort_pause_ends_all_sequences_with_their_tokens() -> None:
    async with standin("sglang", slots=1) as server:
        with server.freezing(5):
            running = PreparedRequest(server, "a")
            await server.frozen(5)
            waiting = PreparedRequest(server, "b")
            await server.until(1, 1)
        await pause(server, "abort")
        tokens, _, finish = await running.answer()
        assert (len(tokens), finish) == (5, "abort")
        tokens, _, finish = await waiting.answer()
        assert (tokens, finish) == ([], "abort")
        later = PreparedRequest(server, "c")
        await server.until(0, 1)
        await resume(server)
        assert (await later.answer())[2] == "length"


async def test_one_request_is_aborted_by_its_name_and_no_other() -> None:
    async with standin("sglang") as server:
        await pause(server, "in_place")
        first, second = PreparedRequest(server, "one"), PreparedRequest(server, "two")
        await server.until(0, 2)
        with server.freezing(5):
            await resume(server)
            await server.frozen(5)
        await pause(server, "in_place")
        assert (await server.post("/abort_request", {"rid": "one"})) == (200, None)
        assert not first.task.done()  # it ends at its next token, which is sampled after the pause
        await resume(server)
        assert (await first.answer())[2] == "abort"
        assert (await second.answer())[2] == "length"


async def test_update_without_a_pause_finishes_running_requests_first() -> None:
    async with standin("sglang", weights=small_weights(1, 1)) as server:
        undisturbed = await PreparedRequest(server, "a").answer()
        with server.freezing(5):
            running = PreparedRequest(server, "a")
            await server.frozen(5)
        swap = asyncio.create_task(update(server, str(small_weights(2, 2))))
        assert server.standin is not None
        await wait_until(lambda: server.standin.engine.paused)
        await swap
        assert await running.answer() == undisturbed
        assert (await PreparedRequest(server, "b").answer())[0] != undisturbed[0]


async def test_cache_that_sequences_hold_is_not_flushed() -> None:
    async with standin("sglang") as server:
        with server.freezing(5):
            running = PreparedRequest(server, "a")
            await server.frozen(5)
        await pause(server, "in_place")
        assert (await server.post("/flush_cache"))[0] == 400
        body = {"model_path": str(small_weights(2, 2))}
        status, reply = await server.post("/update_weights_from_disk", body)
        assert (status, reply["success"]) == (400, False)
        await resume(server)
        assert (await running.answer())[2] == "length"
        assert (await server.post("/flush_cache"))[0] == 200


async def test_sequence_has_ended_when_its_last_token_is_delivered_and_not_before() -> None:
    """Events of an earlier token may reach the loop after the thread sampled the last one."""
    reported: list[int] = []
    job = greedy(PROMPT, 2)
    ticket = PendingSequence(job, StandinBatch(llama(1)), lambda job: reported.append(job.reported))
    job.take(97, -1.0)
    job.reported = 1
    job.take(98, -1.0)
    assert job.finish
    handle_events([(ticket, False, None)])
    assert not ticket.future.done()
    job.reported = 2
    handle_events([(ticket, True, None)])
    assert ticket.future.done()
    assert reported == [1, 2]


async def test_every_stream_ends_in_any_interleaving_of_thread_and_loop() -> None:
    async with standin("sglang") as server:
        assert server.standin is not None
        for _ in range(5):
            request = PreparedRequest(server, "a", most=60)
            await request.answer()
            events = await server.events("/generate", request.body | {"stream": True})
            assert len(events) == 61


async def test_vllm_stand_in_refuses_fields_that_it_does_not_implement() -> None:
    tokens = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    async with standin("vllm") as server:
        for path, body in (("/inference/v1/generate", tokens), ("/v1/chat/completions", chat)):
            assert (await server.post(path, body))[0] == 200
            assert (await server.post(path, body | {"priority": 1}))[0] == 501
        assert (await server.post("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}))[0] == 400
        assert (await server.post("/v1/chat/completions", chat | {"model": "another"}))[0] == 404
