"""Chat messages and tool schemas, with the field names of the OpenAI API so that they encode directly."""

from typing import Any, Literal, TypeAlias

import msgspec

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A tool call by the model. `arguments` is exactly what was sampled, and may be invalid JSON."""

    id: str
    name: str
    arguments: str = "{}"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat message. `content` is text, or a list of content parts."""

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
    """Description of a tool for the model. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]
