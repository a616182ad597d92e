"""The `openai` upstream against real servers on loopback: replies, configuration, checks."""

import logging

import pytest

from rookery.core import Message, Sampling, ToolCall, UpstreamError, UsageError, floats, ints
from rookery.upstreams import ModelRequest, UpstreamConfig, open_upstream
from rookery.upstreams.http_upstream import HttpUpstream
from rookery.upstreams.openai import OpenAIUpstream
from tests.servers import Answer, ModelServer, unreachable_url
from tests.upstreams.helpers import KEY, REQUEST, fails, upstream

# ------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_server_answers_with_or_without_v1_in_its_url(path):
    async with ModelServer("hello") as server, upstream(server.url + path) as up:
        reply = await up.complete(REQUEST, timeout=60)
        assert (reply.message, reply.finish) == (Message("assistant", "hello"), "stop")
        assert server.requests[0].path == "/v1/chat/completions"
        assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"
        assert reply.replica == f"{server.url}/v1"


async def test_token_ids_and_logprobs_are_requested_and_come_back():
    answer = Answer("hi", ids=[7, 8], logprobs=[-0.5, -1.5], prompt_ids=[1, 2, 3], extra={"weight_version": "4"})
    async with ModelServer(answer) as server, upstream(server.url) as up:
        reply = await up.complete(REQUEST, timeout=60)
        assert (reply.prompt, reply.sampled) == (ints([1, 2, 3]), ints([7, 8]))
        assert reply.logprobs == floats([-0.5, -1.5])
        assert reply.version == 4
        assert server.requests[0].body["return_token_ids"] is True
        assert server.requests[0].body["logprobs"] is True


async def test_token_ids_go_in_through_completions():
    answer = Answer("hi", ids=[7], logprobs=[-0.5])
    async with ModelServer(answer) as server, upstream(server.url) as up:
        reply = await up.complete(ModelRequest(model="m", tokens=ints([1, 2])), timeout=60)
        assert (reply.message.text, reply.prompt, reply.sampled) == ("hi", ints([1, 2]), ints([7]))
        assert reply.logprobs == floats([-0.5])
        assert server.requests[0].path == "/v1/completions"
        assert server.requests[0].body["prompt"] == [1, 2]


async def test_tool_calls_come_back():
    answer = Answer(None, calls=[("add", '{"a": 1}'), ("add", "not json")], finish="tool_calls")
    async with ModelServer(answer) as server, upstream(server.url) as up:
        reply = await up.complete(REQUEST, timeout=60)
        assert reply.message.tool_calls == (
            ToolCall("call_0", "add", '{"a": 1}'),
            ToolCall("call_1", "add", "not json"),
        )
        assert reply.finish == "tool_calls"


async def test_own_version_is_used_if_the_server_reports_none():
    async with ModelServer() as server, upstream(server.url) as up:
        up.version = 9
        assert (await up.complete(REQUEST, timeout=60)).version == 9
        server.then(Answer(headers={"X-Weight-Version": "11"}))
        assert (await up.complete(REQUEST, timeout=60)).version == 11


async def test_sampling_of_the_request_is_sent():
    async with ModelServer() as server, upstream(server.url) as up:
        sampling = Sampling(temperature=0.0, top_p=0.5)
        await up.complete(ModelRequest(model="", messages=REQUEST.messages, sampling=sampling), timeout=60)
        sent = server.requests[0].body
        assert (sent["temperature"], sent["top_p"], sent["model"]) == (0.0, 0.5, "test-model")


async def test_connections_are_reused():
    async with ModelServer() as server, upstream(server.url) as up:
        for _ in range(5):
            await up.complete(REQUEST, timeout=60)
        assert (len(server.requests), server.connections) == (5, 1)


async def test_long_requests_and_long_answers_go_through():
    async with ModelServer() as server, upstream(server.url) as up:
        server.then(Answer("y" * 3_000_000), Answer("z" * 3_000_000, chunked=True))
        request = ModelRequest(model="m", messages=(Message("user", "x" * 3_000_000),))
        assert len((await up.complete(request, timeout=60)).message.text) == 3_000_000
        assert len((await up.complete(REQUEST, timeout=60)).message.text) == 3_000_000
        assert len(server.requests[0].body["messages"][0]["content"]) == 3_000_000


async def test_endless_reply_is_refused_while_it_arrives(monkeypatch):
    monkeypatch.setattr("rookery.upstreams.replica.MAX_RESPONSE_BYTES", 1 << 20)
    async with ModelServer(Answer("z" * 3_000_000, chunked=True)) as server, upstream(server.url) as up:
        assert "1 MB" in await fails(up, "upstream.protocol")
        server.default = Answer("z" * 3_000_000)
        assert "1 MB" in await fails(up, "upstream.protocol")


