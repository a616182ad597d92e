"""Numbers that JavaScript writes differently: 1.0 comes back as 1, and long integers lose digits.

An agent that gets a call's arguments as an object sends back what its language made of them.

Promises:
- arguments that came back through JavaScript are known as those that were sampled, and only those are;
- what a client edited stays edited.
"""

import json
import re
from typing import Any, Final

import msgspec

from rookery.core import Message, ToolCall, Turn

_SUSPECT: Final = re.compile(r"\d\.\d|\d[eE]|\d{16}|-0")


class Respelled:
    """The calls of a session whose arguments may come back with other numbers."""

    def __init__(self) -> None:
        self._known: dict[str, list[ToolCall]] = {}

    def note(self, turn: Turn) -> None:
        for call in turn.response.tool_calls:
            if _SUSPECT.search(call.arguments):
                known = self._known.setdefault(call.id, [])
                if call not in known:
                    known.append(call)

    def restored(self, message: Message) -> Message:
        """The message with its calls as they were sampled, where it differs by its numbers alone."""
        if not message.tool_calls or not any(call.id in self._known for call in message.tool_calls):
            return message
        calls = tuple([self._restored(call) for call in message.tool_calls])
        return message if calls == message.tool_calls else msgspec.structs.replace(message, tool_calls=calls)

    def _restored(self, call: ToolCall) -> ToolCall:
        known = self._known.get(call.id, ())
        if call in known:
            return call
        same = (one for one in known if one.name == call.name and alike(one.arguments, call.arguments))
        return next(same, call)


def alike(one: str, other: str) -> bool:
    """Whether JavaScript takes two texts for the same JSON."""
    try:
        return _form(one) == _form(other)
    except (ValueError, RecursionError, OverflowError):
        return False


def _form(text: str) -> str:
    return json.dumps(_floats(json.loads(text, parse_int=float)), sort_keys=True)


def _floats(value: Any) -> Any:
    if isinstance(value, float):
        return value + 0.0  # there is one zero
    if isinstance(value, dict):
        return {name: _floats(inner) for name, inner in value.items()}
    return [_floats(inner) for inner in value] if isinstance(value, list) else value
