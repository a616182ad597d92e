"""Control endpoints of the vLLM stand-in: pauses, aborts, weights, tokenizer, health, metrics.

Behaviour:
- the endpoints are those of vLLM's development mode, in which trainers run vLLM, with their queries and responses;
- `update_info: {"path": …}` of a weight update names a file or directory in the format of the embedded policy.
"""

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

import rookery
from rookery.core import UsageError
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.http_server import json_response, read_body
from rookery.upstreams.embedded.streaming import completion_text
from tests.engine_standins.base import Refusal
from tests.engine_standins.validation import Invalid, conversation, convert, read
from tests.engine_standins.vllm_requests import Detokenize, TokenizeChat, TokenizeText

if TYPE_CHECKING:
    from tests.engine_standins.vllm import VLLMStandin

_TRUE: Final = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}


def add_control(standin: "VLLMStandin", router: web.UrlDispatcher) -> None:
    control = Control(standin)
    for path in ("pause", "resume", "abort_requests", "update_weights", "init_weight_transfer_engine"):
        router.add_post(f"/{path}", getattr(control, path))
    for path in ("start_weight_update", "finish_weight_update", "update_weight_version", "reset_prefix_cache"):
        router.add_post(f"/{path}", getattr(control, path))
    router.add_post("/tokenize", control.tokenize)
    router.add_post("/detokenize", control.detokenize)
    for path in ("is_paused", "weight_info", "get_world_size", "health", "metrics", "version", "load"):
        router.add_get(f"/{path}", getattr(control, path))
    router.add_get("/v1/models", control.models)


