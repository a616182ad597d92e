"""The check that a public URL leads to this gateway."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rookery.core import UsageError
from rookery.gateway.public_url import check_public_url, parse_public_url

SECRET = "session-secret"


@pytest.mark.parametrize("text", ["http://user:hunter2@host", "http://user:hunter2@", "ftp://user:hunter2@host"])
def test_error_about_a_public_url_contains_no_credentials(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_public_url(text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("with_key", "without_key", "accepted"), [(200, 401, True), (200, 200, False)])
async def test_proxy_that_removes_the_key_is_refused_and_only_the_session_secret_is_sent(
    with_key: int, without_key: int, accepted: bool
) -> None:
    heads: list[bytes] = []
    deleted: list[str] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        status = with_key if SECRET.encode() in heads[-1] else without_key
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        await writer.drain()
        writer.close()

    async def register(registration: dict[str, Any]) -> dict[str, str]:
        return {"id": registration["id"], "secret": SECRET}

    async def delete(session: str, *, timeout: float) -> None:
        deleted.append(session)

    client: Any = SimpleNamespace(register=register, delete=delete, key="admin-key")
    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        public = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if accepted:
            await check_public_url(client, public)
        else:
            with pytest.raises(UsageError):
                await check_public_url(client, public)
    assert len(heads) == 2
    assert not any(b"admin-key" in head for head in heads)
    assert len(deleted) == 1
