"""Detection of the kind of server that answers at a URL."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import test_utils, web

from rookery.upstreams import UpstreamConfig, open_upstream
from rookery.upstreams.registry import detect_kind
from tests.engine_standins import standin

REPLIES: dict[str, dict[str, Any]] = {
    "/version": {"version": "0.32.0"},
    "/model_info": {"model_path": "m", "tokenizer_path": "m", "is_generation": True},
    "/get_model_info": {"model_path": "m", "tokenizer_path": "m", "is_generation": True},
    "/props": {"total_slots": 4, "default_generation_settings": {}},
}


async def detect(url: str, **fields: Any) -> str:
    return (await detect_kind(UpstreamConfig(urls=(url,), **fields))).kind


def server_with(replies: dict[str, Any]) -> test_utils.TestServer:
    async def respond(request: web.Request) -> web.Response:
        if request.path not in replies:
            return web.json_response({"detail": "Not Found"}, status=404)
        reply = replies[request.path]
        return web.Response(text=reply) if isinstance(reply, str) else web.json_response(reply)

    application = web.Application()
    application.router.add_get("/{path:.*}", respond)
    return test_utils.TestServer(application)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/version", "vllm"), ("/model_info", "sglang"), ("/get_model_info", "sglang"), ("/props", "llamacpp")],
)
async def test_server_is_recognised_by_its_own_endpoint(path: str, kind: str) -> None:
    async with server_with({path: REPLIES[path]}) as server:
        assert await detect(f"http://127.0.0.1:{server.port}/v1") == kind


async def test_sglang_stand_in_is_recognised() -> None:
    async with standin("sglang") as server:
        assert await detect(server.url) == "sglang"


@pytest.mark.parametrize(
    "body", ["", "[]", "null", "{", '"0.32.0"', "\ud7ff" * 3, "[" * 100_000, '{"name": "other"}']
)
async def test_unknown_server_is_openai(body: str) -> None:
    async with server_with(dict.fromkeys(REPLIES, body)) as server:
        assert await detect(f"http://127.0.0.1:{server.port}") == "openai"


async def test_server_that_does_not_respond_is_openai() -> None:
    async with server_with({}) as server:
        url = f"http://127.0.0.1:{server.port}"
    assert await detect(url) == "openai"


async def test_named_kind_and_a_url_with_a_prefix_are_not_probed(tmp_path: Path) -> None:
    assert await detect("http://127.0.0.1:9", kind="sglang") == "sglang"
    assert await detect(f"embedded:{tmp_path}") == "embedded"


async def test_upstream_opened_without_detection_is_openai() -> None:
    upstream = open_upstream(UpstreamConfig(urls=("http://127.0.0.1:9",)))
    await upstream.close()
    assert upstream.name == "openai"
