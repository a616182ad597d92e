"""A gateway of real processes, for tests: clients that try again, waits for what is so, kills by pid."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai

from rookery.core import RookeryError
from rookery.gateway.config import GatewayConfig
from rookery.gateway.registry import owning_shard
from rookery.gateway.shard_peers import shard_socket_path
from rookery.gateway.shards import Gateway
from rookery.upstreams.protocol import UpstreamConfig

SECONDS = 60.0
MODEL = {"vllm": "random-1-1.safetensors"}
KEY = "an-admin-key"
HI: Any = [{"role": "user", "content": "hi"}]


def config(url: str, *, shards: int = 1, kind: str = "openai", **more: Any) -> GatewayConfig:
    policy = UpstreamConfig(kind=kind, urls=(url,), model=MODEL.get(kind, "m"), concurrency=64)
    return GatewayConfig(upstreams={"policy": policy}, shards=shards, **{"record": "plain", **more})


@asynccontextmanager
async def gateway(url: str, folder: Path | None = None, **more: Any) -> AsyncIterator[Gateway]:
    """A gateway before this upstream."""
    async with Gateway(config(url, **more), folder, key=KEY) as served:
        yield served


def owned_by(shard: int, shards: int, stem: str = "s") -> str:
    """An id that belongs to this shard."""
    return next(name for n in range(10_000) if owning_shard(name := f"{stem}{n}", shards) == shard)


async def eventually(true: Callable[[], Awaitable[bool] | bool], what: str = "it") -> None:
    """Waits for what will be so; a minute at most."""
    async with asyncio.timeout(SECONDS):
        while True:
            found = true()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


async def patient(act: Callable[[], Awaitable[Any]]) -> Any:
    """What a program does that may try again while a shard is restarted."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                return await act()
            except RookeryError as error:
                if "503" not in str(error) and "does not answer" not in str(error):
                    raise
            await asyncio.sleep(0.02)


def client(seat: dict[str, str], *, retries: int = 8, through: Path | None = None) -> openai.AsyncOpenAI:
    """The library, unmodified; through one shard's own socket where that matters."""
    own: Any = None
    if through is not None:
        own = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(through)), timeout=SECONDS)
    return openai.AsyncOpenAI(
        base_url=seat["base_url"],
        api_key=seat["secret"],
        max_retries=retries,
        timeout=SECONDS,
        http_client=own,
    )


def door(served: Gateway, shard: int) -> Path:
    """A shard's own socket: whoever comes there has come to that shard."""
    assert served._sockets is not None
    return shard_socket_path(served._sockets, shard)


async def said(api: openai.AsyncOpenAI, messages: list[Any], *, stream: bool, **more: Any) -> str:
    """The text of an answer; a stream that is not whole raises."""
    if not stream:
        answer = await api.chat.completions.create(model="policy", messages=messages, **more)
        return answer.choices[0].message.content or ""
    text, finish = "", None
    async for chunk in await api.chat.completions.create(model="policy", messages=messages, stream=True, **more):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert finish is not None, "the stream ended before its end"
    return text


def kill(served: Gateway, shard: int) -> int:
    pid = served.pids()[shard]
    os.kill(pid, signal.SIGKILL)
    return pid


async def reborn(served: Gateway, pid: int, shard: int, session: str) -> None:
    """Waits until the shard that had this pid serves a session of its own again."""
    await eventually(lambda: served.pids()[shard] not in (pid, 0))
    await patient(lambda: served.request("GET", f"/rollouts/{session}"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """One connection, kept."""
    connector = aiohttp.TCPConnector(limit=1)
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


def chat(seat: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Where a session's model is called, and with which headers."""
    return f"{seat['base_url']}/chat/completions", {"Authorization": f"Bearer {seat['secret']}"}


ADMIN = {"Authorization": f"Bearer {KEY}"}
