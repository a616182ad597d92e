"""An attempt's door: where programs that are not ours call models, and what they did there.

Promises:
- a program needs a base URL and a key and nothing else; neither opens anything but its own attempt's session;
- budgets are the attempt's: turns, tokens, context and time hold at the door, whatever the program does;
- fetching a record can add to what is known and never takes from it;
- after `end` the door takes no more calls, those under way are cancelled, and what it recorded is the attempt's;
- `close` leaves nothing at the gateway, on every path.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from rookery.core import Limits, RookeryError, Sampling, SandboxError, TruncatedReason, UpstreamError
from rookery.gateway.client import GatewayClient, NoResponseError, SessionRecord
from rookery.gateway.session import Session
from rookery.upstreams.hang_detector import UpstreamEvidence

log = logging.getLogger("rookery.gateway")

CLOSE_SECONDS: Final = 15.0
POLL_SECONDS: Final = 1.0
"""Between two looks at a session's budgets: what is spent is refused at once, and its program ended soon after."""
MIN_DEADLINE: Final = 0.001
"""Seconds: a deadline is above 0."""
SANDBOX_KEY: Final = "rookery"
"""What programs in a box send: their address opens their one session, so that there is nothing to steal."""


def merge_records(known: SessionRecord, got: SessionRecord) -> SessionRecord:
    """Both records of a session together: nothing that is known goes."""
    turns = {turn.index: turn for turn in (*got.turns, *known.turns)}
    return SessionRecord(
        turns=tuple(turns[index] for index in sorted(turns)),
        truncated=known.truncated or got.truncated,
        waited=max(known.waited, got.waited),
        calls=max(known.calls, got.calls),
        failure=got.failure,
    )


class GatewaySession:
    """Open from `open_gateway_session` to its end."""

    def __init__(self, client: GatewayClient, session: Session, name: str, url: str, key: str) -> None:
        self.id = name
        self.url = url
        """Without a version: `{url}/v1/chat/completions`, `{url}/v1/messages`."""
        self.key = key
        self.record = SessionRecord()
        """What is known of what was recorded."""
        self.ended = False
        self._client = client
        self._session = session
        self._adopted: set[int] = set()
        self._waited = 0.0

    def environment(self) -> dict[str, str]:
        """What OpenAI's and Anthropic's own libraries read."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }

    async def fetch(self, *, timeout: float = 60.0) -> SessionRecord:
        """What is recorded by now."""
        self.record = merge_records(self.record, await self._client.fetch_record(self.id, timeout=timeout))
        return self.record

    async def end(self, *, timeout: float = 60.0) -> SessionRecord:
        """No more calls from now on; the attempt has every turn that was recorded. Ending twice is fine."""
        if not self.ended:
            await self._client.cancel(self.id, timeout=timeout)
            await self.fetch(timeout=timeout)
            self.ended = True
            self._adopt()
        return self.record

    def _adopt(self) -> None:
        new = [turn for turn in self.record.turns if turn.index not in self._adopted]
        self._session.adopt(new)
        self._adopted.update(turn.index for turn in new)
        self._session.truncated = self._session.truncated or self.record.truncated

    def check(self) -> None:
        """Raises the budget that the programs behind the door have spent, if they have."""
        if self.record.truncated is not None:
            raise self._session.truncate(self.record.truncated, "a budget of the rollout is spent")

    async def wait_truncated(self, every: float = POLL_SECONDS) -> TruncatedReason:
        """Returns when a budget is spent. Meanwhile, what the programs waited for others is no time of theirs."""
        while True:
            if (reason := await self.truncation()) is not None:
                return reason
            await asyncio.sleep(every)

    async def examine(self) -> tuple[UpstreamEvidence, ...]:
        """Find out whether the model servers of calls under way hang. What was seen is added to the attempt's."""
        seen = await self._client.examine(self.id)
        known = self._session.evidence
        known += [one for one in seen if one not in known]
        return seen

    async def check_upstream(self) -> None:
        """Raises `UpstreamError` (`upstream.hung`) where a model server of a call hangs, or hung before."""
        for one in await self.examine():
            if one.verdict == "hung":
                raise UpstreamError(f"{one.replica} does not respond: {one.text}", cause=one.cause)

    async def truncation(self) -> TruncatedReason | None:
        """The budget that is spent by now, if one is."""
        return (await self.status()).truncated

    async def status(self) -> SessionRecord:
        """The state of the session at the gateway, without its turns."""
        state = await self._client.status(self.id)
        if state.waited > self._waited:
            self._session.watch.credit(state.waited)
            self._waited = state.waited
        if state.truncated is not None:
            self.record = merge_records(self.record, SessionRecord(truncated=state.truncated))
        return state


def make_registration(name: str, limits: Limits, sampling: Sampling, seed: int, left: float) -> dict[str, Any]:
    """What the gateway is told: the budgets of an attempt that has `left` seconds, which may be none."""
    budgets = {
        "max_turns": limits.turns,
        "max_sequence_length": limits.context,
        "max_tokens": limits.tokens,
        "deadline": max(left, MIN_DEADLINE) if left < float("inf") else None,
    }
    return {
        "id": name,
        "sampling": msgspec.to_builtins(sampling),
        "budgets": {key: value for key, value in budgets.items() if value is not None},
        "seed": seed & (2**63 - 1),
    }


@asynccontextmanager
async def open_gateway_session(
    client: GatewayClient,
    session: Session,
    wish: dict[str, Any],
    *,
    listener: socket.socket | None = None,
    inside_url: str = "",
) -> AsyncIterator[GatewaySession]:
    """A door for this session: at a listener of a box's own, or else at the gateway's public address."""
    try:
        said = await client.register(wish)
    except BaseException as error:
        if listener is not None:
            listener.close()
        if isinstance(error, NoResponseError | asyncio.CancelledError):  # it may be there all the same
            await _delete(client, wish["id"])
        raise
    name = said["id"]
    public = client.address.public
    outside = f"{public}/v1/rollouts/{name}" if public else said["base_url"]
    url, key = (inside_url, SANDBOX_KEY) if listener is not None else (outside, said["secret"])
    door = GatewaySession(client, session, name, url, key)
    try:
        if listener is not None:
            try:
                await client.attach_listener(name, listener)
            except RookeryError as error:
                raise SandboxError(f"the gateway cannot listen in the sandbox: {error}") from error
        yield door
    finally:
        if listener is not None:
            client.detach_listener(name)
        await _delete(client, name)


async def _delete(client: GatewayClient, name: str) -> None:
    """Leaves nothing at the gateway; a gateway that is gone has nothing left."""
    try:
        await client.delete(name, timeout=CLOSE_SECONDS)
    except RookeryError as error:
        log.warning("the session %s could not be deleted at the gateway: %s", name, error)
