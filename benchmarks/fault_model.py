"""The model server of the fault campaign: deterministic replies, and faults that a prompt asks for.

A prompt is `NUMBER TURN FAULT`. A fault happens at the first call of a rollout with that number; later calls get
a normal reply. Replies contain token IDs from which the number and the turn can be read, so that the campaign
notices tokens that were attributed to another rollout.
"""

import asyncio
import os
import sys
from typing import Any

import orjson
from aiohttp import web

SLOW_SECONDS = 2.0
MODEL = "campaign"


def reply_tokens(number: int, turn: int) -> list[int]:
    """Return the token IDs of the reply to a turn of a rollout."""
    return [1000 + number, turn, 7 * number % 1000]


class FaultModel:
    """Answers chat completions, once with the fault that the prompt asks for."""

    def __init__(self) -> None:
        self._faulted: set[str] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        prompt = str(body["messages"][-1]["content"])
        number, turn, fault = prompt.split(" ", 2)
        if fault.startswith("upstream") and number not in self._faulted:
            self._faulted.add(number)
            match fault:
                case "upstream 5xx":
                    return web.json_response({"error": {"message": "campaign"}}, status=500)
                case "upstream reset":
                    assert request.transport is not None
                    request.transport.abort()
                case "upstream garbage":
                    return web.Response(body=b'{"choices": [{"mess', content_type="application/json")
                case "upstream hang":
                    await asyncio.sleep(3600)
                case "upstream slow":
                    await asyncio.sleep(SLOW_SECONDS)
        return web.json_response(_complete(int(number), int(turn)))


def _complete(number: int, turn: int) -> dict[str, Any]:
    tokens = reply_tokens(number, turn)
    content: list[dict[str, Any]] = [
        {"token": str(one), "logprob": -0.5, "bytes": None, "top_logprobs": []} for one in tokens
    ]
    message = {"role": "assistant", "content": " ".join(map(str, tokens))}
    return {
        "id": "campaign",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "prompt_token_ids": [1, 2, number, turn],
        "choices": [
            {
                "index": 0,
                "message": message,
                "token_ids": tokens,
                "logprobs": {"content": content},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": len(tokens), "total_tokens": 4 + len(tokens)},
    }


async def _list_models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def main() -> None:
    """Serve on the address in the first argument until standard input is closed. Prints the port."""
    model = FaultModel()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.answer)
    app.router.add_get("/v1/models", _list_models)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(os.read, 0, 1)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
