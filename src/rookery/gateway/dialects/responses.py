"""OpenAI's responses, streamed and not.

Promises:
- what OpenAI's own library, its agents and Codex send is understood, and what they are sent, they read as from
  OpenAI;
- a field that changes the meaning of a request is supported or refused; items that are not known here are shown to
  the model as they are; tools that only OpenAI runs are not offered;
- an answer can be gone on from by its name, or by sending its items back: either way what was sampled is extended;
- names of answers hold as long as the session does, also after a restart;
- an error has OpenAI's shape; one that a retry cannot mend has a status that its library does not retry.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw

from rookery.core import Message, Sampling
from rookery.gateway.dialects.protocol import Ask, BadRequestError, Problem
from rookery.gateway.dialects.responses_items import (
    Offered,
    messages_of,
    offered,
    references_in,
    stem_of,
    with_items,
    within,
)
from rookery.gateway.dialects.responses_stream import ResponsesAnswering, settled
from rookery.gateway.dialects.shared import (
    MAX_TOP,
    NULL,
    ONE_CALL,
    Count,
    Field,
    Seed,
    Share,
    Temperature,
    encode,
    openai_error,
    read,
    refuse,
    schema_extra,
    system_first,
)
from rookery.gateway.session import Reply, Spell

SEALED: Final = "reasoning.encrypted_content"
LOGPROBS: Final = "message.output_text.logprobs"


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says about its request."""

    offer: Offered = Offered()
    input: str | list[Any] = ""
    """The input, where it has references to items."""
    instructions: str = ""
    seal: bool = False
    """Whether the client wants reasoning that it can only pass on."""
    about: dict[str, Any] = {}
    created: int = 0


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input: str | list[Any] = []
    model: str = ""
    instructions: str | list[Any] | None = None
    stream: bool | None = False
    store: bool | None = True
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = False
    include: list[str] | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP)] | None = None
    seed: Seed | None = None
    tools: Field = UNSET
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    text: Any = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    # What is refused, unless it asks for nothing.
    access_programs: Field = UNSET
    context_management: Field = UNSET
    image: Field = UNSET
    moderation: Field = UNSET
    prompt: Field = UNSET
    # What changes nothing about an answer: who asks, what is billed or cached, limits on tools that only OpenAI
    # runs, and hints on effort that models may follow or not.
    client_metadata: Field = UNSET
    max_tool_calls: Field = UNSET
    prompt_cache_key: Field = UNSET
    prompt_cache_options: Field = UNSET
    prompt_cache_retention: Field = UNSET
    reasoning: Field = UNSET
    safety_identifier: Field = UNSET
    service_tier: Field = UNSET
    stream_options: Field = UNSET
    user: Field = UNSET


_REFUSED: Final = {
    "access_programs": "there is one way to use a model here",
    "image": "answers are text",
    "context_management": "compact the conversation in the client",
    "moderation": "nothing here moderates",
    "prompt": "prompt templates are not kept here; send the instructions and the input",
}

_decode = msgspec.json.Decoder(_Request).decode


