"""Who serves the commands of a bash REPL: whatever comes in, nothing but a well-formed call is served."""

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rookery.environments.rlm.bash import MOST_ARGS, MOST_BODY, BashRepl, _prompts
from rookery.environments.rlm.options import Options


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


async def talked(data: bytes) -> tuple[bytes, list[Any]]:
    """What comes back for these bytes, sent by who then hangs up; and what was asked for."""
    verbs, writer = _Verbs(), _Writer()
    repl = BashRepl(None, verbs, Options())  # type: ignore[arg-type]
    reader = asyncio.StreamReader()
    reader.feed_data(data.replace(b"SECRET", repl._secret.encode()))
    hung_up = asyncio.get_running_loop().call_later(0.05, reader.feed_eof)
    talk = asyncio.create_task(repl._accepted(reader, writer))  # type: ignore[arg-type]
    await talk
    hung_up.cancel()
    assert writer.closed
    assert (repl._talks, repl._commands) == (set(), 0)
    return writer.data, verbs.asked


async def test_a_well_formed_call_is_served() -> None:
    data, asked = await talked("SECRET llm 3 2\n8\n--system5\nürk\n1\naxy".encode())
    assert (data, asked) == (b"ok\nsaid\n", [("a\n\nxy", "ürk\n", None)])


async def test_too_much_is_refused_in_words() -> None:
    assert (await talked(f"SECRET llm {MOST_ARGS + 1} 0\n".encode()))[0].startswith(b"no\nllm: more than 64 words")
    assert (await talked(f"SECRET llm 0 {MOST_BODY + 1}\n".encode()))[0].startswith(b"no\nllm: more than")
    assert await talked(f"SECRET llm 1 0\n{MOST_BODY + 1}\n".encode()) == (b"", [])


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b"SECRET", b" ", b"\n", b"llm", b"answer", b"0", b"1", b"-1", b"99", b"\xff"]),
        ),
        max_size=12,
    )
)
def test_whatever_comes_in_the_door_stays_whole(parts: list[bytes]) -> None:
    data = b"".join(parts)

    async def run() -> None:
        back, asked = await talked(data + b"\n")
        if not data.lstrip().startswith(b"SECRET"):
            assert (back, asked) == (b"", [])

    asyncio.run(run())


@given(st.lists(st.text(min_size=1).filter(str.strip), max_size=5))
def test_a_batch_is_a_json_list_or_lines_that_may_be_json(prompts: list[str]) -> None:
    assert _prompts(json.dumps(prompts)) == prompts
    assert _prompts("\n".join(map(json.dumps, prompts))) == prompts


def test_lines_are_prompts_as_they_are() -> None:
    assert _prompts('[not json\n\n"half\n plain \n') == ["[not json", '"half', " plain "]
