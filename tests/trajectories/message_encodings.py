"""Canonical messages, and the many JSON encodings that clients use for one."""

import json
from random import Random
from typing import Any

import msgspec
from hypothesis import strategies as st

from rookery.core import Message, ToolCall


class CanonicalMessage(msgspec.Struct, frozen=True):
    """A message without its encoding. `arguments` are JSON text in one fixed encoding."""

    role: str
    text: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    call_id: str | None = None
    reasoning: str = ""

    def matches(self, recorded: "CanonicalMessage") -> bool:
        """Return whether a client sent the recorded message: its reasoning may be missing, not changed."""
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


def shuffle_keys(random: Random, value: Any) -> Any:
    """Return the same JSON value with its keys in another order."""
    if isinstance(value, dict):
        return {name: shuffle_keys(random, value[name]) for name in random.sample(list(value), len(value))}
    if isinstance(value, list):
        return [shuffle_keys(random, item) for item in value]
    return value


def dump_json(random: Random, value: Any) -> str:
    spaces = random.choice([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
    indent = random.choice([None, None, 1])
    return json.dumps(
        shuffle_keys(random, value), separators=spaces, ensure_ascii=random.random() < 0.5, indent=indent
    )


HINT = {"type": "ephemeral"}


def encode_like_a_client(random: Random, canonical: CanonicalMessage) -> bytes:
    """Encode a message as some client would."""

    def sometimes() -> bool:
        return random.random() < 0.5

    encoded: dict[str, Any] = {"role": canonical.role}
    content: Any = canonical.text
    if not canonical.text and sometimes():
        content = random.choice([None, []])
    elif sometimes():
        part: dict[str, Any] = {"type": "text", "text": canonical.text}
        if sometimes():
            part["cache_control"] = HINT
        if sometimes():
            part["annotations"] = random.choice([None, []])
        content = [part]
    if content is not None or sometimes():
        encoded["content"] = content
    if canonical.calls:
        encoded["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "index": n,
                "function": {"name": name, "arguments": dump_json(random, json.loads(arguments))},
            }
            for n, (call_id, name, arguments) in enumerate(canonical.calls)
        ]
    elif sometimes():
        encoded["tool_calls"] = random.choice([None, []])
    if canonical.call_id is not None:
        encoded["tool_call_id"] = canonical.call_id
    if canonical.reasoning:
        encoded[random.choice(["reasoning", "reasoning_content"])] = canonical.reasoning
    if sometimes():
        encoded["cache_control"] = HINT
    for name in ("refusal", "audio", "function_call", "name"):
        if sometimes():
            encoded[name] = None
    if sometimes():
        encoded["annotations"] = []
        encoded["provider_specific"] = {"x": [1, None]}
    return dump_json(random, encoded).encode()


def encodings(canonical: CanonicalMessage) -> st.SearchStrategy[bytes]:
    return st.integers(0, 999).map(lambda seed: encode_like_a_client(Random(seed), canonical))
