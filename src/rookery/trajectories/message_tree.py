"""Prefix tree of the chat messages of a role. Runs in the runner or the gateway shard.

A client sends its whole message history with every call. The tree finds the longest earlier turn that the history
continues, so that only new messages are stored.

Guarantees:
- a history is found however its JSON is formatted: raw bytes are compared first, parsed messages only if they
  differ;
- looking up a history costs its new messages plus one comparison of the bytes of the others;
- nothing is evicted: a client can continue from any earlier message;
- messages that differ only in their reasoning are different nodes; a client that leaves out the reasoning gets the
  one that leads to the longest match.
"""

from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import ne
from typing import Final, TypeAlias

import msgspec

from rookery.core import Message
from rookery.trajectories.branches import RecordedTurn
from rookery.trajectories.client_messages import MessageKey, get_message_key, parse_message

MessageInput: TypeAlias = Message | bytes | msgspec.Raw
"""One message of a call: parsed, or as the JSON object that a client sent."""

MAX_ENCODINGS: Final = 2
"""Raw encodings remembered per message: with a cache hint, and without."""
MAX_PATHS: Final = 4
"""Recent histories that are compared as lists; about the number of sub-agents that take turns."""
RECENT_CHILDREN: Final = 8
"""Latest children whose raw bytes are compared before a message is parsed and looked up by key."""

_NO_MATCH: Final = object()
"""Placeholder that is equal to no input."""


class MessageNode:
    """One message of the tree, with a link to the message before it. The tree knows the children."""

    __slots__ = ("_key", "ambiguous", "depth", "encodings", "message", "parent", "turns")

    def __init__(self, parent: "MessageNode | None", message: Message) -> None:
        self.parent = parent
        self.message = message
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.encodings: tuple[msgspec.Raw, ...] = ()
        """Raw JSON that clients sent for this message, latest first; empty if ambiguous."""
        self.turns: list[RecordedTurn] = []
        """The turns that sampled this message."""
        self.ambiguous = False
        """Whether a sibling differs only in its reasoning, so that the same bytes may mean either."""
        self._key: MessageKey | None = None

    @property
    def key(self) -> MessageKey:
        """The key of the message."""
        if self._key is None:
            self._key = get_message_key(self.message)
        return self._key

    @property
    def reasoning(self) -> str:
        """The reasoning of the message, or an empty string."""
        return self.message.reasoning or ""

    @property
    def has_tokens(self) -> bool:
        """Whether a turn that ends here has token IDs."""
        return any(turn.branch is not None and not turn.truncated for turn in self.turns)

    @property
    def best_turn(self) -> RecordedTurn | None:
        """The turn to continue from: a complete one if possible, then the latest."""
        turns = self.turns
        if len(turns) < 2:
            return turns[0] if turns else None
        return max(turns, key=lambda turn: (turn.is_complete, turn.branch is not None, turn.index))

    def remember_encoding(self, raw: msgspec.Raw) -> None:
        """Store raw JSON of this message. It is copied, because `raw` may be a view of a whole request."""
        self.encodings = (raw.copy(), *self.encodings[: MAX_ENCODINGS - 1])

    def path_to_root(self) -> "Iterator[MessageNode]":
        """Yield this node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class _SameObject:
    """Equal only to one message object. `==` on content parts would treat 1 and true as equal."""

    __slots__ = ("message",)

    def __init__(self, message: Message) -> None:
        self.message = message

    def __eq__(self, other: object) -> bool:
        return other is self.message

    __hash__ = None  # type: ignore[assignment]


def _make_comparable(message: Message) -> object:
    return _SameObject(message) if isinstance(message.content, tuple) else message


def _wrap_bytes(entry: object) -> object:
    return msgspec.Raw(entry) if isinstance(entry, bytes) else entry


class CachedPath:
    """One history from the root, as lists that can be compared with a request's messages in one pass."""

    __slots__ = ("encodings", "messages", "nodes")

    def __init__(self, nodes: Sequence[MessageNode]) -> None:
        self.nodes: list[MessageNode] = []
        self.encodings: list[object] = []
        self.messages: list[object] = []
        self.extend(nodes)

    def extend(self, nodes: Sequence[MessageNode]) -> None:
        """Append nodes to the path."""
        for node in nodes:
            self.nodes.append(node)
            self.encodings.append(node.encodings[0] if node.encodings else _NO_MATCH)
            self.messages.append(_NO_MATCH if node.ambiguous else _make_comparable(node.message))

    def update(self, index: int, entry: object) -> None:
        """Expect message `index` in the encoding that was used last."""
        node = self.nodes[index]
        if node.encodings:
            self.encodings[index] = node.encodings[0]
        if isinstance(entry, Message) and not node.ambiguous:
            self.messages[index] = _make_comparable(entry)

    def match(self, entries: Sequence[object], start: int) -> int:
        """Return up to which index the entries equal this path, if they do up to `start`."""
        end = min(len(entries), len(self.nodes))
        if start >= end:
            return start
        own = self.messages if isinstance(entries[start], Message) else self.encodings
        if start:
            own, entries = own[start:end], entries[start:end]
        return next(compress(count(start), map(ne, own, entries)), end)


