"""Tests of the benchmark `gateway` with real processes and sockets and a stub gateway; figures are not judged."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_names, gateway, peers
from benchmarks import gateway_payloads as wire
from benchmarks import gateway_servers as servers
from benchmarks.gateway_conversations import ConversationCosts, TurnCost, run_conversations
from benchmarks.gateway_load_generator import (
    REQUESTS_PER_SESSION,
    Target,
    decode_chunked,
    measure_window,
    request_head,
)
from benchmarks.gateway_tokenization import tokenize_us
from benchmarks.instant_model import InstantModel, body_length, instant_model
from benchmarks.targets import GUARDED, select_guarded

pytestmark = pytest.mark.long

STUB = Path(__file__).with_name("gateway_stub.py")
WHOLE = wire.RequestFactory(size=4_096, prompt_tokens=wire.SHORT_PROMPT)
STREAM = wire.RequestFactory(size=4_096, prompt_tokens=wire.SHORT_PROMPT, stream=True)


def stub(upstream: InstantModel) -> list[str]:
    return [sys.executable, str(STUB), f"{upstream.origin}/v1"]


@pytest.fixture
async def upstream() -> AsyncIterator[InstantModel]:
    async with instant_model(gateway.UPSTREAM) as model:
        yield model


def streamed(number: int) -> bytes:
    return decode_chunked(b"".join(wire.stream_answer(number, wire.SHORT_PROMPT)))


# -------------------------------------------------------------------------------------------- requests and answers


def test_request_has_the_requested_size_and_is_valid() -> None:
    for size, prompt in ((4_096, wire.SHORT_PROMPT), (4 * wire.LONG_PROMPT, wire.LONG_PROMPT)):
        number, body = wire.RequestFactory(size=size, prompt_tokens=prompt).next()
        assert abs(len(body) - size) < 16
        assert json.loads(body)["messages"][-1]["role"] == "user"
        assert wire.parse_question(body) == (number, prompt)


@given(st.integers(0, 99_999_999), st.sampled_from([1, wire.SHORT_PROMPT, wire.LONG_PROMPT]))
def test_answer_has_its_number_500_tokens_and_the_prompt_ids(number: int, prompt: int) -> None:
    body = wire.full_answer(number, prompt)
    wire.check_answer(number, body, stream=False)
    answer = json.loads(body)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == wire.TOKENS
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"] == prompt
    decoded = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert decoded.decode() == choice["message"]["content"]


@given(st.integers(0, 99_999_999))
def test_stream_contains_the_same_as_the_full_answer(number: int) -> None:
    body = streamed(number)
    wire.check_answer(number, body, stream=True)
    events = [json.loads(event[6:]) for event in body.decode().split("\n\n") if event.startswith("data: {")]
    whole = json.loads(wire.full_answer(number, wire.SHORT_PROMPT))
    choices = [choice for event in events for choice in event["choices"]]
    assert [one for choice in choices for one in choice["token_ids"] or ()] == whole["choices"][0]["token_ids"]
    logprobs = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert events[-1]["usage"] == whole["usage"]


def test_ids_of_a_conversation_are_one_sequence() -> None:
    number, history = WHOLE.open_conversation()
    so_far: list[int] = []
    for turn in range(1, 8):
        body = WHOLE.close_body(history)
        question = wire.parse_question(body)
        assert question is not None
        assert question[0] == number
        answer = json.loads(wire.full_answer(*question))
        assert answer["prompt_token_ids"][: len(so_far)] == so_far
        so_far = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        messages = json.loads(body)["messages"]
        assert [message["role"] for message in messages[1:]] == ["user", *(["assistant", "user"] * (turn - 1))]
        following, history = WHOLE.next_turn(history, number, turn)
        response = json.loads(WHOLE.close_body(history))["messages"][-2]
        assert response == {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        number = following


@given(st.integers(0, 501))
def test_stream_without_an_event_is_rejected(at: int) -> None:
    events = streamed(7).split(b"\n\n")
    assert len(events) == 504  # the start, 500 tokens, usage, [DONE], and an empty rest
    del events[at + 1]  # the start holds only the prompt IDs
    with pytest.raises(wire.WrongAnswerError):
        wire.check_answer(7, b"\n\n".join(events), stream=True)


@given(st.data())
def test_truncated_or_foreign_answer_is_rejected(data: st.DataObject) -> None:
    for body, stream in ((wire.full_answer(7, wire.SHORT_PROMPT), False), (streamed(7), True)):
        cut = data.draw(st.integers(0, len(body) - 3))
        with pytest.raises(wire.WrongAnswerError):
            wire.check_answer(7, body[:cut], stream=stream)
        with pytest.raises(wire.WrongAnswerError):
            wire.check_answer(8, body, stream=stream)


def test_invalid_chunk_framing_is_rejected() -> None:
    body = b"".join(wire.stream_answer(7, wire.SHORT_PROMPT))
    for broken in (body[:-5], body[1:], body.replace(b"\r\ndata", b"\r\n data", 1), b""):
        with pytest.raises(wire.WrongAnswerError):
            decode_chunked(broken)


# ---------------------------------------------------------------------------------------------------- upstream


async def test_upstream_answers_in_request_order(upstream: InstantModel) -> None:
    address = "127.0.0.1", int(upstream.origin.rsplit(":", 1)[1])
    requests = [(ask.stream, *ask.next()) for ask in (STREAM, WHOLE, STREAM, WHOLE)]
    head = request_head(servers.CHAT)
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*address, limit=1 << 22)
        writer.write(b"".join(b"%s%d\r\n\r\n%s" % (head, len(body), body) for _, _, body in requests))
        for stream, number, _ in requests:
            answered = await reader.readuntil(b"\r\n\r\n")
            if stream:
                body = decode_chunked(await reader.readuntil(b"\r\n0\r\n\r\n"))
            else:
                body = await reader.readexactly(body_length(answered) or 0)
            wire.check_answer(number, body, stream=stream)
        writer.close()
        await writer.wait_closed()


async def test_upstream_reports_health_and_capacity(upstream: InstantModel) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{upstream.origin}/health") as answer:
            assert answer.status == 200
        async with session.get(f"{upstream.origin}/server_info?config_format=json") as answer:
            assert (await answer.json())["vllm_config"]["scheduler_config"]["max_num_seqs"] >= gateway.MANY


async def test_request_without_a_question_is_refused(upstream: InstantModel) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{upstream.origin}{servers.CHAT}", json={"messages": []}) as answer:
            assert answer.status == 400
        async with session.get(f"{upstream.origin}/v1/models") as answer:
            assert answer.status == 200


# ----------------------------------------------------------------------------------------------- load generator

Answer = Callable[[bytes], Awaitable[bytes | None]]


@asynccontextmanager
async def serve_answers(answer: Answer) -> AsyncIterator[Target]:
    """Serve in this process. `answer` gets a request body; None closes the connection."""
    open_count = 0

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_count
        open_count += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                response = await answer(await reader.readexactly(body_length(head) or 0))
                if response is None:
                    return
                writer.write(response)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed the connection
        finally:
            open_count -= 1
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=1 << 22)
    try:
        yield Target(server.sockets[0].getsockname()[1], (request_head(servers.CHAT),))
        async with asyncio.timeout(60):
            while open_count:
                await asyncio.sleep(0)
    finally:
        server.close()


def response(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


async def correct_answer(body: bytes) -> bytes:
    question = wire.parse_question(body)
    assert question is not None
    return response(wire.full_answer(*question))


@pytest.mark.parametrize("ask", [WHOLE, STREAM], ids=["whole", "stream"])
async def test_window_measures_its_answers(upstream: InstantModel, ask: wire.RequestFactory) -> None:
    async with servers.direct(upstream).target(1) as target:
        measured = await measure_window(target, ask, 4, 0.05)
    assert len(measured.latencies) == len(measured.first_byte_times) > 0
    assert measured.rps > 0
    assert measured.cpu_us is not None
    assert measured.cpu_us > 0
    assert 0 < measured.first_byte <= measured.latency
    if ask.stream:  # the upstream pauses 5 ms after the first token
        assert measured.latency >= 5


async def _answer_to_another(body: bytes) -> bytes:
    return response(wire.full_answer((wire.parse_question(body) or (0, 0))[0] + 1, wire.SHORT_PROMPT))


async def _answer_without_logprobs(body: bytes) -> bytes:
    return (await correct_answer(body)).replace(b'"logprobs":{"content":[', b'"logprobs":{"nothing":[', 1)


async def _error_answer(_: bytes) -> bytes:
    return response(b"{}", "503 Service Unavailable")


async def _close_connection(_: bytes) -> None:
    return None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (_answer_to_another, wire.WrongAnswerError),
        (_answer_without_logprobs, wire.WrongAnswerError),
        (_error_answer, wire.WrongAnswerError),
        (_close_connection, ConnectionError),
    ],
)
async def test_wrong_or_missing_answer_fails_the_measurement(answer: Answer, error: type[Exception]) -> None:
    async with serve_answers(answer) as target:
        with pytest.raises(error):
            await measure_window(target, WHOLE, 3, 0.01)


async def test_late_error_fails_the_measurement() -> None:
    count = 0

    async def later(body: bytes) -> bytes:
        nonlocal count
        count += 1
        return await (_error_answer if count > 50 else correct_answer)(body)

    async with serve_answers(later) as target:
        with pytest.raises(wire.WrongAnswerError, match="503"):
            await measure_window(target, WHOLE, 3, 30)


async def test_server_that_answers_in_bursts_is_measured_over_whole_bursts() -> None:
    width, waiting = 5, list[asyncio.Future[None]]()

    async def burst(body: bytes) -> bytes:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        if len(waiting) == width:
            for one in waiting:
                one.set_result(None)
            waiting.clear()
        # After the window some connections send no more, so the last burst stays incomplete.
        await asyncio.wait([mine], timeout=3)
        return await correct_answer(body)

    async with serve_answers(burst) as target:
        measured = await measure_window(target, WHOLE, width, 0.05)
    assert measured.latencies
    assert len(measured.latencies) % width == 0


async def test_requests_are_spread_over_sessions() -> None:
    paths: list[bytes] = []

    async def record_paths(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                paths.append(head.split(b" ", 2)[1])
                writer.write(await correct_answer(await reader.readexactly(body_length(head) or 0)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(record_paths, "127.0.0.1", 0, limit=1 << 22)
    heads = tuple(request_head(f"/{at}") for at in range(4_000))
    await measure_window(Target(server.sockets[0].getsockname()[1], heads), WHOLE, 2, 0.02)
    server.close()
    assert max(paths.count(path) for path in set(paths)) <= REQUESTS_PER_SESSION
    assert len(set(paths)) >= len(paths) / REQUESTS_PER_SESSION


# ------------------------------------------------------------------------------------------------- stdin_lifetime


def has_exited(pid: int) -> bool:
    """Return whether a process exits within 30 seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 30)[0])
    finally:
        os.close(descriptor)


