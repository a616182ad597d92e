"""Behaviour that all dialects share with chat: stops, images, size limits, token counts, retries and errors."""

from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.upstreams.embedded import chat
from tests.gateway.dialects.kit import check_exact_turns, run_token_shard
from tests.gateway.kit import InProcessGateway, RegisteredSession, request, run_shard
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream
from tests.gateway.session_kit import TokenScriptUpstream
from tests.gateway.test_openai_client import openai_client

USER: Any = [{"role": "user", "content": "hello"}]


def anthropic_client(
    gateway: InProcessGateway, session: RegisteredSession, **more: Any
) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"{gateway.url}{session.path}", api_key=session.secret, **more)


async def test_response_names_the_stop_sequence_that_ended_it(tmp_path: Path) -> None:
    upstream = TokenScriptUpstream(lambda _: [*b"one STOP two", chat.END], EmbeddedRenderer())
    async with run_token_shard(tmp_path, upstream) as (gateway, recording):
        session = await gateway.register(id="one")
        async with anthropic_client(gateway, session) as client:
            params: Any = {"model": "m", "max_tokens": 99, "messages": USER, "stop_sequences": ["never", "STOP"]}
            whole = await client.messages.create(**params)
            async with client.messages.stream(**params) as stream:
                final = await stream.get_final_message()
            plain = await client.messages.create(model="m", max_tokens=99, messages=USER)
        for parsed in (whole, final):
            assert (parsed.stop_reason, parsed.stop_sequence) == ("stop_sequence", "STOP")
            assert parsed.content[0].text == "one "  # type: ignore[union-attr]
        assert (plain.stop_reason, plain.stop_sequence) == ("end_turn", None)
        await check_exact_turns(gateway, session, recording)


async def test_unrenderable_content_is_a_bad_request_in_every_dialect(tmp_path: Path) -> None:
    async with run_token_shard(tmp_path, TokenScriptUpstream(lambda _: [*b"x", chat.END], EmbeddedRenderer())) as (
        gateway,
        _,
    ):
        session = await gateway.register(id="one")
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        image: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        async with anthropic_client(gateway, session, max_retries=0) as client:
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(model="m", max_tokens=9, messages=image)
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.count_tokens(model="m", messages=image)
        async with openai_client(gateway, session, max_retries=0) as other_client:
            part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
            with pytest.raises(openai.BadRequestError) as caught:
                await other_client.responses.create(model="m", input=[{"role": "user", "content": [part]}])  # type: ignore[list-item,misc]
            assert caught.value.param == "input"
        assert await gateway.turns(session) == []