class ResponsesDialect:
    """`responses`."""

    name = "responses"
    paths: tuple[str, ...] = ("/responses",)
    counts: tuple[str, ...] = ("/responses/input_tokens",)
    keeps = "/responses/"

    def ask(self, body: bytes) -> Ask:
        request = read(_decode, body)
        refuse(request, _REFUSED)
        if request.truncation not in (None, "auto", "disabled"):  # what would be truncated is an error of its own
            raise BadRequestError("truncation is auto or disabled", "truncation")
        if request.background:
            raise BadRequestError("answers in the background are not served; ask for a stream", "background")
        if request.conversation is not None:
            raise BadRequestError(
                "conversations are not kept; send the items, or a previous_response_id", "conversation"
            )
        offer = Offered()
        if request.tools is not UNSET and bytes(request.tools) != NULL:
            offer = offered(bytes(request.tools))
        own = _instructions(request.instructions)
        after = request.previous_response_id or ""
        references = references_in(request.input)
        said = () if references else tuple(messages_of(request.input))
        if not said and not after and not references:
            raise BadRequestError("there is nothing to answer: the input is empty", "input")
        first = (Message("system", own),) if own else ()
        include = request.include or []
        return Ask(
            messages=said if after else system_first((*first, *said), merge=False),
            model=request.model,
            tools=offer.tools,
            tool_choice=_tool_choice(request.tool_choice, offer),
            sampling=Sampling(
                temperature=request.temperature,
                top_p=request.top_p,
                max_tokens=request.max_output_tokens,
                seed=request.seed,
                extra=_format(request.text)
                | (ONE_CALL if offer.tools.schemas and request.parallel_tool_calls is False else {}),
            ),
            stream=bool(request.stream),
            logprobs=LOGPROBS in include or bool(request.top_logprobs),
            top_logprobs=request.top_logprobs or 0,
            id=secrets.token_hex(12) if request.store is not False else "",
            after=after.removeprefix("resp_"),
            references=references,
            head=len(own),
            own=Own(
                offer=offer,
                input=request.input if references else "",
                instructions=own,
                seal=SEALED in include,
                created=int(time.time()),
                about={
                    "instructions": request.instructions,
                    "max_output_tokens": request.max_output_tokens,
                    "metadata": request.metadata or {},
                    "parallel_tool_calls": request.parallel_tool_calls is not False,
                    "previous_response_id": request.previous_response_id,
                    "store": request.store is not False,
                    "temperature": request.temperature,
                    "text": request.text if isinstance(request.text, dict) else {"format": {"type": "text"}},
                    "tool_choice": request.tool_choice or "auto",
                    "top_p": request.top_p,
                },
            ),
        )

    def whole(self, ask: Ask, replies: list[Reply]) -> bytes:
        (reply,) = replies
        return encode(settled(ask, ask.id or secrets.token_hex(12), reply))

    def answering(self, ask: Ask, spell: Spell | None = None) -> ResponsesAnswering:
        return ResponsesAnswering(ask, spell)

    def error(self, problem: Problem, message: str, where: str | None = None) -> tuple[int, bytes]:
        status, error = openai_error(problem, message, "input" if where == "messages" else where)
        return status, encode({"error": error})

    def counted(self, tokens: int) -> bytes:
        return b'{"object":"response.input_tokens","input_tokens":%d}' % tokens

    def referenced(self, name: str) -> str:
        return stem_of(name)

    def resolved(self, ask: Ask, answers: Mapping[str, Message]) -> Ask:
        own: Own = ask.own
        assert not isinstance(own.input, str)
        said = tuple(messages_of(with_items(own.input, answers, own.offer)))
        if not ask.after:
            first = (Message("system", own.instructions),) if own.instructions else ()
            said = system_first((*first, *said), merge=False)
        return msgspec.structs.replace(ask, messages=said)

    def continued(self, ask: Ask, history: Sequence[Message], head: int) -> Ask:
        own: Own = ask.own
        first = [Message("system", own.instructions)] if own.instructions else []
        if head and history and isinstance(text := history[0].content, str):
            rest = text[head:].removeprefix("\n\n")
            history = [*([Message(history[0].role, rest)] if rest else []), *history[1:]]
        given = (message for message in ask.messages if isinstance(message, Message))
        return msgspec.structs.replace(ask, messages=system_first((*first, *history, *given), merge=False))

    def kept(self, name: str, reply: Reply, model: str) -> bytes:
        own = Own(created=int(reply.turn.started))
        return encode(settled(Ask(model=model, own=own), name.removeprefix("resp_"), reply))

    def forgotten(self, name: str) -> bytes:
        return encode({"id": name, "object": "response.deleted", "deleted": True})


def _instructions(given: str | list[Any] | None) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    return "\n\n".join(message.text for message in messages_of(given) if message.text)


def _tool_choice(choice: Any, offer: Offered) -> str | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise BadRequestError("tool_choice is none, auto, required or names a tool", "tool_choice")
        return choice
    if not isinstance(choice, dict):
        raise BadRequestError("tool_choice is a text or an object", "tool_choice")
    kind, name = choice.get("type"), choice.get("name")
    if kind in ("function", "custom"):
        if not isinstance(name, str) or not name:
            raise BadRequestError("tool_choice names no tool", "tool_choice.name")
        return within(choice.get("namespace"), name)
    if kind == "allowed_tools":
        listed = [one for one in choice.get("tools") or () if isinstance(one, dict)]
        allowed = {within(one.get("namespace"), str(one.get("name"))) for one in listed}
        if missing := sorted({tool.name for tool in offer.tools.schemas} - allowed):
            said = f"all tools of a request may be called: leave out those that may not ({', '.join(missing)})"
            raise BadRequestError(said, "tool_choice.tools")
        return "required" if choice.get("mode") == "required" else "auto"
    raise BadRequestError(f"no tool of the type {str(kind)[:80]!r} is run here", "tool_choice.type")


def _format(text: Any) -> dict[str, Any]:
    """What the answer's text must be, as engines read it."""
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(form, dict):
        return {}
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise BadRequestError("the format of a text is text, json_object or json_schema", "text.format")
    if kind == "json_schema":
        return {
            "response_format": schema_extra(form.get("name") or "answer", form.get("schema"), form.get("strict"))
        }
    return {"response_format": Raw(b'{"type":"json_object"}')} if kind == "json_object" else {}
