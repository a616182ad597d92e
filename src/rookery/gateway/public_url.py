"""Where programs that are in no box of ours reach a gateway: its public address.

Promises:
- an address that cannot be one is said when it is read, in words, and nothing secret of it is told;
- an address that does not lead to this gateway is said before a session uses it: nobody, somebody else, or a proxy
  that loses what a call needs;
- finding that out tells no key of the gateway's, only that of a session which is gone right afterwards.
"""

import asyncio
import ipaddress
import secrets
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from rookery.core import UsageError
from rookery.upstreams.http import Client, HttpClientError, encode_headers
from rookery.upstreams.urls import redact

if TYPE_CHECKING:
    from rookery.gateway.client import GatewayClient

SECONDS: Final = 15.0
"""For an answer at the address."""
MAX_ANSWER: Final = 1 << 20


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def parse_public_url(text: str) -> str:
    """The address without a slash at its end; `UsageError` says what is wrong with it."""
    shown = f"the public URL {redact(text)!r:.200}"
    if not is_url(text):
        raise UsageError(f"{shown} does not begin with http:// or https://")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise UsageError(f"{shown} cannot be read: write it like http://host:port") from None
    if any(one.isspace() or not one.isprintable() for one in text) or not parts.hostname or port == 0:
        raise UsageError(f"{shown} names no host or port: write it like http://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(f"{shown} must be scheme, host, port and path alone: agents append to it")
    return text.rstrip("/")


def parse_listen_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, where a gateway is to listen."""
    host, mark, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not mark or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"the listen address of a gateway must be HOST:PORT, for example 0.0.0.0:9000, not {text!r:.100}"
        )
    return host, int(port)


def is_loopback(url: str) -> bool:
    """Whether it names the machine that reads it."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


async def check_public_url(client: "GatewayClient", public: str) -> None:
    """`UsageError` where the address does not lead to this gateway: a session of no use is asked for there."""
    said = await client.register({"id": f"way-{secrets.token_hex(8)}", "budgets": {"max_turns": 1}})
    url = f"{public}/v1/rollouts/{said['id']}/models"
    try:
        status = await _asked(url, said["secret"])
        other = await _asked(url, "")
    finally:
        await client.delete(said["id"], timeout=SECONDS)
    wrong = f"the public URL {redact(public)} does not lead to this run's gateway"
    if status in (401, 403):
        raise UsageError(f"{wrong}: a request got status {status}, as if another service there checks API keys")
    if (status, other) != (200, 401):
        raise UsageError(
            f"{wrong}: a request got status {status} with a session's key and {other} without: check the host, "
            "the port and the path"
        )


async def _asked(url: str, secret: str) -> int:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    client = Client(parts.hostname or "", parts.port or (443 if secure else 80), ssl=secure, connect=SECONDS)
    try:
        async with asyncio.timeout(SECONDS):
            response = await client.send("GET", parts.path, encode_headers({"Authorization": f"Bearer {secret}"}))
            await response.read(MAX_ANSWER)
            return response.status
    except (TimeoutError, HttpClientError) as error:
        why = str(error) or f"no answer within {SECONDS:g} s"
        shown = redact(url).partition("/v1/rollouts/")[0]
        raise UsageError(
            f"the public URL {shown} cannot be reached from this machine: {why:.300}; "
            "it must lead to where the run's gateway listens (--gateway-listen HOST:PORT)"
        ) from None
    finally:
        await client.close()
