"""The turns of one model with its REPL: of the root, or of a sub-model that has a REPL.

Every cell gets one observation, with the remaining budget. When the conversation approaches the model's context
length, the model is warned and, if configured, the history is shortened. Recorded turns stay as they were
sampled; the shortened history is recorded as a fork. The answer is the value that the code set, or the first
message without a cell.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from rookery.core import Message, ToolSchema
from rookery.environments.code import tags
from rookery.environments.rlm.observations import format_budget, truncate_middle, wrap_result
from rookery.environments.rlm.options import RlmOptions
from rookery.environments.rlm.prompts import DROPPED, SUMMARISE, SUMMARISED
from rookery.environments.rlm.python_repl import CellResult, Repl
from rookery.gateway import ModelReply

WARN, SHORTEN, DOWN_TO = 0.7, 0.85, 0.5
"""Shares of the model's context length: warn, shorten, and target after shortening."""
SUMMARY_ROOM = 0.1
PER_TOKEN = 3
"""Characters per token, a conservative estimate for text that was not tokenised yet."""
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


class ChatFunction(Protocol):
    """Makes one model call."""

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        tool_choice: str | None = None,
        stop: tuple[str, ...] = (),
    ) -> Awaitable[ModelReply]: ...


class Conversation:
    """Runs the turns of one model.

    `cut` makes the exception for a reply that was cut at its token limit before it was usable.
    """

    def __init__(
        self,
        speak: ChatFunction,
        repl: Repl,
        options: RlmOptions,
        messages: list[Message],
        *,
        left: Callable[[], dict[str, Any]],
        cut: Callable[[], Exception],
        on_cell: Callable[[CellResult], None],
        working: Callable[[Awaitable[CellResult]], Awaitable[CellResult]],
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

    async def run(self) -> str:
        """Run turns until the model answers, and return the answer."""
        while True:
            reply = await self._ask_model()
            self.messages.append(reply.message)
            observed = await (self._handle_tags(reply) if self._tags else self._handle_calls(reply))
            if self._repl.functions.answered:
                return self._repl.functions.value
            if observed is None:
                return reply.text
            self.messages += observed
            await self._shorten(self._estimate_tokens(observed))

    async def _ask_model(self, *, tool_choice: str | None = None) -> ModelReply:
        tools = () if self._tags else (REPL,)
        stop = (tags.END,) if self._tags else ()
        reply = await self._speak(self.messages, tools=tools, tool_choice=tool_choice, stop=stop)
        turn = reply.turn
        self._used = (turn.prompt_tokens or self._estimate_tokens(self.messages)) + turn.sampled_tokens
        return reply

    async def _handle_tags(self, reply: ModelReply) -> list[Message] | None:
        code = tags.extract_code(reply.text)
        if reply.finish == "length" and (code is None or not tags.is_closed(reply.text)):
            raise self._cut()
        return None if code is None else [Message("user", wrap_result(await self._run_cell(code)))]

    async def _handle_calls(self, reply: ModelReply) -> list[Message] | None:
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
                    text = await self._run_cell(code)
            found.append(Message("tool", text, tool_call_id=call.id))
        return found

    async def _run_cell(self, code: str) -> str:
        observed = await self._working(self._repl.run(code))
        self._on_cell(observed)
        used = self._used + len(observed.text) // PER_TOKEN
        warn = self._context is not None and used > WARN * self._context
        return f"{observed.text}\n{format_budget(self._left(), used, self._context, warn=warn)}"

    # ---- shortening

    def _estimate_tokens(self, messages: Sequence[Message]) -> int:
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
        reply = await self._ask_model(tool_choice=None if self._tags else "none")
        summary = truncate_middle(reply.text, int(self._context or 0))
        self.messages[self._head :] = [Message("user", SUMMARISED.format(summary=summary))]

    def _drop(self, coming: int) -> None:
        """Drop the oldest observations until about half of the context length is used. Keep the last one."""
        goal = DOWN_TO * (self._context or 0)
        for at in range(self._head, len(self.messages) - 1):
            message = self.messages[at]
            note = DROPPED.format(count=len(message.text))
            if coming <= goal:
                return
            if message.role == "assistant" or len(message.text) <= 2 * len(note):
                continue
            coming -= (len(message.text) - len(note)) // PER_TOKEN
            text = wrap_result(note) if message.role == "user" else note
            self.messages[at] = Message(message.role, text, tool_call_id=message.tool_call_id)