async def test_images_are_forwarded_to_an_engine_that_renders(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register(id="one")
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        block = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
        image: Any = [{"role": "user", "content": [{"type": "text", "text": "See:"}, block]}]
        async with anthropic_client(gateway, session) as client:
            await client.messages.create(model="m", max_tokens=9, messages=image)
        assert upstream.calls[0].request.messages[0].content == (  # type: ignore[union-attr]
            {"type": "text", "text": "See:"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        )


async def test_oversized_body_is_rejected_in_the_format_of_the_dialect(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        session = await gateway.register(id="one")
        for path, kind in (("/messages", "request_too_large"), ("/responses", "invalid_request_error")):
            async with await gateway.connect() as connection:
                head = request(
                    "POST", session.path + path, None, x_api_key=session.secret, Content_Length=str(1 << 40)
                )
                connection.send(head)
                answer = await connection.read_response()
            assert (answer.status, answer.json["error"]["type"]) == (413, kind)
        unknown = await gateway.request(
            "GET", f"{session.path}/nothing", key=session.secret, anthropic_version="1"
        )
        assert (unknown.status, unknown.json["type"]) == (404, "error")


async def test_token_count_matches_the_prompt_and_records_nothing(tmp_path: Path) -> None:
    async with run_token_shard(
        tmp_path, TokenScriptUpstream(lambda _: [*b"fine", chat.END], EmbeddedRenderer())
    ) as (gateway, recording):
        session = await gateway.register(id="one", budgets={"max_turns": 2})
        async with openai_client(gateway, session) as client:
            params: Any = {"model": "m", "instructions": "Be kind."}
            for _ in range(3):
                count = await client.responses.input_tokens.count(input="hello", **params)
            first = await client.responses.create(input="hello", **params)
            assert first.usage is not None
            assert first.usage.input_tokens == count.input_tokens
            more: Any = {**params, "input": "more", "previous_response_id": first.id}
            count = await client.responses.input_tokens.count(**more)
            second = await client.responses.create(**more)
            assert second.usage is not None
            assert second.usage.input_tokens == count.input_tokens
        await check_exact_turns(gateway, session, recording, segments=1)


async def test_session_can_mix_dialects_in_one_history(tmp_path: Path) -> None:
    async with run_token_shard(
        tmp_path, TokenScriptUpstream(lambda _: [*b"fine", chat.END], EmbeddedRenderer())
    ) as (gateway, recording):
        session = await gateway.register(id="one")
        history: list[Any] = list(USER)
        async with anthropic_client(gateway, session) as anthropics, openai_client(gateway, session) as openais:
            for turn in range(6):
                if turn % 3 == 0:
                    await anthropics.messages.create(model="m", max_tokens=9, messages=history)
                elif turn % 3 == 1:
                    await openais.responses.create(model="m", input=history, store=False)
                else:
                    await openais.chat.completions.create(model="m", messages=history)
                history += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}]
        turns = await check_exact_turns(gateway, session, recording, segments=1)
        assert [turn.get("parent") for turn in turns] == [None, 0, 1, 2, 3, 4]


async def test_truncated_session_is_not_retried_in_any_dialect(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register(id="one", budgets={"max_turns": 1})
        await gateway.chat(session)
        async with anthropic_client(gateway, session, max_retries=3) as client:
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(model="m", max_tokens=9, messages=USER)
        async with openai_client(gateway, session, max_retries=3) as other_client:
            with pytest.raises(openai.BadRequestError) as caught:
                await other_client.responses.create(model="m", input="x")
            assert caught.value.code == "rollout_truncated"
            with pytest.raises(openai.BadRequestError):
                await other_client.completions.create(model="m", prompt=[1])
        assert (await gateway.trajectory(session))["truncated"] == "turns"
        assert len(upstream.calls) == 1


@pytest.mark.parametrize("path", ["/messages", "/responses", "/completions"])
async def test_only_a_marked_equal_request_is_replayed(tmp_path: Path, path: str) -> None:
    upstream = ScriptedUpstream()
    upstream.then(ScriptedReply("a"), ScriptedReply("b"))
    body = {"/messages": {"messages": USER}, "/responses": {"input": "hello"}, "/completions": {"prompt": [1, 2]}}
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register(id="one")
        answers: list[Any] = []
        for retry in ("0", "0", "1"):
            answer = await gateway.request(
                "POST", session.path + path, body[path], key=session.secret, x_stainless_retry_count=retry
            )
            assert answer.status == 200
            parsed = msgspec.json.decode(answer.body)
            answers.append(parsed.get("content") or parsed.get("output") or parsed["choices"])
        assert answers[1] == answers[2]
        assert answers[0] != answers[1]
        assert (len(upstream.calls), len(await gateway.turns(session))) == (2, 2)


@pytest.mark.parametrize("path", ["/messages", "/responses"])
async def test_broken_stream_ends_with_an_error_event_and_records_no_turn(tmp_path: Path, path: str) -> None:
    from rookery.core import UpstreamError

    upstream = ScriptedUpstream(ScriptedReply("abc", error=UpstreamError("cut", cause="upstream.cut"), after=2))
    body: dict[str, Any] = {"messages": USER, "input": "hello", "stream": True}
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register(id="one")
        answer = await gateway.request("POST", session.path + path, body, key=session.secret)
        assert answer.status == 200
        assert b"message_stop" not in answer.body
        assert b"response.completed" not in answer.body
        assert b"event: error" in answer.body
        assert await gateway.turns(session) == []