class Control:
    def __init__(self, standin: "VLLMStandin") -> None:
        self._standin = standin
        self._engine = standin.engine

    # ------------------------------------------------------------------------------------ pauses and aborts

    async def pause(self, request: web.Request) -> web.StreamResponse:
        mode = request.query.get("mode", "abort")
        if _flag(request, "wait_for_inflight_requests", False):
            mode = "wait"
        if mode not in ("abort", "wait", "keep"):
            raise Invalid("literal_error", ("query", "mode"), "a mode is abort, wait or keep", mode)
        await self._engine.pause(mode, clear=_flag(request, "clear_cache", True))  # type: ignore[arg-type]
        return json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.StreamResponse:
        await self._engine.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.StreamResponse:
        return json_response({"is_paused": self._engine.paused})

    async def abort_requests(self, request: web.Request) -> web.StreamResponse:
        fields = await _object(request)
        names = fields.get("request_ids")
        ended = await self._engine.abort(list(names) if names else None)
        return json_response({"status": "aborted", "aborted": len(names) if names else ended})

    # ---------------------------------------------------------------------------------------------- weights

    async def update_weights(self, request: web.Request) -> web.StreamResponse:
        info = (await _object(request)).get("update_info")
        if info is None:
            raise _http(400, "the body has no update_info")
        path = info.get("path") if isinstance(info, dict) else None
        if not isinstance(path, str) or not path:
            raise _http(400, "update_info has no path: this stand-in loads its weights from one")
        try:
            await self._engine.load(path)
        except (UsageError, ValueError) as error:
            raise _http(500, str(error)) from None
        return json_response({"message": "Weights updated"})

    async def init_weight_transfer_engine(self, request: web.Request) -> web.StreamResponse:
        if (await _object(request)).get("init_info") is None:
            raise _http(400, "the body has no init_info")
        return json_response({"message": "Weight transfer initialized"})

    async def start_weight_update(self, _: web.Request) -> web.StreamResponse:
        return json_response({"message": "Weight update started"})

    async def finish_weight_update(self, request: web.Request) -> web.StreamResponse:
        fields = await _object(request) if request.can_read_body else {}
        if fields.get("weight_version") is not None:
            self._engine.version = str(fields["weight_version"])
        return json_response({"message": "Weight update finished"})

    async def update_weight_version(self, request: web.Request) -> web.StreamResponse:
        new = (await _object(request)).get("new_version")
        if not isinstance(new, str):
            raise Invalid("missing", ("body", "new_version"), "the field is missing", None)
        self._engine.version = new
        return json_response({"success": True, "new_version": new})

    async def weight_info(self, _: web.Request) -> web.StreamResponse:
        return json_response({"weight_version": self._engine.version})

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        done = await self._engine.forget(running=_flag(request, "reset_running_requests", False))
        return json_response({"success": done})

    async def get_world_size(self, _: web.Request) -> web.StreamResponse:
        return json_response({"world_size": 1})

    # -------------------------------------------------------------------------------------------- tokenizer

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        fields = await self._standin.body(request)
        body: TokenizeChat | TokenizeText
        if "prompt" in fields:
            body = convert(fields, TokenizeText)
            start = [chat.BEGIN] if body.add_special_tokens else []
            ids = [*start, *chat.text_ids(body.prompt)]
        else:
            body = convert(fields, TokenizeChat)
            ids = chat.prompt(*conversation(body.messages, body.tools)).ids
            ids = ids if body.add_generation_prompt else ids[:-1]
        self._standin.check_model(body.model)
        names = (
            [chat.NAMES.get(token) or completion_text([token]) for token in ids]
            if body.return_token_strs
            else None
        )
        reply = {"count": len(ids), "max_model_len": self._standin.upstream.context, "tokens": ids}
        return json_response(reply | {"token_strs": names})

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        body = convert(await self._standin.body(request), Detokenize)
        self._standin.check_model(body.model)
        parts: list[bytes] = [
            bytes([token]) if token < chat.BEGIN else chat.NAMES.get(token, "").encode() for token in body.tokens
        ]
        return json_response({"prompt": b"".join(parts).decode("utf-8", "replace")})

    # ------------------------------------------------------------------------------------------------ about

    async def health(self, _: web.Request) -> web.StreamResponse:
        try:
            await self._engine.counts()
        except TimeoutError:
            return web.Response(status=503)
        return web.Response(status=200)

    async def version(self, _: web.Request) -> web.StreamResponse:
        return json_response({"version": f"0.0.0+rookery{rookery.__version__}"})

    async def load(self, _: web.Request) -> web.StreamResponse:
        return json_response({"server_load": len(self._engine.live)})

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        running, waiting = await self._engine.counts()
        label = f'{{engine="0",model_name="{self._standin.upstream.model}"}}'
        used = running / max(1, self._standin.upstream.slots)
        lines = []
        for name, kind, value in (
            ("vllm:num_requests_running", "gauge", float(running)),
            ("vllm:num_requests_waiting", "gauge", float(waiting)),
            ("vllm:kv_cache_usage_perc", "gauge", used),
            ("vllm:generation_tokens_total", "counter", float(self._engine.drawn)),
        ):
            lines += [f"# TYPE {name} {kind}", f"{name}{label} {value}"]
        text = "\n".join(lines) + "\n"
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def models(self, _: web.Request) -> web.StreamResponse:
        upstream = self._standin.upstream
        permission = {
            "id": "modelperm-standin",
            "object": "model_permission",
            "created": self._standin.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": upstream.model,
            "object": "model",
            "created": self._standin.created,
            "owned_by": "vllm",
            "root": upstream.model,
            "parent": None,
            "max_model_len": upstream.context,
            "permission": [permission],
        }
        return json_response({"object": "list", "data": [card]})


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        return read(await read_body(request))
    except Invalid:
        raise _http(400, "the body is no JSON") from None


def _http(status: int, message: str) -> Refusal:
    body = {"message": message, "type": HTTPStatus(status).phrase, "param": None, "code": status}
    return Refusal(status, {"error": body})


def _flag(request: web.Request, name: str, default: bool) -> bool:
    value = request.query.get(name)
    if value is None:
        return default
    if value.lower() not in _TRUE:
        raise Invalid("bool_parsing", ("query", name), "neither true nor false", value)
    return _TRUE[value.lower()]
