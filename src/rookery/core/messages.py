"""Chat messages and tool schemas, in the shape most servers speak, so that they encode as they stand."""

from typing import Any, Literal, TypeAlias

import msgspec

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One call the model asks for. `arguments` is kept exactly as sampled: it may not be valid JSON."""

    id: str
    name: str
    arguments: str = "{}"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. `content` is text, or content parts as a server understands them."""

    role: Role
    content: str | tuple[dict[str, Any], ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """The text of the message, without parts that are not text."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")


class ToolSchema(msgspec.Struct, frozen=True):
    """What the model is told about a tool; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]
