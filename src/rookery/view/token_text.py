"""Decode token IDs to texts, for the viewer's page that shows tokens."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import RookeryError, UsageError, ints
from rookery.upstreams import own_rendering
from rookery.upstreams.protocol import UpstreamConfig

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers.protocol import ChatRenderer


class TokenText:
    """Returns the text that a token ID stands for, if the tokenizer is known."""

    def __init__(self, get_bytes: Callable[[int], bytes | None], source: str) -> None:
        self._get_bytes = get_bytes
        self.source = source
        """Name of the tokenizer or chat format, or the reason why there is none."""

    @classmethod
    def for_run(cls, config: Mapping[str, Any], tokenizer: str = "") -> "TokenText":
        """Return the texts for a run: of `tokenizer` if it is set, else of the tokenizer that the run used."""
        try:
            rendering = {"tokenizer": tokenizer} if tokenizer else _find_rendering(config)
            if path := rendering.get("tokenizer"):
                from rookery.gateway.chat_renderers.tokenizer import open_tokenizer

                table = open_tokenizer(str(path)).token_bytes
                return cls(lambda token: table[token] if 0 <= token < len(table) else None, str(path))
            if "name" in rendering:
                from rookery.gateway.chat_renderers import open_renderer_config, parse_renderer_config

                renderer = open_renderer_config(parse_renderer_config(rendering))
                return cls(lambda token: _decode(renderer, token), f"chat format {renderer.name}")
        except (RookeryError, ImportError, OSError) as error:
            return cls(lambda _: None, f"the tokenizer cannot be loaded: {error}")
        return cls(lambda _: None, "no tokenizer: pass --tokenizer PATH to see texts")

    def get(self, token: int) -> str | None:
        """Return the text of a token. Bytes that are not UTF-8 become `<0xE2>`. Unknown tokens give None."""
        data = self._get_bytes(token)
        if data is None:
            return None
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in data)


def _decode(renderer: "ChatRenderer", token: int) -> bytes | None:
    return renderer.token_bytes(ints([token]))[0] or None


def _find_rendering(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat format in the configuration of a run, on top of the one of the policy's model."""
    try:
        policy = msgspec.convert(config.get("upstreams", {}).get("policy", {}), UpstreamConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"the run's policy is invalid: {error}") from None
    return own_rendering(policy) | (config.get("rendering") or {})