class _Children:
    """The children of a node, in order of appearance, with an index by key that is built on first use."""

    __slots__ = ("by_key", "nodes")

    def __init__(self) -> None:
        self.nodes: list[MessageNode] = []
        self.by_key: dict[MessageKey, list[MessageNode]] | None = None

    def add(self, node: MessageNode) -> None:
        self.nodes.append(node)
        if self.by_key is not None:
            self.by_key.setdefault(node.key, []).append(node)

    def find(self, key: MessageKey) -> list[MessageNode]:
        if self.by_key is None:
            self.by_key = {}
            for node in self.nodes:
                self.by_key.setdefault(node.key, []).append(node)
        return self.by_key.get(key, [])


class TreeMatch(msgspec.Struct, frozen=True):
    """The part of a history that the tree contains already."""

    node: MessageNode
    """The last sampled message in the history, or the root."""
    new_messages: tuple[Message, ...]
    """The messages after `node`."""
    new_entries: Sequence[object]
    """The same messages as the caller passed them."""
    shared: int
    """Number of messages at the start of the history that an earlier history has too."""
    is_leaf: bool
    """Whether an earlier history ends exactly where the shared messages end."""


class MessageTree:
    """All message histories of one role and scope."""

    def __init__(self) -> None:
        self.root = MessageNode(None, Message("system"))
        self._children: dict[MessageNode, _Children] = {}
        self._paths: list[CachedPath] = []
        """Recently used histories, latest last."""

    def has_children(self, node: MessageNode) -> bool:
        """Return whether a history continues after the node. A node without children is a sampled message."""
        return node in self._children

    # ---- lookup

    def find(self, entries: Sequence[MessageInput]) -> TreeMatch:
        """Match a history with the tree. Raises `MessageError` for a new entry that is no valid message."""
        wrapped: Sequence[object] = entries
        if isinstance(entries[0], bytes):
            wrapped = [_wrap_bytes(entry) for entry in entries]
        parsed: dict[int, Message] = {}
        path, index = self._find_path(wrapped)
        nodes = [path.nodes[index - 1] if path is not None and index else self.root]
        reply = _find_last_reply(nodes[0])
        while index < len(wrapped):
            found = [child for node in nodes for child in self._match_child(node, wrapped[index], index, parsed)]
            if not found:
                break
            nodes = found
            for node in nodes:
                if node.turns and (reply is None or _is_further(node, reply)):
                    reply = node
            index += 1
            if (
                path is not None
                and len(nodes) == 1
                and index <= len(path.nodes)
                and path.nodes[index - 1] is nodes[0]
            ):
                path.update(index - 1, wrapped[index - 1])
                end = path.match(wrapped, index)
                if end > index:
                    index, nodes = end, [path.nodes[end - 1]]
                    last = _find_last_reply(nodes[0])
                    if last is not None and (reply is None or _is_further(last, reply)):
                        reply = last
        depth = 0 if reply is None else reply.depth
        return TreeMatch(
            node=self.root if reply is None else reply,
            new_messages=tuple([_parse(wrapped[n], n, parsed) for n in range(depth, len(wrapped))]),
            new_entries=wrapped[depth:],
            shared=index,
            is_leaf=reply is not None and reply.depth == index and not self.has_children(reply),
        )

    def _find_path(self, entries: Sequence[object]) -> tuple[CachedPath | None, int]:
        """Return the cached path with the longest match, the latest if several, and the length of the match."""
        best, longest = None, 0
        for path in reversed(self._paths):
            length = path.match(entries, 0)
            if length > longest:
                best, longest = path, length
                if longest in (len(entries), len(path.nodes)):
                    break
        return best, longest

    def _match_child(
        self, node: MessageNode, entry: object, index: int, parsed: dict[int, Message]
    ) -> Sequence[MessageNode]:
        """Return the children that the entry may mean; several only if the entry leaves out its reasoning."""
        children = self._children.get(node)
        if children is None:
            return ()
        entry = _wrap_bytes(entry)
        if isinstance(entry, msgspec.Raw):
            for child in reversed(children.nodes[-RECENT_CHILDREN:]):
                for n, encoding in enumerate(child.encodings):
                    if encoding == entry:
                        if n:  # the encoding used last is the likeliest to come next
                            child.encodings = (encoding, *child.encodings[:n], *child.encodings[n + 1 :])
                        return (child,)
        message = _parse(entry, index, parsed)
        found = filter_by_reasoning(children.find(get_message_key(message)), message)
        if not found:
            found = self._match_truncated(children, message)
        if len(found) == 1 and not found[0].ambiguous and isinstance(entry, msgspec.Raw):
            found[0].remember_encoding(entry)
        return found

    def _match_truncated(self, children: _Children, message: Message) -> list[MessageNode]:
        """Match a client that stopped reading a partial reply before the gateway stopped sending it."""
        if message.role != "assistant":
            return []
        content, calls = len(message.text), len(message.tool_calls)
        reasoning = message.reasoning or ""
        for node in reversed(children.nodes):
            for turn in node.turns:
                for cut in turn.cuts:
                    if (cut.content, cut.calls) != (content, calls):
                        continue
                    if reasoning and cut.reasoning != len(reasoning):
                        continue
                    truncated = turn.truncate_at(cut)
                    response = truncated.response
                    if get_message_key(response) == get_message_key(message) and (
                        not reasoning or response.reasoning == reasoning
                    ):
                        return [self.add_truncated(node, truncated)[0]]
        return []

    def add_truncated(self, node: MessageNode, turn: RecordedTurn) -> tuple[MessageNode, RecordedTurn]:
        """Add a sibling of `node` for a truncated version of its partial turn. Returns the node and its turn."""
        assert node.parent is not None
        sibling = self._get_or_add(MessageNode(node.parent, turn.response))
        for existing in sibling.turns:
            if (existing.index, existing.end) == (turn.index, turn.end):
                return sibling, existing
        sibling.turns.append(turn)
        return sibling, turn

    # ---- insertion

    def find_existing(self, node: MessageNode, messages: Sequence[Message]) -> list[MessageNode]:
        """Return the nodes that exist already for messages after `node`."""
        nodes: list[MessageNode] = []
        for message in messages:
            children = self._children.get(node)
            if children is None:
                break
            found = filter_by_reasoning(children.find(get_message_key(message)), message)
            if not found:
                # A restored turn may hold the part of a partial reply that its client had read as a message.
                found = self._match_truncated(children, message)
            if not found:
                break
            node = max(found, key=lambda candidate: candidate.reasoning == (message.reasoning or ""))
            nodes.append(node)
        return nodes

    def add(
        self,
        node: MessageNode,
        existing: list[MessageNode],
        messages: Sequence[Message],
        entries: Sequence[object],
        turn: RecordedTurn,
    ) -> MessageNode:
        """Add `messages` after `node`, then the turn's reply. `existing` are the nodes of the first messages.

        Returns the node of the reply.
        """
        added = list(existing)
        last = added[-1] if added else node
        for n in range(len(added), len(messages)):
            child = MessageNode(last, messages[n])
            if n < len(entries) and isinstance(raw := _wrap_bytes(entries[n]), msgspec.Raw):
                child.remember_encoding(raw)
            last = self._get_or_add(child)
            added.append(last)
        last = self._get_or_add(MessageNode(last, turn.response))
        last.turns.append(turn)
        added.append(last)
        self._cache_path(node, added)
        return last

    def _get_or_add(self, node: MessageNode) -> MessageNode:
        """Add the node, or return the existing one for the same message with the same reasoning."""
        assert node.parent is not None
        children = self._children.get(node.parent)
        if children is None:
            children = self._children[node.parent] = _Children()
        else:
            siblings = children.find(node.key)
            for sibling in siblings:
                if sibling.reasoning == node.reasoning:
                    return sibling
            for ambiguous in (node, *siblings) if siblings else ():
                ambiguous.ambiguous, ambiguous.encodings = True, ()
            if siblings:
                self._paths.clear()  # they hold encodings of the siblings, which are ambiguous now
        children.add(node)
        return node

    def _cache_path(self, node: MessageNode, added: list[MessageNode]) -> None:
        for n, path in enumerate(self._paths):
            if path.nodes[-1] is node:
                path.extend(added)
                del self._paths[n]
                break
        else:
            path = CachedPath(list(added[-1].path_to_root())[::-1])
        self._paths.append(path)
        del self._paths[:-MAX_PATHS]