# ------------------------------------------------------------------------------------------ refused fields


@pytest.mark.parametrize("fields", [{}, {"messages": REQUEST.messages, "tokens": ints([1])}])
async def test_call_without_exactly_one_prompt_is_rejected(fields):
    async with upstream("http://127.0.0.1:9", kind="openai") as up:
        with pytest.raises(UpstreamError, match="'openai'") as caught:
            await up.complete(ModelRequest(**fields), timeout=60)
    assert caught.value.code == "upstream.rejected"


async def test_rejection_of_token_ids_names_the_kind_and_an_option(monkeypatch):
    monkeypatch.setattr(OpenAIUpstream, "token_format", None)
    async with upstream("http://127.0.0.1:9", kind="openai") as up:
        with pytest.raises(UpstreamError) as caught:
            await up.complete(ModelRequest(tokens=ints([1])), timeout=60)
    assert caught.value.code == "upstream.rejected"
    assert all(part in str(caught.value) for part in ("'openai'", "--upstream-kind"))


def test_class_without_a_message_format_is_refused_at_construction():
    class Unfinished(HttpUpstream):
        """Upstream whose author forgot the format."""

    with pytest.raises(UsageError) as caught:
        Unfinished(UpstreamConfig(kind="mine", urls=("http://127.0.0.1:9",)))
    assert all(part in str(caught.value) for part in ("mine", "Unfinished", "message_format"))


@pytest.mark.parametrize("fields", [{"return_token_ids"}, {"logprobs"}, {"return_token_ids", "logprobs"}])
async def test_refused_field_is_excluded_from_then_on(fields, caplog):
    async with ModelServer() as server, upstream(server.url) as up:
        server.unsupported_fields = fields
        with caplog.at_level(logging.WARNING, "rookery.upstreams"):
            for _ in range(3):
                reply = await up.complete(REQUEST, timeout=60)
                assert (reply.sampled, reply.logprobs, reply.message.text) == (b"", b"", "ok")
        assert len(server.requests) == 3 + len(fields)
        assert len(caplog.records) == 1


async def test_field_is_not_omitted_after_an_error_about_another():
    """Some servers quote the whole request in every error message."""
    complaint = {"detail": [{"loc": ["temperature"], "input": {"return_token_ids": True, "logprobs": True}}]}
    async with ModelServer() as server, upstream(server.url) as up:
        server.then(*[Answer(status=422, body=complaint)] * 3)
        await fails(up, "upstream.rejected")
        assert len(server.requests) == 3
        await up.complete(REQUEST, timeout=60)
        assert server.requests[-1].body["return_token_ids"] is True


async def test_max_tokens_is_renamed_if_the_server_requires_it():
    complaint = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    request = ModelRequest(model="m", messages=REQUEST.messages, sampling=Sampling(max_tokens=5))
    async with ModelServer() as server, upstream(server.url) as up:
        server.then(Answer(status=400, error=complaint))
        await up.complete(request, timeout=60)
        assert server.requests[-1].body["max_completion_tokens"] == 5


# ------------------------------------------------------------------------------------------ configuration


async def test_login_in_the_url_is_used_and_never_shown():
    async with ModelServer() as server:
        url = server.url.replace("//", "//me:open-sesame@")
        async with upstream(url) as up:
            assert "sesame" not in (await up.complete(REQUEST, timeout=60)).replica
            assert server.requests[0].headers["Authorization"].startswith("Basic ")
            server.then(Answer(status=500, error="open-sesame"))
            assert "sesame" not in await fails(up, "upstream.error")


async def test_key_is_read_from_the_configured_variable(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "sk-from-env")
    async with ModelServer() as server, upstream(server.url, key=None, key_env="THEIR_KEY") as up:
        await up.complete(REQUEST, timeout=60)
        assert server.requests[0].headers["Authorization"] == "Bearer sk-from-env"


