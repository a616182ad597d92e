"""The histories of a role as one tree of messages: what they share is kept once.

Promises:
- a history is found however it is spelled: raw bytes are compared first, what they mean only where they differ;
- finding a history that goes on costs its new messages, and one comparison of the bytes of the others;
- the whole tree is kept: a history can be taken up again at any point;
- messages that differ in their reasoning alone are two; a client that leaves the reasoning out means whichever of
  them leads further.
"""

from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import ne
from typing import Final, TypeAlias

import msgspec

from rookery.core import Message
from rookery.trajectories.canonical import Key, key_of, message_of
from rookery.trajectories.strands import Node

Entry: TypeAlias = Message | bytes | msgspec.Raw
"""One message of a call: decoded, or the JSON object that a client sent."""

ALIASES: Final = 2
"""Spellings kept of each message: as it comes with a cache hint, and without."""
TRAILS: Final = 4
"""Histories that are compared in one go: as many as sub-agents usually talk in turns."""
LOOKED: Final = 8
"""Latest branches whose bytes are compared one by one, before a message is decoded and looked up."""

_NEVER: Final = object()


class Step:
    """One message at its place in a history. Steps know what is before them, the tree what comes after."""

    __slots__ = ("_key", "aliases", "depth", "message", "nodes", "parent", "twin")

    def __init__(self, parent: "Step | None", message: Message) -> None:
        self.parent = parent
        self.message = message
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.aliases: tuple[msgspec.Raw, ...] = ()
        """How it was spelled, the latest first; none of a twin's."""
        self.nodes: list[Node] = []
        """The turns whose answer it is."""
        self.twin = False
        """Whether another message here differs in the reasoning alone, so that a spelling may mean both."""
        self._key: Key | None = None

    @property
    def key(self) -> Key:
        if self._key is None:
            self._key = key_of(self.message)
        return self._key

    @property
    def reasoning(self) -> str:
        return self.message.reasoning or ""

    @property
    def told(self) -> bool:
        """Whether a turn that ends here has ids."""
        return any(node.strand is not None and not node.short for node in self.nodes)

    @property
    def node(self) -> Node | None:
        """The turn to go on from: a whole one before others, then the latest."""
        nodes = self.nodes
        if len(nodes) < 2:
            return nodes[0] if nodes else None
        return max(nodes, key=lambda node: (node.whole, node.strand is not None, node.index))

    def spelled(self, raw: msgspec.Raw) -> msgspec.Raw:
        """Remembers a spelling; a copy of its own, since `raw` may be a view of a whole request."""
        alias = raw.copy()
        self.aliases = (alias, *self.aliases[: ALIASES - 1])
        return alias

    def up(self) -> "Iterator[Step]":
        """This step and those before it, the top left out."""
        step = self
        while step.parent is not None:
            yield step
            step = step.parent


class _Same:
    """Stands for a message in parts: `==` on their values would take 1 for true, so it must be the same object."""

    __slots__ = ("message",)

    def __init__(self, message: Message) -> None:
        self.message = message

    def __eq__(self, other: object) -> bool:
        return other is self.message

    __hash__ = None  # type: ignore[assignment]


def _comparable(message: Message) -> object:
    return _Same(message) if isinstance(message.content, tuple) else message


def _raw(entry: object) -> object:
    return msgspec.Raw(entry) if isinstance(entry, bytes) else entry


