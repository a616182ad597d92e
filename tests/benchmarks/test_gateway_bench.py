"""The gateway bench over real processes and sockets, with a stub for the gateway; figures are not judged here."""

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
from benchmarks import gateway_servers as contenders
from benchmarks.gateway_load import PER_SESSION, Target, dechunked, head, window
from benchmarks.gateway_tokens import tokenise_us
from benchmarks.gateway_turns import Cost, Turns, converse
from benchmarks.instant_model import Instant, body_length, instant_model

pytestmark = pytest.mark.long

STUB = Path(__file__).with_name("gateway_stub.py")
ASK = wire.Ask(size=4_096, prompt_tokens=wire.SHORT_PROMPT)
STREAM = wire.Ask(size=4_096, prompt_tokens=wire.SHORT_PROMPT, stream=True)


def stub(upstream: Instant) -> list[str]:
    return [sys.executable, str(STUB), f"{upstream.origin}/v1"]


@pytest.fixture
async def upstream() -> AsyncIterator[Instant]:
    async with instant_model(gateway.UPSTREAM) as model:
        yield model


def streamed(number: int) -> bytes:
    return dechunked(b"".join(wire.streamed_answer(number, wire.SHORT_PROMPT)))


# -------------------------------------------------------------------------------------------- what is answered


def test_requests_have_the_size_that_is_said_and_are_valid() -> None:
    for size, prompt in ((4_096, wire.SHORT_PROMPT), (4 * wire.LONG_PROMPT, wire.LONG_PROMPT)):
        number, body = wire.Ask(size=size, prompt_tokens=prompt).next()
        assert abs(len(body) - size) < 16
        assert json.loads(body)["messages"][-1]["role"] == "user"
        assert wire.asked(body) == (number, prompt)


@given(st.integers(0, 99_999_999), st.sampled_from([1, wire.SHORT_PROMPT, wire.LONG_PROMPT]))
def test_an_answer_holds_its_number_500_tokens_and_the_prompts_ids(number: int, prompt: int) -> None:
    body = wire.whole_answer(number, prompt)
    wire.check(number, body, stream=False)
    answer = json.loads(body)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == wire.TOKENS
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"] == prompt
    spelled = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert spelled.decode() == choice["message"]["content"]


@given(st.integers(0, 99_999_999))
def test_a_streamed_answer_is_the_whole_one_in_pieces(number: int) -> None:
    body = streamed(number)
    wire.check(number, body, stream=True)
    events = [json.loads(event[6:]) for event in body.decode().split("\n\n") if event.startswith("data: {")]
    whole = json.loads(wire.whole_answer(number, wire.SHORT_PROMPT))
    choices = [choice for event in events for choice in event["choices"]]
    assert [one for choice in choices for one in choice["token_ids"] or ()] == whole["choices"][0]["token_ids"]
    logprobs = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert events[-1]["usage"] == whole["usage"]


def test_the_ids_of_a_conversation_are_one_sequence() -> None:
    number, history = ASK.opened()
    so_far: list[int] = []
    for turn in range(1, 8):
        body = ASK.closed(history)
        found = wire.asked(body)
        assert found is not None
        assert found[0] == number
        answer = json.loads(wire.whole_answer(*found))
        assert answer["prompt_token_ids"][: len(so_far)] == so_far
        so_far = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        messages = json.loads(body)["messages"]
        assert [message["role"] for message in messages[1:]] == ["user", *(["assistant", "user"] * (turn - 1))]
        following, history = ASK.turn(history, number, turn)
        reply = json.loads(ASK.closed(history))["messages"][-2]
        assert reply == {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        number = following


@given(st.integers(0, 501))
def test_a_stream_that_lacks_an_event_is_not_right(at: int) -> None:
    events = streamed(7).split(b"\n\n")
    assert len(events) == 504  # the start, 500 tokens, usage, the end, and nothing after it
    del events[at + 1]  # the start says nothing but the prompt's ids
    with pytest.raises(wire.WrongAnswer):
        wire.check(7, b"\n\n".join(events), stream=True)


@given(st.data())
def test_an_answer_that_is_cut_or_anothers_is_not_right(data: st.DataObject) -> None:
    for body, stream in ((wire.whole_answer(7, wire.SHORT_PROMPT), False), (streamed(7), True)):
        cut = data.draw(st.integers(0, len(body) - 3))
        with pytest.raises(wire.WrongAnswer):
            wire.check(7, body[:cut], stream=stream)
        with pytest.raises(wire.WrongAnswer):
            wire.check(8, body, stream=stream)


def test_chunks_out_of_order_are_not_right() -> None:
    body = b"".join(wire.streamed_answer(7, wire.SHORT_PROMPT))
    for broken in (body[:-5], body[1:], body.replace(b"\r\ndata", b"\r\n data", 1), b""):
        with pytest.raises(wire.WrongAnswer):
            dechunked(broken)


# ---------------------------------------------------------------------------------------------------- upstream


async def test_the_upstream_keeps_the_order_of_its_answers(upstream: Instant) -> None:
    place = "127.0.0.1", int(upstream.origin.rsplit(":", 1)[1])
    asked = [(ask.stream, *ask.next()) for ask in (STREAM, ASK, STREAM, ASK)]
    first = head(contenders.CHAT)
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*place, limit=1 << 22)
        writer.write(b"".join(b"%s%d\r\n\r\n%s" % (first, len(body), body) for _, _, body in asked))
        for stream, number, _ in asked:
            answered = await reader.readuntil(b"\r\n\r\n")
            if stream:
                body = dechunked(await reader.readuntil(b"\r\n0\r\n\r\n"))
            else:
                body = await reader.readexactly(body_length(answered) or 0)
            wire.check(number, body, stream=stream)
        writer.close()
        await writer.wait_closed()


