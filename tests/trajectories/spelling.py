"""Messages by what they mean, and the many ways in which clients spell one."""

import json
from random import Random
from typing import Any

import msgspec
from hypothesis import strategies as st

from rookery.core import Message, ToolCall


class Said(msgspec.Struct, frozen=True):
    """A message by its meaning. `arguments` are JSON values as text in one fixed spelling."""

    role: str
    text: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    call_id: str | None = None
    reasoning: str = ""

    def same(self, recorded: "Said") -> bool:
        """Whether this, from a client, is the recorded message: reasoning may be left out, not changed."""
        bare = msgspec.structs.replace(self, reasoning=recorded.reasoning)
        return bare == recorded and self.reasoning in ("", recorded.reasoning)

    def message(self) -> Message:
        return Message(
            self.role,  # type: ignore[arg-type]
            self.text,
            tuple(ToolCall(*call) for call in self.calls),
            self.call_id,
            reasoning=self.reasoning or None,
        )


def shuffled(random: Random, value: Any) -> Any:
    """The same JSON value with its names in another order."""
    if isinstance(value, dict):
        return {name: shuffled(random, value[name]) for name in random.sample(list(value), len(value))}
    if isinstance(value, list):
        return [shuffled(random, item) for item in value]
    return value


def dumped(random: Random, value: Any) -> str:
    spaces = random.choice([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
    indent = random.choice([None, None, 1])
    return json.dumps(
        shuffled(random, value), separators=spaces, ensure_ascii=random.random() < 0.5, indent=indent
    )


HINT = {"type": "ephemeral"}


def spelled(random: Random, said: Said) -> bytes:
    """One message as some client writes it."""

    def sometimes() -> bool:
        return random.random() < 0.5

    found: dict[str, Any] = {"role": said.role}
    content: Any = said.text
    if not said.text and sometimes():
        content = random.choice([None, []])
    elif sometimes():
        part: dict[str, Any] = {"type": "text", "text": said.text}
        if sometimes():
            part["cache_control"] = HINT
        if sometimes():
            part["annotations"] = random.choice([None, []])
        content = [part]
    if content is not None or sometimes():
        found["content"] = content
    if said.calls:
        found["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "index": n,
                "function": {"name": name, "arguments": dumped(random, json.loads(arguments))},
            }
            for n, (call_id, name, arguments) in enumerate(said.calls)
        ]
    elif sometimes():
        found["tool_calls"] = random.choice([None, []])
    if said.call_id is not None:
        found["tool_call_id"] = said.call_id
    if said.reasoning:
        found[random.choice(["reasoning", "reasoning_content"])] = said.reasoning
    if sometimes():
        found["cache_control"] = HINT
    for name in ("refusal", "audio", "function_call", "name"):
        if sometimes():
            found[name] = None
    if sometimes():
        found["annotations"] = []
        found["provider_specific"] = {"x": [1, None]}
    return dumped(random, found).encode()


def spelling(said: Said) -> st.SearchStrategy[bytes]:
    return st.integers(0, 999).map(lambda seed: spelled(Random(seed), said))