class Trail:
    """One history from the first message on, in lists that are compared with a request's in one go."""

    __slots__ = ("messages", "raws", "steps")

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps: list[Step] = []
        self.raws: list[object] = []
        self.messages: list[object] = []
        self.extend(steps)

    def extend(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.steps.append(step)
            self.raws.append(step.aliases[0] if step.aliases else _NEVER)
            self.messages.append(_NEVER if step.twin else _comparable(step.message))

    def respell(self, n: int, entry: object) -> None:
        """Expects a message in the spelling that came last."""
        step = self.steps[n]
        if step.aliases:
            self.raws[n] = step.aliases[0]
        if isinstance(entry, Message) and not step.twin:
            self.messages[n] = _comparable(entry)

    def follow(self, entries: Sequence[object], start: int) -> int:
        """Up to where the entries are this history's, when they are up to `start`."""
        end = min(len(entries), len(self.steps))
        if start >= end:
            return start
        own = self.messages if isinstance(entries[start], Message) else self.raws
        if start:
            own, entries = own[start:end], entries[start:end]
        return next(compress(count(start), map(ne, own, entries)), end)


class _Fan:
    """What follows a step: in order of appearance, and by meaning once that was asked for."""

    __slots__ = ("by_key", "steps")

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.by_key: dict[Key, list[Step]] | None = None

    def add(self, step: Step) -> None:
        self.steps.append(step)
        if self.by_key is not None:
            self.by_key.setdefault(step.key, []).append(step)

    def meaning(self, key: Key) -> list[Step]:
        if self.by_key is None:
            self.by_key = {}
            for step in self.steps:
                self.by_key.setdefault(step.key, []).append(step)
        return self.by_key.get(key, [])


class Found(msgspec.Struct, frozen=True):
    """What a tree knows of a history."""

    step: Step
    """The last answer in it, or the top."""
    new: tuple[Message, ...]
    """The messages after that."""
    raws: Sequence[object]
    """The same as they came."""
    shared: int
    """How many messages are those of an earlier history."""
    ends: bool
    """Whether an earlier history ends where the shared messages do."""


class Tree:
    """All histories of one role and scope."""

    def __init__(self) -> None:
        self.top = Step(None, Message("system"))
        self._fans: dict[Step, _Fan] = {}
        self._trails: list[Trail] = []

    def goes_on(self, step: Step) -> bool:
        """Whether a history goes on after the step. Where none does, the step is an answer."""
        return step in self._fans

    # ---- finding

    def find(self, entries: Sequence[Entry]) -> Found:
        """Raises `MessageError` for an entry that is new and no message."""
        given: Sequence[object] = entries
        if isinstance(entries[0], bytes):
            given = [_raw(entry) for entry in entries]
        known: dict[int, Message] = {}
        trail, at = self._trail(given)
        steps = [trail.steps[at - 1] if trail is not None and at else self.top]
        last = _answer(steps[0])
        while at < len(given):
            found = [step for before in steps for step in self._after(before, given[at], at, known)]
            if not found:
                break
            steps = found
            for step in steps:
                if step.nodes and (last is None or _later(step, last)):
                    last = step
            at += 1
            if (
                trail is not None
                and len(steps) == 1
                and at <= len(trail.steps)
                and trail.steps[at - 1] is steps[0]
            ):
                trail.respell(at - 1, given[at - 1])
                far = trail.follow(given, at)
                if far > at:
                    at, steps = far, [trail.steps[far - 1]]
                    reached = _answer(steps[0])
                    if reached is not None and (last is None or _later(reached, last)):
                        last = reached
        depth = 0 if last is None else last.depth
        return Found(
            step=self.top if last is None else last,
            new=tuple([_read(given[n], n, known) for n in range(depth, len(given))]),
            raws=given[depth:],
            shared=at,
            ends=last is not None and last.depth == at and not self.goes_on(last),
        )

    def _trail(self, given: Sequence[object]) -> tuple[Trail | None, int]:
        """The latest history that shares most, and how much it shares."""
        best, far = None, 0
        for trail in reversed(self._trails):
            reached = trail.follow(given, 0)
            if reached > far:
                best, far = trail, reached
                if far in (len(given), len(trail.steps)):
                    break
        return best, far

    def _after(self, step: Step, entry: object, at: int, known: dict[int, Message]) -> Sequence[Step]:
        """The steps after this one that the entry may mean; several only where its reasoning was left out."""
        fan = self._fans.get(step)
        if fan is None:
            return ()
        entry = _raw(entry)
        if isinstance(entry, msgspec.Raw):
            for child in reversed(fan.steps[-LOOKED:]):
                for n, alias in enumerate(child.aliases):
                    if alias == entry:
                        if n:  # a spelling that comes again is the likeliest to come next
                            child.aliases = (alias, *child.aliases[:n], *child.aliases[n + 1 :])
                        return (child,)
        message = _read(entry, at, known)
        found = meant(fan.meaning(key_of(message)), message)
        if not found:
            found = self._shorter(fan, message)
        if len(found) == 1 and not found[0].twin and isinstance(entry, msgspec.Raw):
            found[0].spelled(entry)
        return found

    def _shorter(self, fan: "_Fan", message: Message) -> list[Step]:
        """The step for a client that stopped reading a partial answer earlier than the gateway stopped writing."""
        if message.role != "assistant":
            return []
        content, calls = len(message.text), len(message.tool_calls)
        reasoning = message.reasoning or ""
        for step in reversed(fan.steps):
            for node in step.nodes:
                for cut in node.cuts:
                    if (cut.content, cut.calls) != (content, calls):
                        continue
                    if reasoning and cut.reasoning != len(reasoning):
                        continue
                    shorter = node.upto(cut)
                    said = shorter.response
                    if key_of(said) == key_of(message) and (not reasoning or said.reasoning == reasoning):
                        return [self.shorten(step, shorter)[0]]
        return []

    def shorten(self, step: Step, node: Node) -> tuple[Step, Node]:
        """The step beside `step`, which ends a partial turn, for less of that turn's answer, and its node."""
        assert step.parent is not None
        made = self._put(Step(step.parent, node.response))
        for one in made.nodes:
            if (one.index, one.end) == (node.index, node.end):
                return made, one
        made.nodes.append(node)
        return made, node

    # ---- adding

    def follow(self, step: Step, messages: Sequence[Message]) -> list[Step]:
        """The steps that are there already for messages after `step`."""
        steps: list[Step] = []
        for message in messages:
            fan = self._fans.get(step)
            if fan is None:
                break
            found = meant(fan.meaning(key_of(message)), message)
            if not found:
                break
            step = max(found, key=lambda one: one.reasoning == (message.reasoning or ""))
            steps.append(step)
        return steps

    def add(
        self, step: Step, there: list[Step], messages: Sequence[Message], raws: Sequence[object], node: Node
    ) -> Step:
        """Keeps a history: `messages` after `step`, of which `there` are kept already, and the node's answer."""
        path = list(there)
        at = path[-1] if path else step
        for n in range(len(path), len(messages)):
            made = Step(at, messages[n])
            if n < len(raws) and isinstance(raw := _raw(raws[n]), msgspec.Raw):
                made.spelled(raw)
            at = self._put(made)
            path.append(at)
        at = self._put(Step(at, node.response))
        at.nodes.append(node)
        path.append(at)
        self._keep_trail(step, path)
        return at

    def _put(self, step: Step) -> Step:
        """The step, or the one that is there for the same message with the same reasoning."""
        assert step.parent is not None
        fan = self._fans.get(step.parent)
        if fan is None:
            fan = self._fans[step.parent] = _Fan()
        else:
            twins = fan.meaning(step.key)
            for other in twins:
                if other.reasoning == step.reasoning:
                    return other
            for one in (step, *twins) if twins else ():
                one.twin, one.aliases = True, ()
            if twins:
                self._trails.clear()  # they know the twins by spellings that mean both now
        fan.add(step)
        return step

    def _keep_trail(self, step: Step, path: list[Step]) -> None:
        for n, trail in enumerate(self._trails):
            if trail.steps[-1] is step:
                trail.extend(path)
                del self._trails[n]
                break
        else:
            trail = Trail(list(path[-1].up())[::-1])
        self._trails.append(trail)
        del self._trails[:-TRAILS]


def meant(steps: list[Step], message: Message) -> list[Step]:
    """Those of equal messages that have the message's reasoning; all of them where it brings none."""
    reasoning = message.reasoning
    return [step for step in steps if step.reasoning == reasoning] if reasoning else steps


def read(entries: Sequence[Entry]) -> tuple[Message, ...]:
    """The messages of a call. Raises `MessageError` for an entry that is none."""
    known: dict[int, Message] = {}
    return tuple([_read(entry, n, known) for n, entry in enumerate(entries)])


def _read(entry: object, at: int, known: dict[int, Message]) -> Message:
    if isinstance(entry, Message):
        return entry
    message = known.get(at)
    if message is None:
        assert isinstance(entry, bytes | msgspec.Raw)
        message = known[at] = message_of(entry, at)
    return message


def _answer(step: Step) -> Step | None:
    """The last answer on the way to a step."""
    at: Step | None = step
    while at is not None and not at.nodes:
        at = at.parent
    return at


def _later(step: Step, other: Step) -> bool:
    """Whether a history is known further; where two are known equally far, which is the later one."""
    if step.depth != other.depth:
        return step.depth > other.depth
    return step.nodes[-1].index > other.nodes[-1].index
