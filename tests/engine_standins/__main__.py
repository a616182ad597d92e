"""Run one stand-in engine as a process: `python -m tests.engine_standins vllm --port 8000`."""

import argparse
import asyncio
from pathlib import Path

from rookery.upstreams.embedded.http_server import run_server
from tests.engine_standins.launch import ENGINES, open_policy


async def serve(options: argparse.Namespace) -> None:
    upstream = open_policy(options.weights, options.slots)
    try:
        server = ENGINES[options.engine](upstream, log_requests=options.log_requests, mortal=True)
        async with run_server(server, options.host, options.port) as at:
            print(f"serving {upstream.model} as {options.engine} at {at}", flush=True)
            await asyncio.Event().wait()
    finally:
        await upstream.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engine_standins")
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=64, help="sequences sampled at the same time")
    parser.add_argument("--weights", help="file or directory of weights; default: the bundled policy")
    parser.add_argument("--log-requests", type=Path, help="append every request to this file, as JSON lines")
    asyncio.run(serve(parser.parse_args()))


main()
