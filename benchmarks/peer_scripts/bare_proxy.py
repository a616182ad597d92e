"""A bare forwarding proxy: uvicorn, Starlette and aiohttp's client, parse, forward, parse, and nothing else.

The benchmark `gateway` runs it in its own environment (`make peers`), as an example of a proxy written in an hour.
It parses the request's JSON and forwards its bytes, then parses the reply's JSON and returns its bytes. Streams
are forwarded chunk by chunk, and their events are parsed.
"""

import asyncio
import importlib.metadata
import socket
import sys
from collections.abc import AsyncIterator

import aiohttp
import orjson
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

HEADERS = {"Content-Type": "application/json"}


async def streamed(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async with answer:
        async for piece in answer.content.iter_any():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    orjson.loads(event[6:])
            yield piece


async def main() -> None:
    url = sys.argv[1]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def chat(request: Request) -> Response:
            body = await request.body()
            parsed = orjson.loads(body)
            answer = await session.post(url, data=body, headers=HEADERS)
            if parsed.get("stream"):
                return StreamingResponse(
                    streamed(answer), status_code=answer.status, media_type="text/event-stream"
                )
            async with answer:
                whole = await answer.read()
            orjson.loads(whole)
            return Response(whole, status_code=answer.status, media_type="application/json")

        app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
            config = uvicorn.Config(app, access_log=False, log_level="warning", lifespan="off", http="httptools")
            serving = asyncio.create_task(uvicorn.Server(config).serve([listener]))
            versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("uvicorn", "aiohttp"))
            # The kernel takes connections from the moment it listens.
            print(f"bare proxy ({versions}) at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
            await serving


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