def filter_by_reasoning(nodes: list[MessageNode], message: Message) -> list[MessageNode]:
    """Return the nodes with the message's reasoning, or all if the message has none."""
    reasoning = message.reasoning
    return [node for node in nodes if node.reasoning == reasoning] if reasoning else nodes


def parse_messages(entries: Sequence[MessageInput]) -> tuple[Message, ...]:
    """Parse the messages of a call. Raises `MessageError` for an entry that is no valid message."""
    parsed: dict[int, Message] = {}
    return tuple([_parse(entry, n, parsed) for n, entry in enumerate(entries)])


def _parse(entry: object, index: int, parsed: dict[int, Message]) -> Message:
    if isinstance(entry, Message):
        return entry
    message = parsed.get(index)
    if message is None:
        assert isinstance(entry, bytes | msgspec.Raw)
        message = parsed[index] = parse_message(entry, index)
    return message


def _find_last_reply(node: MessageNode) -> MessageNode | None:
    """Return the last sampled message on the path to a node, the node included."""
    at: MessageNode | None = node
    while at is not None and not at.turns:
        at = at.parent
    return at


def _is_further(node: MessageNode, other: MessageNode) -> bool:
    """Return whether a sampled message is deeper in the tree than another or, at equal depth, newer."""
    if node.depth != other.depth:
        return node.depth > other.depth
    return node.turns[-1].index > other.turns[-1].index
