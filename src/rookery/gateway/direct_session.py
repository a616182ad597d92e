"""An attempt's direct access to the policy's inference engine, without a gateway. Runs in runners.

It is used by runs with `record="off"`, for evaluation.

Guarantees:
- nothing is recorded, and no budget of turns or tokens is enforced;
- a program in a sandbox with the network `model` reaches the inference engine and nothing else. The API key is
  added outside of the sandbox;
- with any other network, the API key is given to programs only if the user has agreed to it.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Final

from rookery.core import TruncatedReason, UsageError
from rookery.gateway.client import SessionRecord
from rookery.gateway.gateway_session import SANDBOX_KEY
from rookery.gateway.listener_forwarder import ForwardedCalls, ForwardTarget, ListenerForwarder
from rookery.upstreams.protocol import Upstream, UpstreamConfig
from rookery.upstreams.registry import read_key
from rookery.upstreams.urls import Address

HIDDEN: Final = b"[API key]"
"""Text that replaces the API key in what is stored of a program's output."""


def check_direct_policy(policy: UpstreamConfig, *, pass_key: bool, networks: Collection[str]) -> None:
    """Raise `UsageError` if programs cannot call the policy's inference engine directly.

    `networks` are the networks of the run's sandboxes. `pass_key` is the user's consent to give them the API key.
    """
    for url in policy.urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"--record off needs a policy at an HTTP URL, not {url!r:.100}: agents call it directly"
            )
        if Address(url).login is not None or "?" in url:
            raise UsageError(
                "--record off needs a policy URL without user, password and query: put the API key into "
                f"{policy.key_env}"
            )
    if set(networks) - {"model"} and read_key(policy) is not None and not pass_key:
        raise UsageError(
            "--record off with another network than 'model' gives the inference engine's API key to the agents: "
            f"agree with --pass-key, use the network 'model', or unset {policy.key_env} and OPENAI_API_KEY"
        )


class DirectSession:
    """An attempt's access to the inference engine, with the methods of `GatewaySession` that agents need."""

    def __init__(
        self, upstream: Upstream, model: str, url: str, openai_url: str, key: str, calls: ForwardedCalls | None
    ) -> None:
        """`calls` counts the requests of programs in a sandbox with the network `model`; otherwise None."""
        self.model = model
        """Name of the model at the inference engine."""
        self.url = url
        self.openai_url = openai_url
        self.key = key
        self._upstream = upstream
        self._calls = calls

    def environment(self) -> dict[str, str]:
        """Return environment variables with URL and key for OpenAI's and Anthropic's client libraries."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }

    def hide_key(self, data: bytes) -> bytes:
        """Return output of a program without the inference engine's API key."""
        return data if self.key == SANDBOX_KEY else data.replace(self.key.encode(), HIDDEN)

    async def end(self, *, timeout: float = 60.0) -> SessionRecord:  # noqa: ARG002  (nothing was recorded)
        """Return an empty record."""
        return SessionRecord()

    async def truncation(self) -> TruncatedReason | None:
        """Return None, because no budget is enforced."""
        return None

    async def wait_truncated(self) -> TruncatedReason:
        """Wait until cancelled, because no budget is enforced."""
        await asyncio.Event().wait()
        raise AssertionError

    async def check_upstream(self) -> None:
        """Raise `UpstreamError` if the inference engine cannot be used now."""
        await self._upstream.check()

    async def status(self) -> SessionRecord:
        """Return how many calls were made and how the last one ended. Without counts, assume a successful one."""
        counts = self._calls
        if counts is None:
            return SessionRecord(calls=1, turns_recorded=1)
        return SessionRecord(calls=counts.calls, turns_recorded=counts.succeeded, failure=counts.failure)


@asynccontextmanager
async def open_direct_session(
    upstream: Upstream,
    config: UpstreamConfig,
    model: str,
    *,
    replica: int,
    listener: socket.socket | None = None,
    inside_url: str = "",
) -> AsyncIterator[DirectSession]:
    """Context manager that gives programs access to one replica of an inference engine.

    With `listener`, a listening socket inside a sandbox, requests to its URL `inside_url` are forwarded. Without
    it, programs get the URL of the replica and its API key.
    """
    address = Address(config.urls[replica % len(config.urls)])
    key = read_key(config) or ""
    if listener is None:
        yield DirectSession(upstream, model, address.root, address.shown, key or SANDBOX_KEY, None)
        return
    forwarder = ListenerForwarder(ForwardTarget.parse(address.root, key=key, counts=True))
    try:
        counts = await forwarder.attach("direct", listener)
        openai_url = inside_url + address.shown.removeprefix(address.root)
        yield DirectSession(upstream, model, inside_url, openai_url, SANDBOX_KEY, counts)
    finally:
        await forwarder.close()
