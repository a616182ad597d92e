"""Gateway with real shard processes: clients that retry, waits for conditions, and kills by pid."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai

from rookery.gateway.client import GatewayError
from rookery.gateway.config import GatewayConfig
from rookery.gateway.registry import owning_shard
from rookery.gateway.shard_peers import shard_socket_path
from rookery.gateway.shards import Gateway
from rookery.upstreams.protocol import UpstreamConfig
from tests.waiting import wait_until

TIMEOUT = 60.0
MODEL = {"vllm": "random-1-1.safetensors"}
KEY = "an-admin-key"
HI: Any = [{"role": "user", "content": "hi"}]


def gateway_config(url: str, *, shards: int = 1, kind: str = "openai", **options: Any) -> GatewayConfig:
    policy = UpstreamConfig(kind=kind, urls=(url,), model=MODEL.get(kind, "m"), concurrency=64)
    return GatewayConfig(upstreams={"policy": policy}, shards=shards, **{"record": "plain", **options})


@asynccontextmanager
async def run_gateway(url: str, folder: Path | None = None, **options: Any) -> AsyncIterator[Gateway]:
    """Run a gateway in front of the upstream at `url`."""
    async with Gateway(gateway_config(url, **options), folder, key=KEY) as gateway:
        yield gateway


def session_id_for(shard: int, shards: int, stem: str = "s") -> str:
    """Return a session ID that belongs to this shard."""
    return next(name for n in range(10_000) if owning_shard(name := f"{stem}{n}", shards) == shard)


async def retry_while_unavailable(request: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a request while its shard is being restarted."""
    answers: list[Any] = []

    async def answered() -> bool:
        with contextlib.suppress(GatewayError):
            answers.append(await request())
        return bool(answers)

    await wait_until(answered)
    return answers[0]


def openai_client(
    registration: dict[str, str], *, retries: int = 8, through: Path | None = None
) -> openai.AsyncOpenAI:
    """Return the unmodified openai client, optionally connected to one shard's Unix socket."""
    transport_client: Any = None
    if through is not None:
        transport_client = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(through)), timeout=TIMEOUT)
    return openai.AsyncOpenAI(
        base_url=registration["base_url"],
        api_key=registration["secret"],
        max_retries=retries,
        timeout=TIMEOUT,
        http_client=transport_client,
    )


def shard_socket(gateway: Gateway, shard: int) -> Path:
    """Return the Unix socket that leads to one particular shard."""
    return shard_socket_path(Path(gateway.address.sockets), shard)


async def chat_text(api: openai.AsyncOpenAI, messages: list[Any], *, stream: bool, **options: Any) -> str:
    """Return the text of a reply; an incomplete stream raises."""
    if not stream:
        response = await api.chat.completions.create(model="policy", messages=messages, **options)
        return response.choices[0].message.content or ""
    text, finish = "", None
    async for chunk in await api.chat.completions.create(
        model="policy", messages=messages, stream=True, **options
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert finish is not None, "the stream ended without a finish reason"
    return text


def kill_shard(gateway: Gateway, shard: int) -> int:
    pid = gateway.pids()[shard]
    os.kill(pid, signal.SIGKILL)
    return pid


async def wait_for_restart(gateway: Gateway, pid: int, shard: int, session: str) -> None:
    """Wait until the shard that had this pid has been restarted and serves the session."""
    await wait_until(lambda: gateway.pids()[shard] not in (pid, 0))
    await retry_while_unavailable(lambda: gateway.request("GET", f"/rollouts/{session}"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def http_client() -> AsyncIterator[aiohttp.ClientSession]:
    """Open an HTTP client that uses a single keep-alive connection."""
    connector = aiohttp.TCPConnector(limit=1)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


def chat_endpoint(registration: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the chat URL of a session and the headers for it."""
    return f"{registration['base_url']}/chat/completions", {"Authorization": f"Bearer {registration['secret']}"}


ADMIN = {"Authorization": f"Bearer {KEY}"}
