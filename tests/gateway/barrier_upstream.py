"""Upstream server for tests, run as its own process: every stream waits until STREAMS streams have started.

`python barrier_upstream.py STREAMS` prints its port. It answers a message `N SIZE` with `N:` and, after the
barrier, with SIZE bytes in chunks. It writes a chunk only after the client has read the one before.
"""

import asyncio
import json
import resource
import sys

PIECE = 16 << 10


def event(text: str, finish: str | None = None) -> bytes:
    delta = {"role": "assistant", "content": text}
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    data = (
        b"data: "
        + json.dumps({**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode()
    )
    return b"%x\r\n%b\n\n\r\n" % (len(data) + 2, data)


async def main(streams: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    started = 0
    all_started = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal started
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
                body = await reader.readexactly(length)
                if not head.startswith(b"post"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                number, size = json.loads(body)["messages"][-1]["content"].split()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                writer.write(event(f"{number}:"))
                await writer.drain()
                started += 1
                if started >= streams:
                    all_started.set()
                await all_started.wait()
                left = int(size)
                while left > 0:
                    writer.write(event("x" * min(left, PIECE)))
                    await writer.drain()
                    left -= PIECE
                writer.write(event("", "stop") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    stdin_closed = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await stdin_closed


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
