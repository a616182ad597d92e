"""Helpers for tests of chat renderers: real tokenizers, one for all model families, generated replies."""

import importlib
import json
import re
from array import array
from functools import cache
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import tokenizers

from rookery.core import ToolSchema
from rookery.gateway.chat_renderers import open_renderer
from rookery.gateway.chat_renderers.family_renderer import FamilyRenderer, import_renderers
from rookery.gateway.chat_renderers.protocol import ReplyParser
from rookery.gateway.chat_renderers.template_renderer import TemplateRenderer
from rookery.upstreams.protocol import Delta
from tests.conftest import TOKENIZERS

_DEEPSEEK = (
    *(
        "begin▁of▁sentence",
        "end▁of▁sentence",
        "User",
        "Assistant",
        "latest_reminder",
        "action",
        "query",
        "authority",
        "domain",
        "title",
        "read_url",
    ),
    *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
)
TOOLS = (
    ToolSchema(
        "weather",
        "The weather of a city.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
            },
            "required": ["city"],
        },
    ),
    ToolSchema("now", "The time.", {"type": "object", "properties": {}}),
)


def ints(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def ids_of(ids: bytes) -> list[int]:
    return memoryview(ids).cast("i").tolist()


@cache
def library_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Open a tokenizer directory with the tokenizers library."""
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@cache
def open_family(name: str, tokenizer: str = "qwen3", **options: object) -> FamilyRenderer:
    renderer = open_renderer(name, str(TOKENIZERS / tokenizer), options=dict(options))
    assert isinstance(renderer, FamilyRenderer)
    return renderer


@cache
def open_template(tokenizer: str = "qwen3", tool_parser: str | None = "qwen3") -> TemplateRenderer:
    renderer = open_renderer("default", str(TOKENIZERS / tokenizer), tool_parser=tool_parser)
    assert isinstance(renderer, TemplateRenderer)
    return renderer


def family_tokens() -> list[str]:
    """List every special token that a family of the `renderers` package looks up in its tokenizer."""
    source = "".join(path.read_text() for path in sorted(Path(import_renderers().__file__).parent.glob("*.py")))
    tokens = re.findall(r'_(?:single_)?(?:token_id|special)\(\s*(?:tokenizer,\s*)?"([^"\\]+)"', source)
    hy3 = importlib.import_module("renderers.hy3")
    tokens += [value for name, value in vars(hy3).items() if name.isupper() and isinstance(value, str)]
    tokens += ["\u3008|EOS|\u3009", "\uff5cDSML\uff5c"]
    tokens += [f"<\uff5c{name}\uff5c>" for name in _DEEPSEEK]
    return sorted({text for text in tokens if text.startswith(("<", "[", "]", "\u3008", "\uff5c"))})


def build_shared_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with the Qwen3 vocabulary and the special tokens of every family."""
    tokenizer = json.loads((TOKENIZERS / "qwen3" / "tokenizer.json").read_text())
    known = {token["content"] for token in tokenizer["added_tokens"]}
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    shape = dict(tokenizer["added_tokens"][0])
    for at, text in enumerate(text for text in family_tokens() if text not in known):
        tokenizer["added_tokens"].append({**shape, "id": first + at, "content": text, "special": True})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def parse_in_chunks(parser: ReplyParser, sampled: list[int], cuts: list[int]) -> tuple[list[Delta], object]:
    """Feed a reply to the parser in chunks split at `cuts`; return all deltas and the message."""
    edges = [0, *sorted({cut % (len(sampled) + 1) for cut in cuts}), len(sampled)]
    deltas = [parser.feed(ints(sampled[first:last])) for first, last in pairwise(edges)]
    last, message = parser.finish()
    return [*deltas, last], message


def sampled_replies(family: FamilyRenderer) -> st.SearchStrategy[list[int]]:
    """Generate token IDs of replies: words, tool calls, parts of characters, and special tokens in any order."""
    tokenizer = family.tokenizer
    texts = st.sampled_from(
        (
            *(
                "hello",
                " world",
                "\n",
                "\n\n",
                " ",
                "naïve 🙂 語",
                '{"name": "weather", "arguments": {"city": "x"}}',
            ),
            *(
                '\n{"name": "now", "arguments": {}}\n',
                "{}",
                "assistant\n",
                "final",
                "analysis",
                "</think>",
                "<think>",
            ),
            *(
                "<function=weather>\n<parameter=city>\nx\n</parameter>\n</function>",
                "weather",
                "city",
                "true",
                "{",
            ),
            *("a b c d e f g h i j k l m n o p q r s t u v w x y z. " * 3, "\u2028 \u00a0", "\ue000\uf8ff"),
        )
    ).map(tokenizer.encode)
    markers = st.sampled_from([*family.marker_ids] or [0]).map(lambda marker: [marker])
    strays = st.sampled_from(sorted(family.added_ids)).map(lambda marker: [marker])
    single = st.integers(0, 200).map(lambda at: [at])
    out_of_range = st.sampled_from([len(tokenizer.token_bytes), 2**31 - 1, -1]).map(lambda at: [at])
    part = st.one_of(texts, texts, markers, markers, single, strays, out_of_range)
    return st.lists(part, max_size=14).map(lambda parts: [at for part in parts for at in part])