async def test_request_without_a_key_has_no_authorization_header(monkeypatch):
    monkeypatch.delenv("ROOKERY_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with ModelServer() as server, upstream(server.url, key=None) as up:
        await up.complete(REQUEST, timeout=60)
        assert "Authorization" not in server.requests[0].headers


@pytest.mark.parametrize(
    "config",
    [
        UpstreamConfig(),
        UpstreamConfig(urls=("h:1",)),
        UpstreamConfig(urls=("http://h",), concurrency=0),
        UpstreamConfig(urls=("http://h",), retries=-1),
        UpstreamConfig(urls=("http://h",), sampling=Sampling(extra={"stream": True})),
        UpstreamConfig(urls=("http://h",), kind="nonesuch"),
    ],
)
def test_invalid_configuration_is_refused(config):
    with pytest.raises(UsageError):
        open_upstream(config)


def test_unknown_kind_names_the_known_ones():
    with pytest.raises(UsageError, match="openai"):
        open_upstream(UpstreamConfig(kind="nonesuch"))


def test_invalid_key_is_refused_without_showing_it():
    with pytest.raises(UsageError) as caught:
        open_upstream(UpstreamConfig(urls=("http://h",)), key="ses\name")
    assert "ame" not in str(caught.value).replace("name", "")


async def test_upstream_is_opened_by_kind():
    async with ModelServer() as server:
        up = open_upstream(UpstreamConfig(urls=(server.url,)))
        assert isinstance(up, OpenAIUpstream)
        await up.complete(REQUEST, timeout=60)
        await up.close()
        await up.close()


async def test_invalid_requests_are_refused_before_they_are_sent():
    async with ModelServer() as server, upstream(server.url) as up:
        for request in (
            ModelRequest(model="m"),
            ModelRequest(model="m", messages=REQUEST.messages, tokens=ints([1])),
            ModelRequest(model="m", messages=REQUEST.messages, sampling=Sampling(extra={"n": 2})),
            ModelRequest(model="m", messages=REQUEST.messages, sampling=Sampling(extra={"x": object()})),
            ModelRequest(model="m", messages=(Message("user", "\ud800"),)),
        ):
            with pytest.raises(UpstreamError) as caught:
                await up.complete(request, timeout=60)
            assert caught.value.code == "upstream.rejected"
        assert not server.requests


# -------------------------------------------------------------------------------------------------- check


async def test_check_reports_the_served_models():
    async with ModelServer(models=("test-model", "other")) as server, upstream(server.url) as up:
        info = await up.check()
        assert (info.url, info.models, info.context) == (f"{server.url}/v1", ("test-model", "other"), 4096)
        assert not server.requests


async def test_check_lists_the_served_models():
    async with ModelServer(models=("a", "b")) as server, upstream(server.url) as up:
        with pytest.raises(UpstreamError) as caught:
            await up.check()
        assert caught.value.code == "upstream.rejected"


async def test_check_without_a_model_returns_the_served_models():
    async with ModelServer(models=("only",)) as server:
        up = OpenAIUpstream(UpstreamConfig(urls=(server.url,)))
        info = await up.check()
        await up.close()
        assert (info.models, info.context) == (("only",), 4096)


@pytest.mark.parametrize("status", [404, 405])
async def test_server_without_a_list_passes_the_check(status):
    async with ModelServer(models=Answer(status=status)) as server, upstream(server.url) as up:
        assert (await up.check()).models == ()


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (Answer(status=401, error=f"wrong key {KEY}"), "upstream.auth"),
        (Answer(status=403), "upstream.auth"),
        (Answer(status=500), "upstream.error"),
        (Answer(status=503), "upstream.overloaded"),
        (Answer(body=b"<html>welcome</html>"), "upstream.protocol"),
        (Answer(body={"data": [{"name": "x"}]}), "upstream.protocol"),
    ],
)
async def test_check_says_why_a_server_cannot_be_used(answer, cause):
    async with ModelServer(models=answer) as server, upstream(server.url) as up:
        with pytest.raises(UpstreamError) as caught:
            await up.check()
        assert caught.value.code == cause
        assert KEY not in str(caught.value)


async def test_check_of_an_unreachable_server_fails():
    async with unreachable_url() as url, upstream(url) as up:
        with pytest.raises(UpstreamError) as caught:
            await up.check()
        assert caught.value.code == "upstream.unreachable"


async def test_one_unusable_replica_does_not_make_the_upstream_unusable():
    async with ModelServer() as server, unreachable_url() as unreachable, upstream(unreachable, server.url) as up:
        info = await up.check()
        assert info.models == ("test-model",)
        assert unreachable in info.details["unusable"][0]


async def test_nothing_secret_is_logged(caplog):
    with caplog.at_level(logging.DEBUG):
        async with ModelServer() as server, upstream(server.url) as up:
            server.then(Answer(status=503, error=KEY), Answer(status=401, error=KEY))
            await fails(up, "upstream.auth")
            await up.check()
    assert KEY not in caplog.text
    assert KEY not in repr(up)
