"""Prefix tree of the message histories of one model role. Runs in the runner or the gateway shard.

A client sends its whole message history with every call. The tree finds the latest sampled message in the
history that was recorded before, so that only the messages after it are stored.

Guarantees:
- a history is found however its JSON is formatted: the raw bytes are compared first, and the parsed messages only
  if the bytes differ;
- looking up a history costs parsing its new messages plus one comparison of the bytes of the others, in the common
  case that it extends a recent history;
- nothing is evicted: a client can continue from any earlier message;
- messages that differ only in their reasoning are different nodes. If a client leaves out the reasoning, the node
  that leads to the longest match is used.
"""

from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import ne
from typing import Final, Literal, TypeAlias

import msgspec

from rookery.core import Message
from rookery.trajectories.branches import RecordedTurn
from rookery.trajectories.client_messages import MessageKey, get_message_key, parse_message

MessageInput: TypeAlias = Message | bytes | msgspec.Raw
"""One message of a call: parsed, or the JSON object that a client sent."""

MatchKind: TypeAlias = Literal["root", "extends", "forks"]

MAX_ENCODINGS: Final = 2
"""Maximum number of JSON encodings stored per message. Clients send a message with and without a cache hint."""
MAX_PATHS: Final = 4
"""Number of recent histories that are cached as lists for a fast comparison: about one per concurrent
sub-agent."""
RECENT_CHILDREN: Final = 8
"""Number of latest children whose raw JSON is compared before a message is parsed and looked up by key."""

_NO_MATCH: Final = object()
"""Placeholder in a cached path that is equal to no message, so that the comparison stops there."""


class MessageNode:
    """A node of the tree: one message, with a link to the message before it. `MessageTree` stores the children."""

    __slots__ = ("_key", "ambiguous", "depth", "encodings", "message", "parent", "turns")

    def __init__(self, parent: "MessageNode | None", message: Message) -> None:
        self.parent = parent
        self.message = message
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.encodings: tuple[msgspec.Raw, ...] = ()
        """Raw JSON that clients sent for this message, latest first; empty if `ambiguous`."""
        self.turns: list[RecordedTurn] = []
        """The recorded turns whose reply is this message."""
        self.ambiguous = False
        """True if a sibling differs only in its reasoning, so that JSON without reasoning may mean either of
        them."""
        self._key: MessageKey | None = None

    @property
    def key(self) -> MessageKey:
        """The result of `get_message_key` for the message."""
        if self._key is None:
            self._key = get_message_key(self.message)
        return self._key

    @property
    def reasoning(self) -> str:
        """The reasoning of the message, or an empty string."""
        return self.message.reasoning or ""

    @property
    def has_tokens(self) -> bool:
        """True if a turn whose reply is this message has token IDs and is not a truncated version of a partial
        turn."""
        return any(turn.branch is not None and not turn.truncated for turn in self.turns)

    @property
    def best_turn(self) -> RecordedTurn | None:
        """The turn that a later call continues: a complete one if possible, then one with token IDs, then the
        latest.

        None if the message was not sampled.
        """
        return max(
            self.turns,
            key=lambda turn: (turn.is_complete, turn.branch is not None, turn.index),
            default=None,
        )

    def remember_encoding(self, raw: msgspec.Raw) -> None:
        """Store the raw JSON that a client sent for this message.

        It is copied, because `raw` may be a view into the body of a whole request.
        """
        self.encodings = (raw.copy(), *self.encodings[: MAX_ENCODINGS - 1])

    def path_to_root(self) -> "Iterator[MessageNode]":
        """Yield this node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class _SameObject:
    """Wrapper that is equal only to one message object, because `==` on content parts would treat 1 and true as
    equal."""

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
    """One recorded history from its first message on, as lists that are compared with a request's messages in one
    pass."""

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
        """Store how the latest request wrote message `index`, which is what the next request is expected to do."""
        node = self.nodes[index]
        if node.encodings:
            self.encodings[index] = node.encodings[0]
        if isinstance(entry, Message) and not node.ambiguous:
            self.messages[index] = _make_comparable(entry)

    def match(self, entries: Sequence[object], start: int) -> int:
        """Return the number of messages at the start of `entries` that equal this path, given that `start` of them
        do."""
        end = min(len(entries), len(self.nodes))
        if start >= end:
            return start
        own = self.messages if isinstance(entries[start], Message) else self.encodings
        if start:
            own, entries = own[start:end], entries[start:end]
        return next(compress(count(start), map(ne, own, entries)), end)


class _Children:
    """The children of a node, in order of insertion, with an index by message key that is built on first use."""

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


class HistoryMatch(msgspec.Struct, frozen=True, eq=False):
    """The relation of a call's messages to the message histories recorded for the same model role."""

    role: str
    scope: bytes
    kind: MatchKind
    """`root`: shares no message with an earlier history; `extends`: starts with a whole earlier history; `forks`:
    shares some messages with an earlier history and departs from it before its end."""
    turn: RecordedTurn | None
    """The longest earlier turn whose messages and reply are the start of the call's messages; None if there is
    none."""
    node: MessageNode | None
    """The tree node of the reply of `turn`, or the root. None if nothing was recorded yet for role and scope, and
    for calls without messages."""
    new_messages: tuple[Message, ...]
    """The messages of the call that follow the reply of `turn`; all messages if `turn` is None."""
    entries: Sequence[object]
    """The new messages as the caller passed them."""

    def messages(self) -> tuple[Message, ...]:
        """Return the whole message history of the call. Earlier replies are as sampled, with their reasoning, also
        if the client left it out."""
        known = [node.message for node in self.node.path_to_root()] if self.node is not None else []
        return (*reversed(known), *self.new_messages)


