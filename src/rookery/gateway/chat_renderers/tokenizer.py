"""A tokenizer loaded from a directory, which converts text to token IDs and token IDs to bytes.

Guarantees:
- a directory is loaded once per process, also if several threads open it at once;
- the package transformers is not imported;
- tokens are decoded as by the tokenizers library; an unknown ID decodes to an empty text;
- a character that cannot be encoded as UTF-8 (a lone surrogate) becomes `?` instead of an error.

`Tokenizer` has the methods that the `renderers` package expects of a tokenizer. It does not compute character
offsets: without them, encoding takes half the time.
"""

import copy
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

from rookery.core import UsageError, wrap_errors
from rookery.gateway.chat_renderers.fast_encoder import build_fast_encoder
from rookery.gateway.chat_renderers.jinja_template import ChatTemplate
from rookery.gateway.chat_renderers.tokenizer_cache import read_origin, resolve_tokenizer

MAX_MEMOISED: Final = 64
"""Length of the longest text whose token IDs are cached. A chat format writes the same few words around every
message."""

_SPECIAL_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """A tokenizer that is loaded from a directory with a tokenizer.json. Raises `UsageError` if that fails."""

    def __init__(self, folder: Path) -> None:
        # Texts are encoded one at a time. The library's threads would gain nothing and break after a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            import tokenizers
        except ImportError as error:
            raise UsageError(
                "loading a tokenizer needs an optional dependency: pip install 'rookery-rl[renderers]'"
            ) from error
        self.folder = folder
        with wrap_errors(UsageError, f"the tokenizer in {folder} cannot be loaded", Exception):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._config = read_config(folder)
            self.chat_template = read_template(folder, self._config)
        self.name_or_path = read_origin(folder) or str(self._config.get("name_or_path") or "") or str(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {at: token.content for at, token in added.items()}
        """Texts of added tokens by ID. They are not part of the trained vocabulary; chat formats use them as
        markers."""
        self.all_special_ids = frozenset(at for at, token in added.items() if token.special)
        self.all_special_tokens = [self.added_tokens[at] for at in sorted(self.all_special_ids)]
        self.special_tokens = {
            name: text for name in _SPECIAL_NAMES if (text := _get_token_text(self._config.get(name))) is not None
        }
        # The `renderers` package reads these attributes and calls `apply_chat_template`.
        self.unk_token_id = self._get_special_id("unk_token")
        self.eos_token_id = self._get_special_id("eos_token")
        self.bos_token_id = self._get_special_id("bos_token")
        self._encode_memoised = lru_cache(maxsize=4096)(self._encode)
        self._decoder = _get_decoder_kind(self._tokenizer.decoder)
        self.fast_encoder = None
        if self._decoder == "bytes":
            self.fast_encoder = build_fast_encoder(
                folder / "tokenizer.json", self._encode_reference, self._tokenizer.model, _get_byte_letters()
            )

    def __len__(self) -> int:
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Return the token IDs of a text. No special tokens are added around it, as the chat format does that.

        `add_special_tokens` exists only for compatibility and is ignored.
        """
        del add_special_tokens
        return list(self._encode_memoised(text) if len(text) <= MAX_MEMOISED else self._encode(text))

    def _encode(self, text: str) -> Sequence[int]:
        result = self.fast_encoder(text) if self.fast_encoder is not None else None
        return self._encode_reference(text) if result is None else result

    def _encode_reference(self, text: str) -> list[int]:
        try:
            result = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # the library raises TypeError for a lone surrogate
            safe = text.encode("utf-8", "replace").decode()
            result = self._tokenizer.encode_batch_fast([safe], add_special_tokens=False)
        ids: list[int] = result[0].ids
        return ids

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        if isinstance(tokens, str):
            result = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if result is None else result
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if skip_special_tokens:
            ids = [at for at in ids if at not in self.all_special_ids]
        if self._decoder == "bytes":
            return self.decode_bytes(ids).decode("utf-8", "replace")
        known = len(self.token_bytes)
        text: str = self._tokenizer.decode([at for at in ids if 0 <= at < known], skip_special_tokens=False)
        return text

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of text that a sequence of token IDs stands for. Unknown IDs are skipped."""
        token_bytes = self.token_bytes
        if ids and (min(ids) < 0 or max(ids) >= len(token_bytes)):
            ids = [at for at in ids if 0 <= at < len(token_bytes)]
        return b"".join([token_bytes[at] for at in ids])

    @property
    def is_per_token(self) -> bool:
        """True if each token can be decoded without its neighbours, so that text can be streamed."""
        return self._decoder in ("bytes", "pieces")

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of text that each token stands for, by ID."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        if self._decoder == "bytes":
            byte_by_letter = _get_byte_letters()
            for text, at in vocabulary.items():
                try:
                    table[at] = bytes([byte_by_letter[letter] for letter in text])
                except KeyError:  # an added token with letters outside the byte alphabet
                    table[at] = text.encode()
        elif self._decoder == "pieces":
            for text, at in vocabulary.items():
                table[at] = _decode_piece(text)
            for at, text in self.added_tokens.items():
                table[at] = text.encode()
        else:
            for at in vocabulary.values():
                table[at] = self._tokenizer.decode([at], skip_special_tokens=False).encode()
        return table

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template, compiled. Raises `UsageError` if it has none or it is invalid."""
        if not self.chat_template:
            raise UsageError(
                f"the tokenizer in {self.folder} has no chat template: add a chat_template.jinja, "
                "or configure the model family"
            )
        return ChatTemplate(self.chat_template, self.special_tokens)

    def with_template(self, source: str) -> "Tokenizer":
        """Return a copy of the tokenizer with another chat template.

        All other data is shared with the original.
        """
        result = copy.copy(self)
        result.chat_template = source
        result.__dict__.pop("template", None)
        return result

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        if return_dict:
            raise TypeError("return_dict is not supported")
        text = self.template(messages, tools, add_generation_prompt=add_generation_prompt, **options)
        return self.encode(text) if tokenize else text

    def _get_special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        result: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return result


_tokenizers: dict[str, Tokenizer] = {}
_tokenizers_lock = threading.Lock()


def open_tokenizer(tokenizer: str, template: str | None = None) -> Tokenizer:
    """Load a tokenizer by its path or Hugging Face hub name, once per process.

    With `template`, return a copy with that chat template.
    """
    folder = str(Path(resolve_tokenizer(tokenizer)).resolve())
    with _tokenizers_lock:
        result = _tokenizers.get(folder)
        if result is None:
            result = _tokenizers[folder] = Tokenizer(Path(folder))
    return result if template is None else result.with_template(template)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    result = json.loads(path.read_bytes())
    if not isinstance(result, dict):
        raise UsageError(f"{path} does not contain a JSON object")
    return result


def read_template(folder: Path, config: dict[str, Any]) -> str:
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    wrapped = folder / "chat_template.json"
    result = json.loads(wrapped.read_bytes()) if wrapped.is_file() else config
    template = result.get("chat_template") if isinstance(result, dict) else None
    if isinstance(
        template, list
    ):  # several templates by name: the one for tools includes what the default one does
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("tool_use") or named.get("default")
    return template if isinstance(template, str) else ""


def _get_token_text(value: Any) -> str | None:
    """Return the text of a special token in tokenizer_config.json, given as a string or an object; else None."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _get_decoder_kind(decoder: Any) -> str:
    """Return how token IDs are decoded to text.

    `bytes`: byte-level, token by token. `pieces`: SentencePiece, token by token. `whole`: only as a sequence.
    """
    if decoder is None:
        return "whole"
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return "bytes"
    if state["type"] == "Sequence":
        parts = [part["type"] for part in state["decoders"]]
        if parts == ["ByteLevel"]:
            return "bytes"
        if parts == ["Replace", "ByteFallback", "Fuse"]:
            return "pieces"
    return "whole"


def _decode_piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _get_byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    A printable byte is written as its own character, any other byte as a character from U+0100 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in seen}
    others = [byte for byte in range(256) if byte not in set(seen)]
    table.update({chr(0x100 + at): byte for at, byte in enumerate(others)})
    return table
