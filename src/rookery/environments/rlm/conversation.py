"""The conversation of one model that works in a REPL: the root model, or a sub-model with its own REPL.

After every cell the model gets its result and the remaining budget. When the conversation approaches the model's
context length, the model is warned and, if configured, the history is shortened. Turns that are already recorded
do not change; the turns after the shortening are recorded as a separate branch. The answer is the value that the
code set with `answer`, or the first message without a cell.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from rookery.core import Message, ToolSchema
from rookery.environments.code_environment import tags
from rookery.environments.rlm.observations import format_budget, truncate_middle
from rookery.environments.rlm.options import RlmOptions
from rookery.environments.rlm.prompts import DROPPED, SUMMARISE, SUMMARISED
from rookery.environments.rlm.python_repl import CellResult, Repl
from rookery.gateway import ModelReply

WARN, COMPACT, COMPACT_TO = 0.7, 0.85, 0.5
"""Shares of the model's context length at which it is warned, at which the history is shortened, and to which."""
SUMMARY_RESERVE = 0.1
"""Share of the context length that must be free to ask the model for a summary."""
CHARACTERS_PER_TOKEN = 3
"""A conservative estimate for the length of text that was not tokenised yet."""
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
_INVALID_ARGUMENTS = 'The arguments of repl are wrong: they must be a JSON object {"code": "…"}.'


class _CellArguments(msgspec.Struct, forbid_unknown_fields=True):
    code: str


class ChatFunction(Protocol):
    """Type of a function that makes one model call with these messages and tools, and returns the reply."""

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        tool_choice: str | None = None,
        stop: tuple[str, ...] = (),
    ) -> Awaitable[ModelReply]: ...


class Conversation:
    """Runs the turns of one model with its REPL until it answers.

    `chat` makes a model call. `get_budget` returns what is left of the budget. `on_cell` is called with the result
    of each cell. `charge` awaits the execution of a cell and counts the time as the policy's. `make_cut_error`
    returns the exception to raise for a reply that was cut at its token limit before it was complete.
    `context_tokens` is the model's context length; None means unknown, and the history is then never shortened.
    """

    def __init__(
        self,
        chat: ChatFunction,
        repl: Repl,
        options: RlmOptions,
        messages: list[Message],
        *,
        get_budget: Callable[[], dict[str, Any]],
        make_cut_error: Callable[[], Exception],
        on_cell: Callable[[CellResult], None],
        charge: Callable[[Awaitable[CellResult]], Awaitable[CellResult]],
        context_tokens: int | None = None,
    ) -> None:
        self.messages = messages
        self.compactions = 0
        self._first_messages = len(messages)
        self._chat = chat
        self._repl = repl
        self._options = options
        self._get_budget = get_budget
        self._make_cut_error = make_cut_error
        self._on_cell = on_cell
        self._charge = charge
        self._context_tokens = context_tokens
        self._tokens_used = 0
        self._tags = options.style == "tags"

    async def run(self) -> str:
        """Run turns until the model answers, and return the answer."""
        while True:
            reply = await self._ask_model()
            self.messages.append(reply.message)
            observations = await (self._handle_tags(reply) if self._tags else self._handle_calls(reply))
            if self._repl.functions.answered:
                return self._repl.functions.value
            if observations is None:
                return reply.text
            self.messages += observations
            await self._compact(self._estimate_tokens(observations))

    async def _ask_model(self, *, tool_choice: str | None = None) -> ModelReply:
        tools = () if self._tags else (REPL,)
        stop = (tags.END,) if self._tags else ()
        reply = await self._chat(self.messages, tools=tools, tool_choice=tool_choice, stop=stop)
        turn = reply.turn
        self._tokens_used = (turn.prompt_tokens or self._estimate_tokens(self.messages)) + turn.sampled_tokens
        return reply

    async def _handle_tags(self, reply: ModelReply) -> list[Message] | None:
        code = tags.extract_code(reply.text)
        if reply.finish == "length" and (code is None or not tags.is_closed(reply.text)):
            raise self._make_cut_error()
        return None if code is None else [Message("user", tags.wrap_result(await self._run_cell(code)))]

    async def _handle_calls(self, reply: ModelReply) -> list[Message] | None:
        if not reply.tool_calls:
            if reply.finish == "length":
                raise self._make_cut_error()
            return None
        observations = []
        for call in reply.tool_calls:
            if call.name != REPL.name:
                text = f"There is no tool named {call.name!r:.100}. The tool is: repl."
            else:
                try:
                    code = msgspec.json.decode(call.arguments, type=_CellArguments).code
                except (msgspec.MsgspecError, UnicodeError, RecursionError):
                    text = _INVALID_ARGUMENTS
                else:
                    text = await self._run_cell(code)
            observations.append(Message("tool", text, tool_call_id=call.id))
        return observations

    async def _run_cell(self, code: str) -> str:
        result = await self._charge(self._repl.run(code))
        self._on_cell(result)
        tokens = self._tokens_used + len(result.text) // CHARACTERS_PER_TOKEN
        warn = self._context_tokens is not None and tokens > WARN * self._context_tokens
        return f"{result.text}\n{format_budget(self._get_budget(), tokens, self._context_tokens, warn=warn)}"

    # ---- shortening

    def _estimate_tokens(self, messages: Sequence[Message]) -> int:
        return sum(len(message.text) for message in messages) // CHARACTERS_PER_TOKEN

    async def _compact(self, new: int) -> None:
        """Shorten the history, as configured, if its tokens and `new` further ones approach the context length."""
        if self._context_tokens is None or self._options.compaction == "none":
            return
        expected = self._tokens_used + new
        if expected <= COMPACT * self._context_tokens:
            return
        self.compactions += 1
        if self._options.compaction == "summary" and expected <= (1 - SUMMARY_RESERVE) * self._context_tokens:
            await self._summarise()
        else:
            self._drop(expected)

    async def _summarise(self) -> None:
        self.messages.append(Message("user", SUMMARISE))
        reply = await self._ask_model(tool_choice=None if self._tags else "none")
        summary = truncate_middle(reply.text, int(self._context_tokens or 0))
        self.messages[self._first_messages :] = [Message("user", SUMMARISED.format(summary=summary))]

    def _drop(self, expected: int) -> None:
        """Replace the oldest cell results by a short note until about half of the context length is used.

        The last message is never replaced. `expected` is the current number of tokens.
        """
        goal = COMPACT_TO * (self._context_tokens or 0)
        for index in range(self._first_messages, len(self.messages) - 1):
            message = self.messages[index]
            note = DROPPED.format(count=len(message.text))
            if expected <= goal:
                return
            if message.role == "assistant" or len(message.text) <= 2 * len(note):
                continue
            expected -= (len(message.text) - len(note)) // CHARACTERS_PER_TOKEN
            text = tags.wrap_result(note) if message.role == "user" else note
            self.messages[index] = Message(message.role, text, tool_call_id=message.tool_call_id)
