"""Row of the benchmark `gateway`: the cost of tokenizing new messages when the gateway renders prompts itself.

The text is a module of the standard library, like a tool's output after an answer. The chat format and tokenizer
are those of a real model, which `make peers` or `make tokenizers` installs below `.peers/tokenizers/`. The figure
is missing if they are not installed.
"""

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks import Result
from benchmarks.peers import peers_folder
from rookery.core import Message, RookeryError

FAMILY = "qwen3"
TEXT_BYTES = 16_384
_ID_BYTES = 4


def tokenize_us(times: int) -> Result:
    """Measure CPU microseconds per 1,000 new tokens, from a message to the IDs that follow sampled IDs."""
    name, unit = "tokenise_us_per_1k", "CPU-us"
    folder = peers_folder() / "tokenizers" / FAMILY
    extend = (
        _open_extension(folder)
        if folder.is_dir()
        else f"the tokenizer {FAMILY} is not installed: run `make tokenizers`"
    )
    if isinstance(extend, str):
        return Result(name=name, unit=unit, ours=None, note=extend)
    count = len(extend()) // _ID_BYTES
    costs = []
    for _ in range(times):
        began = time.process_time()
        extend()
        costs.append(1e6 * (time.process_time() - began) * 1_000 / count)
    note = f"{FAMILY}, {count:,} tokens from {TEXT_BYTES:,} bytes of Python, after 500 sampled tokens"
    return Result(name=name, unit=unit, ours=median(costs), note=note)


def _open_extension(folder: Path) -> Callable[[], bytes] | str:
    """Return the function to measure, or why it cannot run."""
    source = find_spec("argparse")
    assert source is not None
    assert source.origin is not None
    text = Path(source.origin).read_text(encoding="utf-8")
    try:
        from rookery.gateway.chat_renderers import open_renderer

        renderer = open_renderer(FAMILY, str(folder))
        prompt = renderer.render([Message("user", "List it.")], (), None)
        stop = renderer.stop_token_ids[0].to_bytes(_ID_BYTES, "little", signed=True)
        # IDs from the middle of a message are plain text, like those of an answer.
        other = renderer.render([Message("user", text[TEXT_BYTES : 2 * TEXT_BYTES])], (), None)
    except (ImportError, RookeryError) as error:
        return f"the chat format {FAMILY} cannot be used: {error}"
    sampled = other[100 * _ID_BYTES : 599 * _ID_BYTES] + stop
    new = [Message("user", text[:TEXT_BYTES])]

    def extend() -> bytes:
        ids = renderer.extend(prompt, sampled, new, (), None)
        if not ids:
            raise RuntimeError(f"the chat format {FAMILY} did not extend the answer by a message")
        return ids

    return extend
