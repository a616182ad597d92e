"""As much of a gateway as its bench needs: sessions with secrets, and forwarding. Argument: the upstream's URL."""

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
            found = SESSION.fullmatch(request.path)
            if found is None or found[1] not in sessions:
                return web.Response(status=410)
            if request.method == "DELETE":
                del sessions[found[1]]
                return web.Response()
            if bearer != f"Bearer {sessions[found[1]]}":
                return web.Response(status=401)
            async with client.post(f"{upstream}/chat/completions", data=await request.read()) as answer:
                if answer.content_type != "text/event-stream":
                    body = await answer.read()
                    return web.Response(body=body, status=answer.status, content_type="application/json")
                streamed = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await streamed.prepare(request)
                async for piece in answer.content.iter_any():
                    await streamed.write(piece)
                await streamed.write_eof()
                return streamed

        server = web.Server(handle, access_log=None)
        serving = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        print(f"the gateway serves at http://127.0.0.1:{serving.sockets[0].getsockname()[1]}", flush=True)
        await serving.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