async def test_the_upstream_says_that_it_is_well_and_how_much_it_takes(upstream: Instant) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{upstream.origin}/health") as answer:
            assert answer.status == 200
        async with session.get(f"{upstream.origin}/server_info?config_format=json") as answer:
            assert (await answer.json())["vllm_config"]["scheduler_config"]["max_num_seqs"] >= gateway.MANY


async def test_a_request_without_a_question_is_refused(upstream: Instant) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{upstream.origin}{contenders.CHAT}", json={"messages": []}) as answer:
            assert answer.status == 400
        async with session.get(f"{upstream.origin}/v1/models") as answer:
            assert answer.status == 200


# ----------------------------------------------------------------------------------------------- who asks

Answering = Callable[[bytes], Awaitable[bytes | None]]


@asynccontextmanager
async def serving(answer: Answering) -> AsyncIterator[Target]:
    """A server in this process. `answer` gets a body; None closes the connection."""
    held = 0

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        held += 1
        try:
            while asked := await reader.readuntil(b"\r\n\r\n"):
                reply = await answer(await reader.readexactly(body_length(asked) or 0))
                if reply is None:
                    return
                writer.write(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other side is gone, as it should be at the end
        finally:
            held -= 1
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=1 << 22)
    try:
        yield Target(server.sockets[0].getsockname()[1], (head(contenders.CHAT),))
        async with asyncio.timeout(60):
            while held:
                await asyncio.sleep(0)
    finally:
        server.close()


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


async def right(body: bytes) -> bytes:
    found = wire.asked(body)
    assert found is not None
    return reply(wire.whole_answer(*found))


@pytest.mark.parametrize("ask", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_window_measures_what_was_answered_in_it(upstream: Instant, ask: wire.Ask) -> None:
    async with contenders.direct(upstream).target(1) as target:
        measured = await window(target, ask, 4, 0.05)
    assert len(measured.latencies) == len(measured.firsts) > 0
    assert measured.rps > 0
    assert measured.cpu_us is not None
    assert measured.cpu_us > 0
    assert 0 < measured.first <= measured.latency
    if ask.stream:  # the first token comes before the pause, the others after it
        assert measured.latency >= 5


async def _another(body: bytes) -> bytes:
    return reply(wire.whole_answer((wire.asked(body) or (0, 0))[0] + 1, wire.SHORT_PROMPT))


async def _short(body: bytes) -> bytes:
    return (await right(body)).replace(b'"logprobs":{"content":[', b'"logprobs":{"nothing":[', 1)


async def _error(_: bytes) -> bytes:
    return reply(b"{}", "503 Service Unavailable")


async def _closed(_: bytes) -> None:
    return None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_another, "without its number"),
        (_short, "cannot be read"),
        (_error, "503"),
        (_closed, "closed a connection"),
    ],
)
async def test_an_answer_that_is_wrong_or_missing_fails_the_measurement(answer: Answering, words: str) -> None:
    async with serving(answer) as target:
        with pytest.raises((wire.WrongAnswer, ConnectionError), match=words):
            await window(target, ASK, 3, 0.01)


