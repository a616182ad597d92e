"""Control endpoints of the SGLang stand-in: pauses, aborts, weights, health, metrics.

Behaviour:
- `model_path` of a weight update names a file or directory in the format of the embedded policy;
- without a pause, an update waits for running requests, and requests that arrive meanwhile wait for the update;
- the cache cannot be flushed while sequences use it: SGLang would fail, and the stand-in refuses.
"""

from typing import TYPE_CHECKING

from aiohttp import web

import rookery
from rookery.core import UsageError
from rookery.upstreams.embedded.http_server import json_response
from tests.engine_standins import sglang_requests as bodies
from tests.engine_standins.requests import Invalid, convert

if TYPE_CHECKING:
    from tests.engine_standins.sglang import SGLangStandin


def add_control(standin: "SGLangStandin", router: web.UrlDispatcher) -> None:
    control = Control(standin)
    for path in ("abort_request", "pause_generation", "continue_generation", "flush_cache"):
        router.add_post(f"/{path}", getattr(control, path))
    for path in ("update_weights_from_disk", "update_weight_version"):
        router.add_post(f"/{path}", getattr(control, path))
    router.add_get("/flush_cache", control.flush_cache)
    for path in ("health_generate", "ping"):
        router.add_get(f"/{path}", standin.health)
    for path in ("model_info", "get_model_info"):
        router.add_get(f"/{path}", control.model_info)
    for path in ("server_info", "get_server_info"):
        router.add_get(f"/{path}", control.server_info)
    router.add_get("/get_load", control.get_load)
    router.add_get("/v1/models/{name:.+}", control.model)


class Control:
    def __init__(self, standin: "SGLangStandin") -> None:
        self._standin = standin
        self._engine = standin.engine
        self._path = str(standin.upstream.path or standin.upstream.model)

    # ------------------------------------------------------------------------------------ pauses and aborts

    async def abort_request(self, request: web.Request) -> web.StreamResponse:
        body = convert(await self._standin.body(request), bodies.Abort)
        if body.abort_all:
            await self._engine.abort(gently=True)
        elif body.rid and (body.rid in self._engine.live or body.rid in self._engine.disconnected):
            await self._engine.abort(body.rid, gently=True)
        return web.Response(status=200)

    async def pause_generation(self, request: web.Request) -> web.StreamResponse:
        mode = convert(await self._standin.body(request), bodies.Pause).mode
        await self._engine.pause("abort" if mode == "abort" else "keep", clear=mode == "retract")
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.StreamResponse:
        await self._standin.body(request)
        await self._engine.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    # ---------------------------------------------------------------------------------------------- weights

    async def update_weights_from_disk(self, request: web.Request) -> web.StreamResponse:
        body = convert(await self._standin.body(request), bodies.UpdateFromDisk)
        if body.abort_all_requests:
            await self._engine.abort()
        drain = not self._engine.paused
        if drain:
            await self._engine.pause("wait", clear=False)
        try:
            running, _ = await self._engine.counts()
            if running and body.flush_cache:
                raise UsageError("the cache cannot be flushed while sequences hold it: send flush_cache=false")
            await self._engine.load(body.model_path, version=body.weight_version)
            self._path = body.model_path
        except (UsageError, ValueError) as error:
            reply = {"success": False, "message": str(error), "num_paused_requests": 0}
            return json_response(reply, status=400)
        finally:
            if drain:
                await self._engine.resume()
        words = "Succeeded to update model weights."
        if body.weight_version is not None:
            words += f" Weight version updated to {body.weight_version}."
        return json_response({"success": True, "message": words, "num_paused_requests": 0})

    async def update_weight_version(self, request: web.Request) -> web.StreamResponse:
        body = convert(await self._standin.body(request), bodies.UpdateVersion)
        if body.abort_all_requests:
            await self._engine.abort()
        self._engine.version = body.new_version
        words = f"Weight version updated to {body.new_version}"
        return json_response({"success": True, "message": words, "new_version": body.new_version})

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        try:
            if float(request.query.get("timeout", "0")) < 0:
                raise ValueError
        except ValueError:
            words = "a number that is not below 0"
            raise Invalid("float_parsing", ("query", "timeout"), words, request.query["timeout"]) from None
        running, waiting = await self._engine.counts()
        if running or waiting or not await self._engine.forget():
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    # ------------------------------------------------------------------------------------------------ about

    async def model_info(self, _: web.Request) -> web.StreamResponse:
        return json_response(
            {
                "model_path": self._path,
                "served_model_name": self._standin.upstream.model,
                "tokenizer_path": self._path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._engine.version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": "embedded",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
            }
        )

    async def server_info(self, _: web.Request) -> web.StreamResponse:
        """Return only the arguments that clients depend on."""
        upstream = self._standin.upstream
        return json_response(
            {
                "model_path": self._path,
                "tokenizer_path": self._path,
                "served_model_name": upstream.model,
                "context_length": upstream.context,
                "incremental_streaming_output": self._standin.incremental,
                "tp_size": 1,
                "dp_size": 1,
                "max_running_requests": upstream.slots,
                "max_total_num_tokens": upstream.slots * upstream.context,
                "max_req_input_len": upstream.context - 1,
                "startup_time": self._standin.created,
                "internal_states": [{"max_running_requests": upstream.slots}],
                "version": f"0.0.0+rookery{rookery.__version__}",
                "kv_events": None,
            }
        )

    async def get_load(self, _: web.Request) -> web.StreamResponse:
        running, waiting = await self._engine.counts()
        load = {"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting}
        return json_response([load | {"num_tokens": 0, "num_pending_tokens": 0, "ts_tic": 0.0}])

    async def model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name == self._standin.upstream.model:
            return json_response(self._standin.model_card())
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_response({"error": error}, status=404)
