"""Who serves the commands of a bash REPL: whatever comes in, nothing but a well-formed call is served."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.environments.rlm import bash_repl
from rookery.environments.rlm.bash_repl import MOST_ARGS, MOST_BODY, BashRepl, _prompts
from rookery.environments.rlm.options import RlmOptions


class _Verbs:
    """Keeps what was asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.tools: dict[str, Any] = {}

    async def llm(self, *args: Any) -> str:
        self.asked.append(args)
        return "said"

    async def answer(self, value: str) -> None:
        self.asked.append(value)


class _Writer:
    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None: ...

    def close(self) -> None:
        self.closed = True


async def talked(data: bytes, patience: float = 60.0) -> tuple[bytes, list[Any]]:
    """What comes back for these bytes, sent by who hangs up at the end of its patience; and what was asked for."""
    functions, writer = _Verbs(), _Writer()
    repl = BashRepl(None, functions, RlmOptions())  # type: ignore[arg-type]
    reader = asyncio.StreamReader()
    reader.feed_data(data.replace(b"SECRET", repl._secret.encode()))
    hung_up = asyncio.get_running_loop().call_later(patience, reader.feed_eof)
    talk = asyncio.create_task(repl._on_connection(reader, writer))  # type: ignore[arg-type]
    await talk
    hung_up.cancel()
    assert writer.closed
    assert (repl._requests, repl._commands) == (set(), 0)
    return writer.data, functions.asked


async def test_a_well_formed_call_is_served() -> None:
    data, asked = await talked("SECRET llm 3 2\n8\n--system5\nürk\n1\naxy".encode())
    assert (data, asked) == (b"ok\nsaid\n", [("a\n\nxy", "ürk\n", None)])


async def test_who_hangs_up_is_let_go_of_also_where_its_call_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bash_repl, "END_SECONDS", 0.01)
    go = asyncio.Event()

    async def stays(*_: object) -> str:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    monkeypatch.setattr(BashRepl, "_done", stays)
    assert await talked(b"SECRET llm 0 0\n", patience=0.05) == (b"", [])
    go.set()


async def test_too_much_is_refused() -> None:
    assert (await talked(f"SECRET llm {MOST_ARGS + 1} 0\n".encode()))[0].startswith(b"no\nllm: more than 64 words")
    assert (await talked(f"SECRET llm 0 {MOST_BODY + 1}\n".encode()))[0].startswith(b"no\nllm: more than")
    data, asked = await talked(f"SECRET llm 1 0\n{MOST_BODY + 1}\n".encode())
    assert (data, asked) == (f"no\nllm: more than {MOST_BODY} bytes\n".encode(), [])


async def test_what_all_calls_hold_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bash_repl, "MOST_HELD", 100)
    go, functions = asyncio.Event(), _Verbs()

    async def llm(*_: Any) -> str:
        await go.wait()
        return "said"

    functions.llm = llm  # type: ignore[method-assign]
    repl = BashRepl(None, functions, RlmOptions())  # type: ignore[arg-type]

    async def call() -> bytes:
        reader, writer = asyncio.StreamReader(), _Writer()
        reader.feed_data(f"{repl._secret} llm 0 60\n".encode() + b"x" * 60)
        await repl._on_connection(reader, writer)  # type: ignore[arg-type]
        return writer.data

    first = asyncio.create_task(call())
    while not repl._commands:
        await asyncio.sleep(0)
    assert await call() == b"no\nllm: the calls under way hold 100 bytes together; wait for some of them\n"
    go.set()
    assert await first == b"ok\nsaid\n"
    assert (await call(), repl._reserved_bytes) == (b"ok\nsaid\n", 0)


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b"SECRET", b" ", b"\n", b"llm", b"answer", b"0", b"1", b"-1", b"99", b"\xff"]),
        ),
        max_size=12,
    )
)
def test_whatever_comes_in_the_door_stays_completely(parts: list[bytes]) -> None:
    data = b"".join(parts)

    async def run() -> None:
        back, asked = await talked(data + b"\n", patience=0.05)
        if not data.lstrip().startswith(b"SECRET"):
            assert (back, asked) == (b"", [])

    asyncio.run(run())


@given(st.lists(st.text(min_size=1).filter(str.strip), max_size=5))
def test_a_batch_is_a_json_list_or_lines_that_may_be_json(prompts: list[str]) -> None:
    assert _prompts(json.dumps(prompts)) == prompts
    assert _prompts("\n".join(map(json.dumps, prompts))) == prompts


def test_lines_are_prompts_as_they_are() -> None:
    assert _prompts('[not json\n\n"half\n plain \n') == ["[not json", '"half', " plain "]