async def test_an_error_after_many_right_answers_fails_it_as_well() -> None:
    asked = 0

    async def later(body: bytes) -> bytes:
        nonlocal asked
        asked += 1
        return await (_error if asked > 50 else right)(body)

    async with serving(later) as target:
        with pytest.raises(wire.WrongAnswer, match="503"):
            await window(target, ASK, 3, 30)


async def test_who_answers_many_at_once_is_measured_over_whole_bursts() -> None:
    width, waiting = 5, list[asyncio.Future[None]]()

    async def burst(body: bytes) -> bytes:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        if len(waiting) == width:
            for one in waiting:
                one.set_result(None)
            waiting.clear()
        # The last ones ask no more when the window is over, so a burst is not waited for beyond it.
        await asyncio.wait([mine], timeout=3)
        return await right(body)

    async with serving(burst) as target:
        measured = await window(target, ASK, width, 0.05)
    assert measured.latencies
    assert len(measured.latencies) % width == 0


async def test_a_session_gets_few_requests_as_long_as_there_are_enough() -> None:
    paths: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while asked := await reader.readuntil(b"\r\n\r\n"):
                paths.append(asked.split(b" ", 2)[1])
                writer.write(await right(await reader.readexactly(body_length(asked) or 0)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(note, "127.0.0.1", 0, limit=1 << 22)
    heads = tuple(head(f"/{at}") for at in range(4_000))
    await window(Target(server.sockets[0].getsockname()[1], heads), ASK, 2, 0.02)
    server.close()
    assert max(paths.count(path) for path in set(paths)) <= PER_SESSION
    assert len(set(paths)) >= len(paths) / PER_SESSION


# ------------------------------------------------------------------------------------------------- leash


def ended(pid: int) -> bool:
    """Whether a process ends, within the patience of a leash and some more."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 30)[0])
    finally:
        os.close(descriptor)


# Says its own pid and that of a child which has left its session and does not listen to SIGTERM.
STUBBORN = (
    "import os, signal, subprocess, sys, threading\n"
    "child = 'import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()'\n"
    "other = subprocess.Popen([sys.executable, '-c', child], start_new_session=True)\n"
    "print(os.getpid(), other.pid, flush=True)\n"
)


@pytest.mark.parametrize("how", ["the program ends", "standard input ends", "who holds it is killed"])
def test_nothing_is_left_when_a_leash_ends(how: str) -> None:
    program = STUBBORN + ("" if how == "the program ends" else "threading.Event().wait()\n")
    words = [sys.executable, "-m", "benchmarks.stdin_lifetime", sys.executable, "-c", program]
    holder = (
        "import subprocess, sys, threading\n"
        "leash = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
        "leash.wait() if sys.stdin.read(1) == '' else None\n"
    )
    if how == "who holds it is killed":
        words = [sys.executable, "-c", holder, *words]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        if how == "standard input ends":
            process.stdin.close()
        elif how == "who holds it is killed":
            process.send_signal(signal.SIGKILL)
        assert all(ended(pid) for pid in pids)


def test_a_leash_has_the_status_of_its_program() -> None:
    words = [sys.executable, "-m", "benchmarks.stdin_lifetime", sys.executable, "-c", "raise SystemExit(3)"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 3


# -------------------------------------------------------------------------------------------- who is asked


async def test_sessions_are_there_for_their_block_and_only_for_their_secret(upstream: Instant) -> None:
    async with contenders.ours(stub(upstream)) as made:
        async with made.target(3) as target:
            assert len(set(target.heads)) == 3
            measured = await window(target, ASK, 2, 0.02)
            assert measured.latencies
            other = target.heads[0].split(b"Authorization", 1)[0] + target.heads[1].split(b"Authorization", 1)[1]
            with pytest.raises(wire.WrongAnswer):
                await window(target._replace(heads=(other,)), ASK, 1, 0.01)
        with pytest.raises(wire.WrongAnswer, match="410"):
            await window(target, ASK, 1, 0.01)


async def test_a_gateway_that_does_not_start_fails_in_its_own_words() -> None:
    with pytest.raises(contenders.NotServing, match="no port is free"):
        async with contenders.ours([sys.executable, "-c", "raise SystemExit('no port is free')"]):
            pytest.fail("it does not serve")


async def test_the_floor_answers_right(upstream: Instant) -> None:
    async with contenders.floor(upstream) as made, made.target(1) as target:
        measured = await window(target, ASK, 4, 0.02)
    assert measured.cpu_us is not None


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose peers all have this Python for their environment, and no programs."""
    for name in ("bare-proxy", "litellm"):
        python = tmp_path / ".peers" / f"venv-{name}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
    (tmp_path / "benchmarks" / "peer_scripts").mkdir(parents=True)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(contenders, "ROOT", tmp_path)
    monkeypatch.delenv("ROOKERY_PEERS", raising=False)
    return tmp_path


async def test_a_peer_that_is_missing_or_does_not_start_gives_a_note(checkout: Path) -> None:
    program = checkout / "benchmarks" / "peer_scripts" / "bare_proxy.py"
    async with contenders.peer("other", "bare_proxy.py") as made:
        assert isinstance(made, str)
        assert "make peers" in made
    async with contenders.peer("bare-proxy", "bare_proxy.py") as made:
        assert isinstance(made, str)
        assert "checkout" in made
    program.write_text("raise SystemExit('no port is free')")
    async with contenders.peer("bare-proxy", "bare_proxy.py") as made:
        assert isinstance(made, str)
        assert "no port is free" in made


async def test_a_peer_sees_nothing_of_our_environment(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    program = checkout / "benchmarks" / "peer_scripts" / "bare_proxy.py"
    program.write_text(
        "import os, threading\n"
        "print('seen', *sorted(os.environ), len(os.listdir()), 'at http://127.0.0.1:1', flush=True)\n"
        "threading.Event().wait()"
    )
    async with contenders.peer("bare-proxy", "bare_proxy.py") as made:
        assert isinstance(made, contenders.Contender)
        assert made.name == "seen HOME LC_ALL PATH TMPDIR 0"


# --------------------------------------------------------------------------------------------- the whole bench

TINY = gateway.Size(
    rounds=1,
    seconds_1=0.01,
    seconds_many=0.01,
    litellm_rounds=1,
    litellm_cases=frozenset({gateway.SHORT}),
    conversations=2,
    turn_rounds=1,
    tokenise=1,
)


async def test_the_bench_has_every_figure_and_names_the_peers_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    said: list[str] = []
    rows = await gateway.measure(TINY, quick=False, progress=said.append, words=stub)
    assert "gateway" in bench_names()
    targets = {row.name: row.target for row in rows if row.target}
    assert targets == {
        "added_ms_c1": "<= 0.7",
        "rps_c64": ">= 0.7x",
        "vs_litellm": ">= 8x",
        "first_byte_ms": "<= 1",
        "turn_cost_growth": "<= 1.05",
    }
    assert all(row.ours is not None for row in rows if row.name != "tokenise_us_per_1k")
    for row in rows:
        if row.peer in (gateway.BARE, gateway.LITELLM):
            assert (row.theirs, row.ratio) == (None, None)
            assert "make peers" in row.note
    assert any("make peers" in line for line in said)


async def test_a_peer_that_answers_wrong_is_missing_and_the_others_are_not(checkout: Path) -> None:
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
    rows = await gateway.measure(TINY, quick=False, progress=lambda _: None, words=stub)
    theirs = [row for row in rows if row.peer == "wrong"]
    assert theirs
    assert all(row.theirs is None and "without its number" in row.note for row in theirs)
    assert all(row.theirs is not None for row in rows if row.peer == gateway.FLOOR)


async def test_turns_are_measured_early_and_late(upstream: Instant) -> None:
    async with contenders.floor(upstream) as made, made.target(1) as target:
        cost = await converse(target, 2, every=False)
    assert cost.early > 0
    assert cost.late > 0


def test_growth_is_what_a_late_turn_costs_beyond_its_json() -> None:
    floor = (Cost(100, 400), Cost(200, 520))
    assert Turns((Cost(200, 510),), floor).growth == pytest.approx(1.0)
    assert Turns((Cost(200, 710), Cost(200, 710), Cost(1, 10_000)), floor).growth == pytest.approx(2.0)
    names: list[Any] = [row.name for row in Turns((Cost(200, 510),), floor).rows()]
    assert names == ["turn_cost_growth", "turn_2_cpu_us", "turn_100_cpu_us"]


def test_without_a_tokenizer_its_figure_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    row = tokenise_us(1)
    assert row.ours is None
    assert "tokenizer" in row.note