# Prints its PID and that of a child which has left its session and ignores SIGTERM.
STUBBORN_PROGRAM = (
    "import os, signal, subprocess, sys, threading\n"
    "child = 'import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()'\n"
    "other = subprocess.Popen([sys.executable, '-c', child], start_new_session=True)\n"
    "print(os.getpid(), other.pid, flush=True)\n"
)


@pytest.mark.parametrize("how", ["command exits", "stdin closed", "parent killed"])
def test_no_process_survives_the_end_of_standard_input(how: str) -> None:
    program = STUBBORN_PROGRAM + ("" if how == "command exits" else "threading.Event().wait()\n")
    command = [sys.executable, "-m", "benchmarks.stdin_lifetime", sys.executable, "-c", program]
    parent = (
        "import subprocess, sys, threading\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
        "child.wait() if sys.stdin.read(1) == '' else None\n"
    )
    if how == "parent killed":
        command = [sys.executable, "-c", parent, *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        if how == "stdin closed":
            process.stdin.close()
        elif how == "parent killed":
            process.send_signal(signal.SIGKILL)
        assert all(has_exited(pid) for pid in pids)


def test_stdin_lifetime_returns_the_exit_status_of_its_command() -> None:
    command = [sys.executable, "-m", "benchmarks.stdin_lifetime", sys.executable, "-c", "raise SystemExit(3)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 3


# -------------------------------------------------------------------------------------------- servers


async def test_sessions_exist_during_their_block_and_need_their_key(upstream: InstantModel) -> None:
    async with servers.run_gateway(stub(upstream)) as server:
        async with server.target(3) as target:
            assert len(set(target.heads)) == 3
            measured = await measure_window(target, WHOLE, 2, 0.02)
            assert measured.latencies
            other = target.heads[0].split(b"Authorization", 1)[0] + target.heads[1].split(b"Authorization", 1)[1]
            with pytest.raises(wire.WrongAnswerError):
                await measure_window(target._replace(heads=(other,)), WHOLE, 1, 0.01)
        with pytest.raises(wire.WrongAnswerError, match="410"):
            await measure_window(target, WHOLE, 1, 0.01)


async def test_gateway_that_does_not_start_fails_with_its_own_message() -> None:
    with pytest.raises(servers.ServerStartError, match="no port is free"):
        async with servers.run_gateway([sys.executable, "-c", "raise SystemExit('no port is free')"]):
            pytest.fail("the gateway must not start")


async def test_floor_forwards_correct_answers(upstream: InstantModel) -> None:
    async with servers.run_floor(upstream) as server, server.target(1) as target:
        measured = await measure_window(target, WHOLE, 4, 0.02)
    assert measured.cpu_us is not None


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose peers run with this Python and have no scripts yet."""
    for name in ("bare-proxy", "litellm"):
        python = tmp_path / ".peers" / f"venv-{name}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
    (tmp_path / "benchmarks" / "peer_scripts").mkdir(parents=True)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.delenv("ROOKERY_PEERS", raising=False)
    return tmp_path


async def test_missing_or_failing_peer_server_yields_a_note(checkout: Path) -> None:
    program = checkout / "benchmarks" / "peer_scripts" / "bare_proxy.py"
    async with servers.run_peer_server("other", "bare_proxy.py") as server:
        assert isinstance(server, str)
        assert "make peers" in server
    async with servers.run_peer_server("bare-proxy", "bare_proxy.py") as server:
        assert isinstance(server, str)
        assert "peer_scripts" in server
    program.write_text("raise SystemExit('no port is free')")
    async with servers.run_peer_server("bare-proxy", "bare_proxy.py") as server:
        assert isinstance(server, str)
        assert "no port is free" in server


async def test_peer_gets_none_of_our_environment_variables(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "1")
    program = checkout / "benchmarks" / "peer_scripts" / "bare_proxy.py"
    program.write_text(
        "import os, threading\n"
        "print('seen', *sorted(os.environ), len(os.listdir()), 'at http://127.0.0.1:1', flush=True)\n"
        "threading.Event().wait()"
    )
    async with servers.run_peer_server("bare-proxy", "bare_proxy.py") as server:
        assert isinstance(server, servers.ServerUnderTest)
        assert server.name == "seen HOME LC_ALL PATH TMPDIR 0"


# --------------------------------------------------------------------------------------------- whole benchmark

TINY = gateway.Size(
    rounds=1,
    seconds_1=0.01,
    seconds_many=0.01,
    litellm_rounds=1,
    litellm_cases=frozenset({gateway.SHORT}),
    conversations=2,
    turn_rounds=1,
    tokenizations=1,
)


async def test_benchmark_has_every_figure_and_names_missing_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    messages: list[str] = []
    rows = await gateway.measure(TINY, quick=False, progress=messages.append, command=stub)
    assert "gateway" in bench_names()
    assert {(row.name, row.target) for row in rows if row.target} == {
        ("added_ms_c1", "<= 0.7"),
        ("rps_c64", ">= 0.7x"),
        ("rps_c64", ">= 0.5x"),
        ("vs_litellm", ">= 8x"),
        ("first_byte_ms", "<= 1"),
        ("stream_rps_c16", ">= 1x"),
        ("rps_c16_32k", ">= 1.2x"),
        ("turn_cost_growth", "<= 1.05"),
        ("turn_2_cpu_us", ">= 0.5x"),
        ("long_prompt_turn_growth", "<= 1.2"),
    }
    assert len(select_guarded("gateway", tuple(rows), GUARDED["gateway"])) == len(GUARDED["gateway"])
    assert all(row.ours is not None for row in rows if row.name != "tokenise_us_per_1k")
    for row in rows:
        if row.peer in (gateway.BARE, gateway.LITELLM):
            assert (row.theirs, row.ratio) == (None, None)
            assert "make peers" in row.note
    assert any("make peers" in line for line in messages)


async def test_peer_with_wrong_answers_is_missing_from_the_results(checkout: Path) -> None:
    wrong = (
        "import asyncio\n"
        "async def one(reader, writer):\n"
        "    await reader.readuntil(b'\\r\\n\\r\\n')\n"
        "    writer.write(b'HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}')\n"
        "async def main():\n"
        "    server = await asyncio.start_server(one, '127.0.0.1', 0)\n"
        "    print('wrong at http://127.0.0.1:%d' % server.sockets[0].getsockname()[1], flush=True)\n"
        "    await server.serve_forever()\n"
        "asyncio.run(main())\n"
    )
    (checkout / "benchmarks" / "peer_scripts" / "bare_proxy.py").write_text(wrong)
    rows = await gateway.measure(TINY, quick=False, progress=lambda _: None, command=stub)
    theirs = [row for row in rows if row.peer == "wrong"]
    assert theirs
    assert all(row.theirs is None and row.note for row in theirs)
    assert all(row.theirs is not None for row in rows if row.peer == gateway.FLOOR)


async def test_early_and_late_turns_are_measured(upstream: InstantModel) -> None:
    async with servers.run_floor(upstream) as server, server.target(1) as target:
        cost = await run_conversations(target, 2, all_turns=False)
    assert cost.early > 0
    assert cost.late > 0


def test_growth_excludes_the_cost_of_larger_json() -> None:
    floor = (TurnCost(100, 400), TurnCost(200, 520))
    assert ConversationCosts((TurnCost(200, 510),), floor).growth == pytest.approx(1.0)
    assert ConversationCosts(
        (TurnCost(200, 710), TurnCost(200, 710), TurnCost(1, 10_000)), floor
    ).growth == pytest.approx(2.0)
    names: list[Any] = [row.name for row in ConversationCosts((TurnCost(200, 510),), floor).rows()]
    assert names == ["turn_cost_growth", "turn_2_cpu_us", "turn_100_cpu_us"]


def test_missing_tokenizer_makes_its_figure_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    row = tokenize_us(1)
    assert row.ours is None
    assert "tokenizer" in row.note