class MessageTree:
    """All message histories of one model role and scope.

    The scope is a digest of what else shapes the prompt, such as the tools.
    """

    def __init__(self, role: str, scope: bytes) -> None:
        self.role = role
        self.scope = scope
        self.root = MessageNode(None, Message("system"))
        self.children: dict[MessageNode, _Children] = {}
        self._paths: list[CachedPath] = []
        """Recently extended histories, latest last."""

    def has_children(self, node: MessageNode) -> bool:
        """Return True if a recorded history continues after the node. A node without children is the reply of a
        turn."""
        return node in self.children

    # ---- lookup

    def find(self, entries: Sequence[MessageInput]) -> HistoryMatch:
        """Look up the messages of a call. Raises `MessageError` for a new entry that is not a valid message."""
        wrapped: Sequence[object] = entries
        if isinstance(entries[0], bytes):
            wrapped = [_wrap_bytes(entry) for entry in entries]
        parsed: dict[int, Message] = {}
        path, index = None, 0
        for candidate in reversed(self._paths):  # the longest match, and of equal ones the latest
            length = candidate.match(wrapped, 0)
            if length > index:
                path, index = candidate, length
                if index in (len(wrapped), len(candidate.nodes)):
                    break
        nodes = [self.root if path is None else path.nodes[index - 1]]
        reply = nodes[0]
        while not reply.turns and reply.parent is not None:  # up to the last sampled message, or the root
            reply = reply.parent
        while index < len(wrapped):
            found = [child for node in nodes for child in self._match_child(node, wrapped[index], index, parsed)]
            if not found:
                break
            nodes = found
            for node in nodes:
                if node.turns and _is_deeper(node, reply):
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
                    last = next((node for node in nodes[0].path_to_root() if node.turns), None)
                    if last is not None and _is_deeper(last, reply):
                        reply = last
        depth, turns = reply.depth, reply.turns
        new_entries, new_messages = wrapped[depth:], []
        for n, entry in enumerate(new_entries, depth):
            new_messages.append(entry if isinstance(entry, Message) else _parse(entry, n, parsed))
        kind: MatchKind = "forks"
        if not index:
            kind = "root"
        elif depth == index and reply not in self.children:
            kind = "extends"
        turn = reply.best_turn if len(turns) > 1 else turns[0] if turns else None
        return HistoryMatch(self.role, self.scope, kind, turn, reply, tuple(new_messages), new_entries)

    def _match_child(
        self, node: MessageNode, entry: object, index: int, parsed: dict[int, Message]
    ) -> Sequence[MessageNode]:
        """Return the children of `node` that match the entry; several only if the entry leaves out its
        reasoning."""
        children = self.children.get(node)
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
        """Find the partial reply of which the message is the beginning, and return a node for that beginning.

        A reply is partial if its client closed the stream before the end. The client may have read less of it than
        the gateway sent, and continues from what it read.
        """
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
        """Add a sibling of `node` for `turn`, a truncated version of its partial turn, unless it exists.

        Returns the sibling and its turn.
        """
        assert node.parent is not None
        sibling = self._get_or_add(MessageNode(node.parent, turn.response))
        for existing in sibling.turns:
            if (existing.index, existing.end) == (turn.index, turn.end):
                return sibling, existing
        sibling.turns.append(turn)
        return sibling, turn

    # ---- insertion

    def find_existing(self, node: MessageNode, messages: Sequence[Message]) -> list[MessageNode]:
        """Return the existing nodes for the first of `messages`, which follow `node`, up to the first new
        message."""
        nodes: list[MessageNode] = []
        for message in messages:
            children = self.children.get(node)
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
        """Add `messages` after `node`, then the reply of `turn`. Return the node of the reply.

        `existing` are the nodes that exist already for the first of the messages; `entries` are the messages as
        the client sent them.
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
        """Add the node to its parent, or return the existing child with the same message and reasoning."""
        assert node.parent is not None
        children = self.children.get(node.parent)
        if children is None:
            children = self.children[node.parent] = _Children()
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
    """Return those of `nodes` whose reasoning equals that of the message; all if the message has no reasoning."""
    reasoning = message.reasoning
    return [node for node in nodes if node.reasoning == reasoning] if reasoning else nodes


def parse_messages(entries: Sequence[MessageInput]) -> tuple[Message, ...]:
    """Parse the messages of a call. Raises `MessageError` for an entry that is not a valid message."""
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


def _is_deeper(node: MessageNode, other: MessageNode) -> bool:
    """Return True if sampled message `node` is deeper in the tree than `other` or, at equal depth, was sampled
    later. `other` is a sampled message too, or the root."""
    if node.depth != other.depth:
        return node.depth > other.depth
    return node.turns[-1].index > other.turns[-1].index
