"""Errors that clients see do not contain the addresses of inference engines."""

import socket
from pathlib import Path

import pytest

from rookery.core import Truncation, UpstreamError
from rookery.gateway.model_calls import without_addresses
from rookery.upstreams import UpstreamConfig, open_upstream
from tests.gateway.kit import InProcessGateway, RegisteredSession, run_shard
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://10.1.2.3:8000/v1: refused. Check it.", "the inference engine: refused. Check it."),
        (
            "Cannot connect to host engine-7.cluster:8000 ssl:default",
            "Cannot connect to host the inference engine ssl:default",
        ),
        ("no route to 10.1.2.3", "no route to the inference engine"),
        ("[fd00::1]:8000 is down", "the inference engine is down"),
        ("localhost:8000 is down", "the inference engine is down"),
        ("version 1.2.3 took 10.5 s at step 3", "version 1.2.3 took 10.5 s at step 3"),
    ],
)
def test_without_addresses_replaces_addresses_only(text: str, shown: str) -> None:
    assert without_addresses(text) == shown


@pytest.mark.parametrize("stream", [False, True])
async def test_error_hides_the_address_of_an_unreachable_engine(tmp_path: Path, stream: bool) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        upstream = open_upstream(
            UpstreamConfig(kind="openai", urls=(f"http://127.0.0.1:{port}/v1",), model="m", retries=0), None
        )
        async with run_shard(tmp_path, upstream) as gateway:
            session = await gateway.register()
            answer = await gateway.chat(session, stream=stream)
        assert answer.status == 503
        assert str(port).encode() not in answer.body
        assert b"127.0.0.1" not in answer.body


@pytest.mark.parametrize(
    "error",
    [
        UpstreamError("http://10.0.0.9:8000/v1: it broke", cause="upstream.error"),
        Truncation("context", "http://10.0.0.9:8000/v1: too long"),
    ],
)
@pytest.mark.parametrize("after", [0, 1])
async def test_error_hides_the_address_of_a_failing_engine(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream, error: Exception, after: int
) -> None:
    upstream.default = ScriptedReply("abc", error=error, after=after)
    answer = await gateway.chat(session, stream=True)
    assert b"10.0.0.9" not in answer.body
    assert str(error).rpartition(": ")[2].encode() in answer.body
