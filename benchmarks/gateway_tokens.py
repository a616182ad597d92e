"""What new tokens cost where the gateway renders them itself: a tool's output of real text after an answer.

The text is a module of Python's own library; the chat format and its tokenizer are a real model's, which `make
peers` or `make tokenizers` brings below `.peers/tokenizers/`. Where there is none the figure is missing.
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


def tokenise_us(times: int) -> Result:
    """CPU µs for 1,000 new tokens, from a message to ids after sampled ids."""
    name, unit = "tokenise_us_per_1k", "CPU-us"
    folder = peers_folder() / "tokenizers" / FAMILY
    extend = _extend(folder) if folder.is_dir() else f"no tokenizer is in {FAMILY}'s folder of the peers"
    if isinstance(extend, str):
        return Result(name=name, unit=unit, ours=None, note=extend)
    count = len(extend()) // _ID_BYTES
    costs = []
    for _ in range(times):
        began = time.process_time()
        extend()
        costs.append(1e6 * (time.process_time() - began) * 1_000 / count)
    note = f"{FAMILY}, {count:,} tokens from {TEXT_BYTES:,} bytes of Python, after 500 sampled ones"
    return Result(name=name, unit=unit, ours=median(costs), note=note)


def _extend(folder: Path) -> Callable[[], bytes] | str:
    """What is measured, or why there is nothing."""
    source = find_spec("argparse")
    assert source is not None
    assert source.origin is not None
    text = Path(source.origin).read_text(encoding="utf-8")
    try:
        from rookery.gateway.chat_renderers import open_renderer

        rendering = open_renderer(FAMILY, str(folder))
        prompt = rendering.render([Message("user", "List it.")], (), None)
        stop = rendering.stop_token_ids[0].to_bytes(_ID_BYTES, "little", signed=True)
        # From the middle of a message: ids of plain text, as an answer is.
        other = rendering.render([Message("user", text[TEXT_BYTES : 2 * TEXT_BYTES])], (), None)
    except (ImportError, RookeryError) as error:
        return f"the rendering {FAMILY} cannot be used: {error}"
    sampled = other[100 * _ID_BYTES : 599 * _ID_BYTES] + stop
    new = [Message("user", text[:TEXT_BYTES])]

    def extend() -> bytes:
        ids = rendering.extend(prompt, sampled, new, (), None)
        if not ids:
            raise RuntimeError(f"{FAMILY} does not extend an answer by a message")
        return ids

    return extend
