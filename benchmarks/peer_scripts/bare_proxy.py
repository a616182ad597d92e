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


async def forward_stream(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    buffer = b""
    async with response:
        async for chunk in response.content.iter_any():
            *events, buffer = (buffer + chunk).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    orjson.loads(event[6:])
            yield chunk


async def main() -> None:
    url = sys.argv[1]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def chat(request: Request) -> Response:
            body = await request.body()
            parsed = orjson.loads(body)
            response = await session.post(url, data=body, headers=HEADERS)
            if parsed.get("stream"):
                return StreamingResponse(
                    forward_stream(response), status_code=response.status, media_type="text/event-stream"
                )
            async with response:
                payload = await response.read()
            orjson.loads(payload)
            return Response(payload, status_code=response.status, media_type="application/json")

        app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
            config = uvicorn.Config(app, access_log=False, log_level="warning", lifespan="off", http="httptools")
            server_task = asyncio.create_task(uvicorn.Server(config).serve([listener]))
            versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("uvicorn", "aiohttp"))
            # The kernel accepts connections as soon as the socket listens.
            print(f"bare proxy ({versions}) at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
            await server_task


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
