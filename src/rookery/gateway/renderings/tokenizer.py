"""A tokenizer from a folder: text to ids, ids to bytes, and nothing of the network.

Promises:
- a folder is loaded once for a process, whichever threads ask at once;
- no call touches the network and none imports transformers;
- ids are decoded as the tokenizer's own library does it; an id that it does not know is nothing;
- text that no encoding takes (a lone surrogate) becomes `?` instead of an error.

It has the methods that the `renderers` package asks of a tokenizer. It offers no character offsets: nobody here
needs to know which characters a prompt's token came from, and without them encoding takes half the time.
"""

import copy
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

from rookery.core import UsageError, boundary
from rookery.gateway.renderings.quick import quick
from rookery.gateway.renderings.resolve import origin, settled
from rookery.gateway.renderings.template import ChatTemplate

SHORT: Final = 64
"""Texts up to this long are remembered: a format writes the same few words around every message."""
LOST: Final = "\N{REPLACEMENT CHARACTER}".encode()

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
    """The tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        # One text at a time is encoded: its threads would only be a trap for who forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            import tokenizers
        except ImportError as error:
            raise UsageError("a tokenizer needs: pip install 'rookery-rl[renderers]'") from error
        self.folder = folder
        with boundary(UsageError, f"the tokenizer in {folder} cannot be loaded", Exception):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._config = _config(folder)
            self.chat_template = _template(folder, self._config)
        self.name_or_path = origin(folder) or str(self._config.get("name_or_path") or "") or str(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        self.added: dict[int, str] = {at: token.content for at, token in added.items()}
        """Tokens that text is never cut into: marks of a format, and the only places where it can change."""
        self.all_special_ids = frozenset(at for at, token in added.items() if token.special)
        self.all_special_tokens = [self.added[at] for at in sorted(self.all_special_ids)]
        self.specials = {
            name: text for name in _SPECIAL_NAMES if (text := _text(self._config.get(name))) is not None
        }
        self.unk_token_id = self._special("unk_token")
        self.eos_token_id = self._special("eos_token")
        self.bos_token_id = self._special("bos_token")
        self._short = lru_cache(maxsize=4096)(self._encoded)
        self._decoder = _kind(self._tokenizer.decoder)
        self._quick = None
        if self._decoder == "bytes":
            self._quick = quick(folder / "tokenizer.json", self._slowly, self._tokenizer.model, _letters())

    # ------------------------------------------------------------------------------------------ text to ids

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """The ids of a text. Special tokens around it are the format's business, so they are never added."""
        del add_special_tokens
        return list(self._short(text) if len(text) <= SHORT else self._encoded(text))

    def _encoded(self, text: str) -> Sequence[int]:
        found = self._quick(text) if self._quick is not None else None
        return self._slowly(text) if found is None else found

    def _slowly(self, text: str) -> list[int]:
        try:
            found = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # the library says the first of a lone surrogate
            safe = text.encode("utf-8", "replace").decode()
            found = self._tokenizer.encode_batch_fast([safe], add_special_tokens=False)
        ids: list[int] = found[0].ids
        return ids

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        if isinstance(tokens, str):
            found = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    # ----------------------------------------------------------------------------------------- ids to text

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if skip_special_tokens:
            ids = [at for at in ids if at not in self.all_special_ids]
        if self._decoder == "bytes":
            return self.spell(ids).decode("utf-8", "replace")
        known = len(self.pieces)
        text: str = self._tokenizer.decode([at for at in ids if 0 <= at < known], skip_special_tokens=False)
        return text

    def spell(self, ids: Sequence[int]) -> bytes:
        """The bytes of some ids."""
        pieces = self.pieces
        if ids and (min(ids) < 0 or max(ids) >= len(pieces)):
            ids = [at for at in ids if 0 <= at < len(pieces)]
        return b"".join([pieces[at] for at in ids])

    @property
    def spells(self) -> bool:
        """Whether an id's bytes are the same wherever it stands, so that text can be told token by token."""
        return self._decoder in ("bytes", "pieces")

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of each id, by id."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        if self._decoder == "bytes":
            letters = _letters()
            for text, at in vocabulary.items():
                try:
                    table[at] = bytes([letters[letter] for letter in text])
                except KeyError:  # an added token with letters that no byte is written as
                    table[at] = text.encode()
        elif self._decoder == "pieces":
            for text, at in vocabulary.items():
                table[at] = _piece(text)
            for at, text in self.added.items():
                table[at] = text.encode()
        else:
            for at in vocabulary.values():
                table[at] = self._tokenizer.decode([at], skip_special_tokens=False).encode()
        return table

    # ------------------------------------------------------------------------------------------- templates

    @cached_property
    def template(self) -> ChatTemplate:
        """The folder's chat template."""
        if not self.chat_template:
            raise UsageError(
                f"the tokenizer in {self.folder} has no chat template: add a chat_template.jinja, "
                "or name the model's family"
            )
        return ChatTemplate(self.chat_template, self.specials)

    def with_template(self, source: str) -> "Tokenizer":
        """The same with another chat template; all else is shared."""
        found = copy.copy(self)
        found.chat_template = source
        found.__dict__.pop("template", None)
        return found

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
            raise TypeError("there are ids, or text, and nothing else")
        text = self.template(messages, tools, answer=add_generation_prompt, **options)
        return self.encode(text) if tokenize else text

    def _special(self, name: str) -> int | None:
        text = self.specials.get(name)
        found: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return found


_loaded: dict[str, Tokenizer] = {}
_loading = threading.Lock()


def open_tokenizer(tokenizer: str, template: str | None = None) -> Tokenizer:
    """The tokenizer of a path or a hub's name, loaded once for this process; with that chat template, if any."""
    folder = str(Path(settled(tokenizer)).resolve())
    with _loading:
        found = _loaded.get(folder)
        if found is None:
            found = _loaded[folder] = Tokenizer(Path(folder))
    return found if template is None else found.with_template(template)


# ------------------------------------------------------------------------------------------------ small parts


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no object")
    return found


def _template(folder: Path, config: dict[str, Any]) -> str:
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    wrapped = folder / "chat_template.json"
    found = json.loads(wrapped.read_bytes()) if wrapped.is_file() else config
    template = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(template, list):  # several by name: the one for tools knows all that the plain one does
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("tool_use") or named.get("default")
    return template if isinstance(template, str) else ""


def _text(value: Any) -> str | None:
    """A special token's text: it stands there as text, or as an object with more to say about it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _kind(decoder: Any) -> str:
    """How ids become text: each its own bytes, each its own piece, or only all of them together."""
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


def _piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write each byte as: itself where it can be seen, else one above."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in seen}
    others = [byte for byte in range(256) if byte not in set(seen)]
    table.update({chr(0x100 + at): byte for at, byte in enumerate(others)})
    return table
