"""An attempt's session at the HTTP gateway, for agents that call models over HTTP. Runs in runners.

Guarantees:
- a program needs only a base URL and a key, which give access to its own attempt's session and nothing else;
- the gateway enforces the attempt's budgets of turns, tokens, context and time;
- fetching the record from the gateway adds turns to the known record and never removes any;
- after `end`, the gateway accepts no call, calls in flight are cancelled, and the recorded turns are added to the
  attempt;
- when the context manager exits, also by an exception, it deletes the session at the gateway. A failure of that is
  only logged.
"""

import asyncio
import logging
import secrets
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
"""Interval at which `wait_truncated` asks the gateway whether a budget is exhausted, so that a program can be
stopped soon after its calls are rejected."""
MIN_DEADLINE: Final = 0.001
"""Smallest deadline of a registration in seconds, used if no time is left: the gateway requires more than 0."""
SANDBOX_KEY: Final = "rookery"
"""API key for programs in a sandbox. It is not secret: the listening socket in the sandbox serves only the session
of that sandbox."""


def merge_records(known: SessionRecord, new: SessionRecord) -> SessionRecord:
    """Merge a newly fetched record of a session into the known one. No turn and no truncation is lost."""
    turns = {turn.index: turn for turn in (*new.turns, *known.turns)}
    return SessionRecord(
        turns=tuple(turns[index] for index in sorted(turns)),
        truncated=known.truncated or new.truncated,
        waited=max(known.waited, new.waited),
        calls=max(known.calls, new.calls),
        failure=new.failure,
    )


class GatewaySession:
    """An attempt's session at the HTTP gateway, for programs that call models over HTTP.

    Created by `open_gateway_session`. `session` is the attempt's own session in this process.
    """

    def __init__(
        self, client: GatewayClient, session: Session, session_id: str, url: str, key: str, traceparent: str = ""
    ) -> None:
        self.id = session_id
        self.url = url
        """Base URL of the session, without an API version: append for example `/v1/chat/completions` or
        `/v1/messages`."""
        self.openai_url = f"{url}/v1"
        self.key = key
        self.model = ""
        """Name of the model that programs must request; empty if any name is accepted."""
        self.traceparent = traceparent
        """W3C trace context of the attempt's stage; empty if the run sends no traces."""
        self.record = SessionRecord()
        """The session's turns and state, as last fetched from the gateway."""
        self.ended = False
        self._client = client
        self._session = session
        self._adopted: set[int] = set()
        self._waited = 0.0

    def environment(self) -> dict[str, str]:
        """Return environment variables with URL and key for OpenAI's and Anthropic's client libraries.

        If the run sends traces, `TRACEPARENT` is the trace context for programs that send their own.
        """
        trace = {"TRACEPARENT": self.traceparent} if self.traceparent else {}
        return {
            **trace,
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }

    def hide_key(self, data: bytes) -> bytes:
        """Return output of a program as it is: the key of a session is of no use after its end."""
        return data

    async def fetch(self, *, timeout: float = 60.0) -> SessionRecord:
        """Fetch the session's record with its turns from the gateway, and merge it into `record`."""
        self.record = merge_records(self.record, await self._client.fetch_record(self.id, timeout=timeout))
        return self.record

    async def end(self, *, timeout: float = 60.0) -> SessionRecord:
        """End the session at the gateway, fetch its record, and add the recorded turns to the attempt.

        The gateway accepts no more calls and cancels those in flight. Ending twice is allowed.
        """
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
        """Raise `Truncation` if a budget was exhausted when the state was last fetched.

        Does not ask the gateway.
        """
        if self.record.truncated is not None:
            raise self._session.truncate(self.record.truncated, "a budget of the rollout is exhausted")

    async def wait_truncated(self, every: float = POLL_SECONDS) -> TruncatedReason:
        """Poll the gateway every `every` seconds until a budget is exhausted, and return which one.

        Meanwhile, time that calls wait in pauses and queues is credited to the attempt's clock.
        """
        while True:
            if (reason := await self.truncation()) is not None:
                return reason
            await asyncio.sleep(every)

    async def examine(self) -> tuple[UpstreamEvidence, ...]:
        """Have the gateway check whether the replicas of calls in flight hang.

        Returns the observations, and adds them to those of the attempt.
        """
        seen = await self._client.examine(self.id)
        known = self._session.evidence
        known += [one for one in seen if one not in known]
        return seen

    async def check_upstream(self) -> None:
        """Raise `UpstreamError` if an inference engine hangs now or hung during an earlier call.

        The cause of the error is `upstream.hung`.
        """
        for one in await self.examine():
            if one.verdict == "hung":
                raise UpstreamError(f"{one.replica} does not respond: {one.text}", cause=one.cause)

    async def truncation(self) -> TruncatedReason | None:
        """Ask the gateway which budget is exhausted; return None if no budget is exhausted."""
        return (await self.status()).truncated

    async def status(self) -> SessionRecord:
        """Fetch the session's state without its turns, and exclude its waiting times from the attempt's time."""
        state = await self._client.status(self.id)
        if state.waited > self._waited:
            self._session.wait_observer.exclude_at_least(state.waited)
            self._waited = state.waited
        if state.truncated is not None:
            self.record = merge_records(self.record, SessionRecord(truncated=state.truncated))
        return state


