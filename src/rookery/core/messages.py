"""Inputs of model calls: chat messages, tool schemas and sampling parameters, named as in the OpenAI API."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

import msgspec

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A tool call by the model. `arguments` is exactly what was sampled, and may be invalid JSON."""

    id: str
    name: str
    arguments: str = "{}"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat message. `content` is text, or a tuple of content parts (text, images) as in the OpenAI API."""

    role: Role
    content: str | tuple[dict[str, Any], ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """The text of `content`: its text parts joined, or an empty string if there are none."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")


class ToolSchema(msgspec.Struct, frozen=True):
    """Description of a tool for the model. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def hash_tools(tools: Sequence[ToolSchema]) -> bytes:
    """Return a hash of tools that does not depend on the order of JSON keys or on white space; empty for none."""
    return blake2b(_encode_sorted(tools), digest_size=16).digest() if tools else b""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of a model call.

    None, or an empty `stop`, leaves the inference engine's default. The fields in `extra` are added to the request
    unchanged.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = {}

    def over(self, below: "Sampling") -> "Sampling":
        """Return these parameters, with the values of `below` for those that are not set here.

        `stop` and `extra` are replaced as a whole, not merged.
        """
        if self == NO_SAMPLING:
            return below
        if below == NO_SAMPLING:
            return self
        values = {
            name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in (None, (), {})
        }
        return msgspec.structs.replace(below, **values) if values else below


NO_SAMPLING = Sampling()
