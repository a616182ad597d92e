"""The public URL of a gateway, with which programs on other machines reach it.

Runs in the supervisor.

Guarantees:
- `parse_public_url` raises `UsageError` for an invalid URL; error messages contain no credentials from the URL;
- `check_public_url` raises `UsageError` for a URL that does not lead to this gateway, also if it leads to a proxy
  that removes the API key from requests;
- this check sends only the secret of a temporary session to the URL, never the admin key.
"""

import asyncio
import ipaddress
import secrets
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from rookery.core import UsageError
from rookery.upstreams.http_client import Client, HttpClientError, encode_headers
from rookery.upstreams.urls import redact

if TYPE_CHECKING:
    from rookery.gateway.client import GatewayClient

SECONDS: Final = 15.0
"""Time limit for a response at the public URL."""
MAX_RESPONSE: Final = 1 << 20


def is_url(text: str) -> bool:
    """Return whether a public address is an HTTP or HTTPS URL.

    Otherwise it is an SSH destination (`ssh:USER@HOST`).
    """
    return text.startswith(("http://", "https://"))


def parse_public_url(text: str, name: str = "the public URL") -> str:
    """Return a public URL without trailing slashes. Raises `UsageError`, which calls it `name`, if invalid."""
    shown = f"{name} {redact(text)!r:.200}"
    if not is_url(text):
        raise UsageError(f"{shown} does not begin with http:// or https://")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise UsageError(f"{shown} is not valid; write it like http://host:port") from None
    if any(one.isspace() or not one.isprintable() for one in text) or not parts.hostname or port == 0:
        raise UsageError(f"{shown} has no valid host and port; write it like http://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(f"{shown} may have only scheme, host, port and path, because clients append paths to it")
    return text.rstrip("/")


def parse_gateway_url(text: str) -> str:
    """Return the URL of an existing gateway without trailing slashes. Raises `UsageError` if it is invalid."""
    return parse_public_url(text, "the URL of the gateway (--gateway)")


def parse_listen_address(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`, the address on which a gateway listens. Raises `UsageError` if it is invalid."""
    host, mark, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not mark or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"the listen address of a gateway must be HOST:PORT, for example 0.0.0.0:9000, not {text!r:.100}"
        )
    return host, int(port)


def is_loopback(url: str) -> bool:
    """Return whether the host of a URL is a loopback address or `localhost`."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


async def check_public_url(client: "GatewayClient", public: str) -> None:
    """Raise `UsageError` if a public URL does not lead to the gateway of `client`.

    Registers a temporary session and sends requests for it to the URL, from this machine.
    """
    registered = await client.register({"id": f"check-{secrets.token_hex(8)}", "budgets": {"max_turns": 1}})
    url = f"{public}/v1/rollouts/{registered['id']}/models"
    try:
        status = await _get_status(url, registered["secret"])
        status_without_key = await _get_status(url, "")
    finally:
        await client.delete(registered["id"], timeout=SECONDS)
    wrong = f"the public URL {redact(public)} does not lead to this run's gateway"
    if status in (401, 403):
        raise UsageError(
            f"{wrong}: a request with a valid key got status {status}, so another service probably answers there"
        )
    if (status, status_without_key) != (200, 401):
        raise UsageError(
            f"{wrong}: a request got status {status} with a session's key and {status_without_key} without: "
            "check the host, the port and the path"
        )


async def _get_status(url: str, secret: str) -> int:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    client = Client(parts.hostname or "", parts.port or (443 if secure else 80), ssl=secure, connect=SECONDS)
    try:
        async with asyncio.timeout(SECONDS):
            response = await client.send("GET", parts.path, encode_headers({"Authorization": f"Bearer {secret}"}))
            await response.read(MAX_RESPONSE)
            return response.status
    except (TimeoutError, HttpClientError) as error:
        why = str(error) or f"no response within {SECONDS:g} s"
        shown = redact(url).partition("/v1/rollouts/")[0]
        raise UsageError(
            f"the public URL {shown} (--public-url) cannot be reached from this machine: {why:.300}; correct it, "
            "or let the run's gateway listen on the address that it leads to (--gateway-listen HOST:PORT)"
        ) from None
    finally:
        await client.close()
