"""Minimal gateway for the tests of the benchmark `gateway`: sessions with keys; forwards to the URL in argv."""

import asyncio
import os
import re
import secrets
import sys

import aiohttp
from aiohttp import web

SESSION = re.compile(r"(?:/v1)?/rollouts/([^/]+)(/chat/completions)?")


async def main(upstream: str) -> None:
    key = os.environ["ROOKERY_GATEWAY_KEY"]
    sessions: dict[str, str] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            bearer = request.headers.get("Authorization", "")
            if request.path == "/rollouts":
                if bearer != f"Bearer {key}":
                    return web.Response(status=401)
                name = (await request.json())["id"]
                sessions[name] = secrets.token_hex(8)
                url = f"http://{request.host}/v1/rollouts/{name}"
                return web.json_response({"id": name, "base_url": url, "secret": sessions[name]})
            match = SESSION.fullmatch(request.path)
            if match is None or match[1] not in sessions:
                return web.Response(status=410)
            if request.method == "DELETE":
                del sessions[match[1]]
                return web.Response()
            if bearer != f"Bearer {sessions[match[1]]}":
                return web.Response(status=401)
            async with client.post(f"{upstream}/chat/completions", data=await request.read()) as response:
                if response.content_type != "text/event-stream":
                    body = await response.read()
                    return web.Response(body=body, status=response.status, content_type="application/json")
                stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await stream.prepare(request)
                async for chunk in response.content.iter_any():
                    await stream.write(chunk)
                await stream.write_eof()
                return stream

        server = web.Server(handle, access_log=None)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        print(f"the gateway listens at http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", flush=True)
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
