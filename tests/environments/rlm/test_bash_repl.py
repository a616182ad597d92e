"""The server for the commands of a bash REPL accepts well-formed, authenticated requests only."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.environments.rlm import bash_repl
from rookery.environments.rlm.bash_repl import MAX_ARGS, MAX_BODY, BashRepl, parse_batch
from rookery.environments.rlm.options import RlmOptions


class _RecordingFunctions:
    """Records the calls of the REPL's functions."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.tools: dict[str, Any] = {}

    async def llm(self, *args: Any) -> str:
        self.calls.append(args)
        return "reply"

    async def answer(self, value: str) -> None:
        self.calls.append(value)


class _RecordingWriter:
    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None: ...

    def close(self) -> None:
        self.closed = True


async def send_request(data: bytes, close_after: float = 60.0) -> tuple[bytes, list[Any]]:
    """Send a request over a connection that closes after some seconds. Return the response and the calls made."""
    functions, writer = _RecordingFunctions(), _RecordingWriter()
    repl = BashRepl(None, functions, RlmOptions())  # type: ignore[arg-type]
    reader = asyncio.StreamReader()
    reader.feed_data(data.replace(b"SECRET", repl.secret.encode()))
    closing = asyncio.get_running_loop().call_later(close_after, reader.feed_eof)
    serving = asyncio.create_task(repl.on_connection(reader, writer))  # type: ignore[arg-type]
    await serving
    closing.cancel()
    assert writer.closed
    assert (repl.requests, repl.running_commands) == (set(), 0)
    return writer.data, functions.calls


async def test_well_formed_request_is_served() -> None:
    data, calls = await send_request("SECRET llm 3 2\n8\n--system5\nürk\n1\naxy".encode())
    assert (data, calls) == (b"ok\nreply\n", [("a\n\nxy", "ürk\n", None)])


async def test_closed_connection_ends_the_request_even_if_its_call_ignores_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bash_repl, "END_SECONDS", 0.01)
    release = asyncio.Event()

    async def never_ends(*_: object) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    monkeypatch.setattr(BashRepl, "_run_command", never_ends)
    assert await send_request(b"SECRET llm 0 0\n", close_after=0.05) == (b"", [])
    release.set()


@pytest.mark.parametrize(
    "request_text",
    [f"llm {MAX_ARGS + 1} 0\n", f"llm 0 {MAX_BODY + 1}\n", f"llm 1 0\n{MAX_BODY + 1}\n"],
)
async def test_requests_over_a_limit_are_refused(request_text: str) -> None:
    data, calls = await send_request(f"SECRET {request_text}".encode())
    assert (data.split(b"\n")[0], calls) == (b"no", [])


async def test_bytes_of_all_running_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bash_repl, "MAX_RESERVED", 100)
    release, functions = asyncio.Event(), _RecordingFunctions()

    async def llm(*_: Any) -> str:
        await release.wait()
        return "reply"

    functions.llm = llm  # type: ignore[method-assign]
    repl = BashRepl(None, functions, RlmOptions())  # type: ignore[arg-type]

    async def call() -> bytes:
        reader, writer = asyncio.StreamReader(), _RecordingWriter()
        reader.feed_data(f"{repl.secret} llm 0 60\n".encode() + b"x" * 60)
        await repl.on_connection(reader, writer)  # type: ignore[arg-type]
        return writer.data

    running = asyncio.create_task(call())
    while not repl.running_commands:
        await asyncio.sleep(0)
    assert (await call()).startswith(b"no\n")
    release.set()
    assert await running == b"ok\nreply\n"
    assert (await call(), repl.reserved_bytes) == (b"ok\nreply\n", 0)


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b"SECRET", b" ", b"\n", b"llm", b"answer", b"0", b"1", b"-1", b"99", b"\xff"]),
        ),
        max_size=12,
    )
)
def test_requests_without_the_secret_call_nothing_and_get_no_response(parts: list[bytes]) -> None:
    data = b"".join(parts)

    async def run() -> None:
        response, calls = await send_request(data + b"\n", close_after=0.05)
        if not data.lstrip().startswith(b"SECRET"):
            assert (response, calls) == (b"", [])

    asyncio.run(run())


@given(st.lists(st.text(min_size=1).filter(str.strip), max_size=5))
def test_batch_file_is_a_json_list_or_lines_that_may_be_json(prompts: list[str]) -> None:
    assert parse_batch(json.dumps(prompts)) == prompts
    assert parse_batch("\n".join(map(json.dumps, prompts))) == prompts


def test_lines_that_are_not_json_are_prompts() -> None:
    assert parse_batch('[not json\n\n"half\n plain \n') == ["[not json", '"half', " plain "]
