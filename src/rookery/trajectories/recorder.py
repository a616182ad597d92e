"""Turns a sequence of model calls into turns that store only what is new."""

from collections.abc import Callable
from typing import Any

import msgspec

from rookery.core import Message, Turn

REMEMBERED = 8
"""How many recent turns of a role a new one may extend; older ones are roots again, never wrong."""


class _Node(msgspec.Struct):
    index: int
    messages: tuple[Message, ...]
    """The whole history, the answer included; empty for a call with token ids in."""
    tokens: bytes
    """Prompt and sampled ids; empty where the engine gives none."""


class Recorder:
    """Makes the turns of one attempt and hands each to `sink` once."""

    def __init__(self, attempt: str, sink: Callable[[Turn], None]) -> None:
        self._attempt = attempt
        self._sink = sink
        self._recent: dict[str, list[_Node]] = {}
        self.count = 0

    def record(
        self,
        *,
        role: str,
        messages: tuple[Message, ...],
        prompt: bytes,
        response: Message,
        sampled: bytes,
        **rest: Any,
    ) -> Turn:
        """Commits one turn. `messages` and `prompt` are the whole input of the call."""
        nodes = self._recent.setdefault(role, [])
        parent, prefix = self._parent(nodes, messages, prompt)
        known = len(parent.messages) if parent is not None else 0
        turn = Turn(
            attempt=self._attempt,
            index=self.count,
            role=role,
            parent=parent.index if parent is not None else None,
            messages=messages[known:],
            response=response,
            prefix=prefix,
            prompt=prompt[4 * prefix :],
            sampled=sampled,
            **rest,
        )
        history = (*messages, response) if messages else ()
        nodes.append(_Node(self.count, history, prompt + sampled if sampled else b""))
        if len(nodes) > REMEMBERED:
            del nodes[0]
        self.count += 1
        self._sink(turn)
        return turn

    @staticmethod
    def _parent(nodes: list[_Node], messages: tuple[Message, ...], prompt: bytes) -> tuple[_Node | None, int]:
        """The longest recent turn whose ids this prompt begins with; else the latest of the same messages."""
        longest: _Node | None = None
        told: _Node | None = None
        for node in reversed(nodes):
            if longest is not None and len(node.tokens) <= len(longest.tokens):
                continue
            n = len(node.messages)
            if bool(messages) != bool(n) or messages[:n] != node.messages:
                continue
            if node.tokens and prompt.startswith(node.tokens):
                longest = node
            elif n:
                told = told or node
        return (longest, len(longest.tokens) // 4) if longest is not None else (told, 0)
