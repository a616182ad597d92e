"""`GatewayClient` and gateway sessions against gateways that fail, hang or answer nonsense."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import msgspec
import pytest

from rookery.core import Limits, RookeryError, Sampling
from rookery.engine.run_services import RunGateway
from rookery.gateway import client as gateway_client
from rookery.gateway import gateway_session as session_module
from rookery.gateway.client import GatewayAddress, GatewayClient, NoResponseError
from rookery.gateway.gateway_session import make_registration, open_gateway_session
from rookery.gateway.http_messages import read_error_message
from rookery.gateway.registration import Registration
from tests.servers import closed_port, raw_server
from tests.waiting import wait_until

BUSY = b'{"error":{"message":"no shard is up yet"}}'
Answers: TypeAlias = Callable[[str], tuple[int, bytes] | None]


@asynccontextmanager
async def client_of_server(answers: Answers) -> AsyncIterator[tuple[GatewayClient, list[str]]]:
    """Yield a client of a scripted gateway, which may also stay silent, and the list of its requests."""
    requests: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            await reader.readexactly(int(lines.get("content-length", 0)))
            requests.append(head.rpartition(" HTTP/1.1")[0].splitlines()[0].removesuffix(" HTTP/1.1"))
            response = answers(requests[-1])
            if response is None:
                await asyncio.Event().wait()
                return
            writer.write(
                b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (response[0], len(response[1]), response[1])
            )

    async with raw_server(serve) as url:
        client = GatewayClient(address(int(url.rpartition(":")[2])))
        try:
            yield client, requests
        finally:
            await client.close()


def address(port: int) -> GatewayAddress:
    return GatewayAddress(host="127.0.0.1", port=port, key="k", sockets="")


async def test_unanswered_register_status_and_cancel_are_infra_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.2)
    silent_at = ""

    def answers(requests: str) -> tuple[int, bytes] | None:
        if silent_at and requests.startswith(silent_at):
            return None
        return 200, b'{"id": "a", "base_url": "http://h", "secret": "s"}'

    registration = make_registration("a", Limits(), Sampling(), 0, 60.0)
    session: Any = SimpleNamespace(wait_observer=None, truncated=None, adopt=lambda turns: None)
    async with client_of_server(answers) as (client, _):
        silent_at = "POST /rollouts"
        with monkeypatch.context() as patch:
            patch.setitem(GatewayClient.register.__kwdefaults__, "timeout", 0.2)
            with pytest.raises(NoResponseError) as register:
                async with open_gateway_session(client, session, registration):
                    raise AssertionError("the session was opened")
        for name in ("status", "fetch_record", "cancel"):
            monkeypatch.setitem(getattr(GatewayClient, name).__kwdefaults__, "timeout", 0.2)
        silent_at = ""
        async with open_gateway_session(client, session, registration) as gateway_session:
            silent_at = "GET /rollouts/a"
            with pytest.raises(NoResponseError) as look:
                await gateway_session.truncation()
            silent_at = "POST /rollouts/a/cancel"
            with pytest.raises(NoResponseError) as end:
                await gateway_session.end(timeout=0.2)
    for raised in (register, look, end):
        assert (raised.value.fault, raised.value.code) == ("infra", "engine.gateway")


@pytest.mark.parametrize(("status", "fault"), [(500, "infra"), (503, "infra"), (404, "infra"), (400, "bug")])
async def test_gateway_failure_is_infra_and_rejected_request_is_a_bug(status: int, fault: str) -> None:
    async with client_of_server(lambda _: (status, BUSY)) as (client, _):
        with pytest.raises(RookeryError) as raised:
            await client.register({})
    assert raised.value.fault == fault


@pytest.mark.long
async def test_idempotent_requests_are_retried_until_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_client, "MIN_RETRY_SECONDS", 0.001)
    async with client_of_server(lambda _: (503, BUSY)) as (client, requests):
        with pytest.raises(NoResponseError, match=rf"GET /rollouts/a .*503.*{read_error_message(BUSY)}"):
            await client.status("a", timeout=1)
        assert len(requests) > 1, "an idempotent request is repeated"
    async with client_of_server(lambda _: None) as (client, _):
        with pytest.raises(NoResponseError, match="POST /pause"):
            await client.request("POST", "/pause", {}, timeout=0.2)
    with closed_port() as port:
        client = GatewayClient(address(port))
        with pytest.raises(NoResponseError, match="DELETE /rollouts/a"):
            await client.delete("a", timeout=1)
        await client.close()


async def test_undecodable_response_raises_an_error() -> None:
    async with client_of_server(lambda _: (200, b"<html>")) as (client, _):
        for request in (client.status("a"), client.fetch_record("a"), client.request("GET", "/state")):
            with pytest.raises(RookeryError) as raised:
                await request
            assert isinstance(raised.value.__cause__, msgspec.DecodeError)


def test_error_message_is_read_from_any_body() -> None:
    assert read_error_message(BUSY) == "no shard is up yet"
    for body in (b"<html>", b"[]", b'{"error":"text"}', b"\xff", b"", b'{"error":null}'):
        assert read_error_message(body) == body.decode("utf-8", "replace")


def registration(left: float = 60.0) -> dict[str, Any]:
    return make_registration("0.0.1", Limits(), Sampling(), 1, left)


@pytest.mark.long
@pytest.mark.parametrize("failure", ["cancelled", "unanswered"])
async def test_session_is_deleted_if_its_registration_may_have_succeeded(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = GatewayClient.register
    monkeypatch.setattr(
        GatewayClient, "register", lambda self, registration: register(self, registration, timeout=1)
    )
    if failure == "cancelled":
        monkeypatch.undo()
    session: Any = None
    async with client_of_server(lambda requests: (200, b"{}") if requests.startswith("DELETE") else None) as (
        client,
        requests,
    ):

        async def open_and_fail() -> None:
            async with open_gateway_session(client, session, registration()):
                pytest.fail("the session was opened")

        opening = asyncio.create_task(open_and_fail())
        await wait_until(lambda: len(requests) > 0)
        if failure == "cancelled":
            opening.cancel()
        with pytest.raises((asyncio.CancelledError, NoResponseError)):
            await opening
        created, deleted = requests
        assert created == "POST /rollouts"
        assert re.fullmatch(r"DELETE /rollouts/[0-9a-f]+-0\.0\.1", deleted)


async def test_session_that_already_exists_is_not_deleted() -> None:
    session: Any = None
    async with client_of_server(lambda _: (409, b'{"error":{"message":"there is one already"}}')) as (
        client,
        requests,
    ):
        with pytest.raises(RookeryError, match="there is one already"):
            async with open_gateway_session(client, session, registration()):
                pytest.fail("the session was opened")
        assert requests == ["POST /rollouts"]


async def test_failed_deletion_of_a_session_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.2)
    session: Any = None
    created = b'{"id":"0.0.1","base_url":"http://x","secret":"s"}'
    async with (
        client_of_server(lambda requests: (201, created) if requests.startswith("POST") else None) as (client, _),
        open_gateway_session(client, session, registration()),
    ):
        pass
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("0.0.1" in record.getMessage() for record in warnings)


@pytest.mark.parametrize("left", [-1.0, 0.0, 5.0, float("inf")])
def test_registration_carries_the_remaining_time(left: float) -> None:
    deadline = registration(left)["budgets"].get("deadline")
    assert deadline == (None if left == float("inf") else pytest.approx(max(left, 0.0), abs=0.01))
    msgspec.convert(registration(left), Registration)


async def test_gateway_of_a_run_is_closed_even_if_its_tunnel_fails_to_close(tmp_path: Path) -> None:
    closed: list[str] = []

    class BrokenTunnel:
        url = ""

        async def close(self) -> None:
            raise asyncio.CancelledError

    class FakeGateway:
        async def close(self) -> None:
            closed.append("gateway")

    settings: Any = SimpleNamespace(folder=str(tmp_path))
    run: Any = RunGateway(settings)
    run._tunnel, run._gateway = BrokenTunnel(), FakeGateway()
    (tmp_path / "gateway").mkdir()
    with pytest.raises(asyncio.CancelledError):
        await run.close()
    assert closed == ["gateway"]
    assert not (tmp_path / "gateway").exists()
