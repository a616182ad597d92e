"""A model and its REPL, turn by turn: the root's conversation, and that of each sub-model with a REPL.

Promises:
- every cell is answered by one observation, with what the tree may still use;
- near the length that the model can take it is warned, and the history is shortened where that was asked for: what
  was said stays recorded as it was sampled, and the shorter history is a fork;
- the answer is what the code set, else the first message without a cell.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from rookery.core import Message, ToolSchema
from rookery.environments.code import tags
from rookery.environments.rlm.observing import budget_line, capped, tagged
from rookery.environments.rlm.options import Options
from rookery.environments.rlm.prompts import DROPPED, SUMMARISE, SUMMARISED
from rookery.environments.rlm.repl import Observed, Repl
from rookery.gateway import Reply

WARN, SHORTEN, DOWN_TO = 0.7, 0.85, 0.5
"""Parts of the length that the model can take."""
SUMMARY_ROOM = 0.1
PER_TOKEN = 3
"""Characters: a careful guess, for text that no model has counted yet."""
REPL = ToolSchema(
    "repl",
    "Runs a cell in the persistent REPL and returns what it printed.",
    {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The cell."}},
        "required": ["code"],
        "additionalProperties": False,
    },
)
_BAD = 'The arguments of repl are wrong: they must be a JSON object {"code": "…"}.'


class _Cell(msgspec.Struct, forbid_unknown_fields=True):
    code: str


class Speak(Protocol):
    """One model call."""

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        tool_choice: str | None = None,
        stop: tuple[str, ...] = (),
    ) -> Awaitable[Reply]: ...


class Conversation:
    """`cut` is what is raised when an answer was cut at its token limit before it meant anything."""

    def __init__(
        self,
        speak: Speak,
        repl: Repl,
        options: Options,
        messages: list[Message],
        *,
        left: Callable[[], dict[str, Any]],
        cut: Callable[[], Exception],
        on_cell: Callable[[Observed], None],
        working: Callable[[Awaitable[Observed]], Awaitable[Observed]],
        context: int | None = None,
    ) -> None:
        self.messages = messages
        self.compactions = 0
        self._head = len(messages)
        self._speak = speak
        self._repl = repl
        self._options = options
        self._left = left
        self._cut = cut
        self._on_cell = on_cell
        self._working = working
        self._context = context
        self._used = 0
        self._tags = options.style == "tags"

    async def play(self) -> str:
        """The answer."""
        while True:
            reply = await self._said()
            self.messages.append(reply.message)
            observed = await (self._tagged(reply) if self._tags else self._called(reply))
            if self._repl.verbs.answered:
                return self._repl.verbs.value
            if observed is None:
                return reply.text
            self.messages += observed
            await self._shorten(self._guess(observed))

    async def _said(self, *, tool_choice: str | None = None) -> Reply:
        tools = () if self._tags else (REPL,)
        stop = (tags.END,) if self._tags else ()
        reply = await self._speak(self.messages, tools=tools, tool_choice=tool_choice, stop=stop)
        turn = reply.turn
        self._used = (turn.prompt_tokens or self._guess(self.messages)) + turn.sampled_tokens
        return reply

    async def _tagged(self, reply: Reply) -> list[Message] | None:
        code = tags.code_of(reply.text)
        if reply.finish == "length" and (code is None or not tags.closed(reply.text)):
            raise self._cut()
        return None if code is None else [Message("user", tagged(await self._ran(code)))]

    async def _called(self, reply: Reply) -> list[Message] | None:
        if not reply.tool_calls:
            if reply.finish == "length":
                raise self._cut()
            return None
        found = []
        for call in reply.tool_calls:
            if call.name != REPL.name:
                text = f"There is no tool named {call.name!r:.100}. The tool is: repl."
            else:
                try:
                    code = msgspec.json.decode(call.arguments, type=_Cell).code
                except (msgspec.MsgspecError, UnicodeError, RecursionError):
                    text = _BAD
                else:
                    text = await self._ran(code)
            found.append(Message("tool", text, tool_call_id=call.id))
        return found

    async def _ran(self, code: str) -> str:
        observed = await self._working(self._repl.run(code))
        self._on_cell(observed)
        used = self._used + len(observed.text) // PER_TOKEN
        warn = self._context is not None and used > WARN * self._context
        return f"{observed.text}\n{budget_line(self._left(), used, self._context, warn=warn)}"

    # ---- shortening

    def _guess(self, messages: Sequence[Message]) -> int:
        return sum(len(message.text) for message in messages) // PER_TOKEN

    async def _shorten(self, new: int) -> None:
        if self._context is None or self._options.compaction == "none":
            return
        coming = self._used + new
        if coming <= SHORTEN * self._context:
            return
        self.compactions += 1
        if self._options.compaction == "summary" and coming <= (1 - SUMMARY_ROOM) * self._context:
            await self._summarise()
        else:
            self._drop(coming)

    async def _summarise(self) -> None:
        self.messages.append(Message("user", SUMMARISE))
        reply = await self._said(tool_choice=None if self._tags else "none")
        summary = capped(reply.text, int(self._context or 0))
        self.messages[self._head :] = [Message("user", SUMMARISED.format(summary=summary))]

    def _drop(self, coming: int) -> None:
        """The oldest observations, until about half of the length is left; the last one stays."""
        goal = DOWN_TO * (self._context or 0)
        for at in range(self._head, len(self.messages) - 1):
            message = self.messages[at]
            note = DROPPED.format(count=len(message.text))
            if coming <= goal:
                return
            if message.role == "assistant" or len(message.text) <= 2 * len(note):
                continue
            coming -= (len(message.text) - len(note)) // PER_TOKEN
            text = tagged(note) if message.role == "user" else note
            self.messages[at] = Message(message.role, text, tool_call_id=message.tool_call_id)