def make_registration(
    session_id: str, limits: Limits, sampling: Sampling, seed: int, left: float
) -> dict[str, Any]:
    """Return the registration of a session as plain data. `left` is the number of seconds left to the attempt."""
    budgets = {
        "max_turns": limits.turns,
        "max_sequence_length": limits.context,
        "max_tokens": limits.tokens,
        "deadline": max(left, MIN_DEADLINE) if left < float("inf") else None,
    }
    return {
        "id": session_id,
        "sampling": msgspec.to_builtins(sampling),
        "budgets": {key: value for key, value in budgets.items() if value is not None},
        "seed": seed & (2**63 - 1),
    }


@asynccontextmanager
async def open_gateway_session(
    client: GatewayClient,
    session: Session,
    registration: dict[str, Any],
    *,
    listener: socket.socket | None = None,
    inside_url: str = "",
) -> AsyncIterator[GatewaySession]:
    """Context manager that registers a session at the gateway for an attempt, and deletes it on exit.

    With `listener`, a listening socket inside a sandbox, the gateway serves the session on that socket, and
    `inside_url` is its URL for programs in the sandbox. Without it, programs use the gateway's own address.
    """
    own_gateway = bool(client.address.sockets)
    if not own_gateway:  # other runs use the same gateway and have attempts of the same name
        registration = {**registration, "id": f"{secrets.token_hex(8)}-{registration['id']}"}
    try:
        registered = await client.register(registration)
    except BaseException as error:
        if listener is not None:
            listener.close()
        if isinstance(error, NoResponseError | asyncio.CancelledError):  # it may be registered
            await _delete(client, registration["id"])
        raise
    session_id = registered["id"]
    if listener is not None and own_gateway:
        url, key = inside_url, SANDBOX_KEY
    elif listener is not None:
        url, key = f"{inside_url}/v1/rollouts/{session_id}", registered["secret"]
    else:
        public = client.address.public
        url = f"{public}/v1/rollouts/{session_id}" if public else registered["base_url"]
        key = registered["secret"]
    try:
        if listener is not None:
            try:
                await client.attach_listener(session_id, listener)
            except RookeryError as error:
                raise SandboxError(f"the gateway cannot listen in the sandbox: {error}") from error
        yield GatewaySession(client, session, session_id, url, key, registration.get("traceparent", ""))
    finally:
        if listener is not None:
            client.detach_listener(session_id)
        await _delete(client, session_id)


async def _delete(client: GatewayClient, session_id: str) -> None:
    """Delete a session at the gateway. A failure is only logged."""
    try:
        await client.delete(session_id, timeout=CLOSE_SECONDS)
    except RookeryError as error:
        log.warning("session %s could not be deleted at the gateway: %s", session_id, error)
