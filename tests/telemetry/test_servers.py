"""`--metrics` of the servers."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from tests.cli.helpers import start_command, wait_for_end
from tests.telemetry.test_metrics import values

SERVERS = {
    "gateway": (("--upstream", "embedded"), ("rookery_gateway_sessions", "shard=0")),
    "serve-embedded": ((), ("rookery_embedded_sequences", "state=running")),
    "serve-code": (("--sandbox", "subprocess"), ("rookery_code_programs_waiting",)),
}


@pytest.mark.long
@pytest.mark.parametrize("command", SERVERS)
async def test_servers_serve_metrics_at_an_address_of_their_own(tmp_path: Path, command: str) -> None:
    arguments, expected = SERVERS[command]
    options = ("--port", "0", "--metrics", "127.0.0.1:0", "--log-format", "json")
    async with start_command(command, *arguments, *options, cwd=tmp_path) as process:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while not (found := re.search(rb"http://127\.0\.0\.1:\d+/metrics", await process.stdout.readline())):
                assert process.returncode is None
        async with aiohttp.ClientSession() as http, http.get(found[0].decode()) as response:
            assert response.status == 200
            assert values(await response.text())[expected] == 0
        process.terminate()
        done = await wait_for_end(process)
    assert (done.code, done.err) == (0, "")
