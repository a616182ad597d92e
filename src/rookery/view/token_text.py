"""Decode token IDs to texts, for the viewer's page that shows tokens."""

from collections.abc import Callable, Mapping
from typing import Any

from rookery.core import RookeryError
from rookery.upstreams.embedded import chat


class TokenText:
    """Returns the text that a token ID stands for, if the tokenizer is known."""

    def __init__(self, get_bytes: Callable[[int], bytes | None], source: str) -> None:
        self._get_bytes = get_bytes
        self.source = source
        """Name of the tokenizer, or the reason why there is none."""

    @classmethod
    def for_run(cls, config: Mapping[str, Any], tokenizer: str = "") -> "TokenText":
        """Return the texts for a run: of `tokenizer` if it is set, else of the tokenizer that the run used."""
        upstream = config.get("upstreams", {}).get("policy", {})
        if not tokenizer and upstream.get("kind") == "embedded":
            return cls(_get_embedded_bytes, "embedded policy")
        path = tokenizer or _find_tokenizer(config)
        if not path:
            return cls(lambda _: None, "no tokenizer: pass --tokenizer PATH to see texts")
        try:
            from rookery.gateway.chat_renderers.tokenizer import open_tokenizer

            table = open_tokenizer(path).token_bytes
        except (RookeryError, ImportError, OSError) as error:
            return cls(lambda _: None, f"the tokenizer cannot be loaded: {error}")
        return cls(lambda token: table[token] if 0 <= token < len(table) else None, path)

    def get(self, token: int) -> str | None:
        """Return the text of a token. Bytes that are not UTF-8 become `<0xE2>`. Unknown tokens give None."""
        data = self._get_bytes(token)
        if data is None:
            return None
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in data)


def _get_embedded_bytes(token: int) -> bytes | None:
    if 0 <= token < 256:
        return bytes([token])
    name = chat.NAMES.get(token)
    return name.encode() if name is not None else None


def _find_tokenizer(config: Mapping[str, Any]) -> str:
    """Return the tokenizer in the configuration of a run: that of its renderer, or of a transformers model."""
    rendering = config.get("rendering")
    if isinstance(rendering, Mapping) and rendering.get("tokenizer"):
        return str(rendering["tokenizer"])
    urls = config.get("upstreams", {}).get("policy", {}).get("urls") or [""]
    return str(urls[0]).removeprefix("hf:") if str(urls[0]).startswith("hf:") else ""
