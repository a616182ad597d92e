"""A model's own chat template as a rendering, for models that no family is known of; and `auto`, which chooses.

Promises, beyond those of every rendering:
- a prompt is what the template makes of the messages, tokenised as one text;
- an answer is extended by what the template writes after an answer, found by rendering two small conversations
  that differ in all but the new messages: what both agree on is used, where the answer ends as both end;
- calls and reasoning are read by the parsers that were chosen; without one, they are text.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rookery.core import Message, ToolSchema, UsageError
from rookery.core.errors import describe
from rookery.gateway.renderings.families import Family, family_of, open_family, package
from rookery.gateway.renderings.protocol import Unrenderable
from rookery.gateway.renderings.tokenizer import Tokenizer, open_tokenizer
from rookery.gateway.renderings.words import plain, schemas

if TYPE_CHECKING:
    from rookery.gateway.renderings import RenderingConfig
    from rookery.gateway.renderings.protocol import Rendering

_HERE: Final = "rookery7answer7ends7here"
"""A text that no template writes by itself."""


def open_auto(config: "RenderingConfig") -> "Rendering":
    """The entry point `auto`: the family of the model that the tokenizer is of, else its own template."""
    import msgspec

    tokenizer = open_tokenizer(config.tokenizer, config.template)
    family = "" if config.template is not None or config.tool_parser else family_of(tokenizer)
    if family:
        return open_family(msgspec.structs.replace(config, name=family, reasoning_parser=None))
    if not tokenizer.chat_template:
        raise UsageError(
            f"no family is known of the tokenizer in {tokenizer.folder}, and it has no chat template: "
            "name the family, or give a template"
        )
    return open_default(msgspec.structs.replace(config, name="default"))


def open_default(config: "RenderingConfig") -> "Templated":
    """The entry point `default`."""
    renderers = package()
    tokenizer = open_tokenizer(config.tokenizer, config.template)
    _ = tokenizer.template  # one that is missing or broken is said now
    from renderers import parsers

    for what, name, known in (
        ("tool_parser", config.tool_parser, parsers.TOOL_PARSERS),
        ("reasoning_parser", config.reasoning_parser, parsers.REASONING_PARSERS),
    ):
        if name is not None and name not in known:
            raise UsageError(f"there is no {what} {name!r}; known: {', '.join(sorted(known))}")
    try:
        chosen = renderers.configs.DefaultRendererConfig(
            **config.options, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser
        )
        renderer = renderers.create_renderer(tokenizer, chosen)
    except (ValueError, TypeError) as error:
        raise UsageError(f"`default` cannot have these options: {describe(error)}") from error
    made = Templated(tokenizer, renderer, config.options)
    made.settle_tools(config.tool_prompt, allowed=config.allow_no_tools)
    return made


class Templated(Family):
    """The rendering of a template."""

    def __init__(self, tokenizer: Tokenizer, renderer: Any, options: dict[str, Any]) -> None:
        self._options = dict(options)
        super().__init__("default", tokenizer, renderer)
        self._ends = [tokenizer.decode([stop]) for stop in self.stop]

    def extend(
        self,
        tail: bytes,
        sampled: bytes,
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
        tool_choice: str | None,
    ) -> bytes | None:
        ids = self.answer_before(tail, sampled, new)
        if ids is None:
            return None
        context = self.context(tail)
        ended = bool(ids) and ids[-1] in self.stops
        if not ended:
            found = self.found(context, ids, tools)
            unclosed = any(str(call.status) == "unclosed_block" for call in found.tool_calls)
            if unclosed or getattr(found, "reasoning_complete", True) is False:
                return None  # how the template would go on from the middle of those, nobody knows
        try:
            text = self._following(new, tools, tool_choice)
        except Unrenderable:
            return None
        if text is None:
            return None
        more = self.tokenizer.encode(text)
        if not more or more[0] not in self.stops:
            return None
        if not ended:
            return array("i", more).tobytes()
        return array("i", more[1:]).tobytes() if more[0] == ids[-1] else None

    def _following(
        self, new: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None
    ) -> str | None:
        """What the template writes from the end of an answer on; None where that depends on what was before."""
        words = plain(new, named=True)
        offered = schemas(tools, tool_choice)
        asked = [
            word.get("tool_call_id") or f"call{at:05}" for at, word in enumerate(words) if word["role"] == "tool"
        ]
        first, second = (self._after_one(words, offered, asked, variant) for variant in (0, 1))
        return first if first == second else None

    def _after_one(
        self, words: list[dict[str, Any]], offered: list[dict[str, Any]] | None, asked: list[str], variant: int
    ) -> str | None:
        answer: dict[str, Any] = {"role": "assistant", "content": _HERE}
        before: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        if variant:
            answer["reasoning_content"] = "b"
            before = [
                {"role": "system", "content": "c"},
                {"role": "user", "content": "d"},
                {"role": "assistant", "content": "e"},
                {"role": "user", "content": "f"},
            ]
        if asked:
            name = offered[variant % len(offered)]["function"]["name"] if offered else "g"
            answer["tool_calls"] = [
                {"type": "function", "id": one, "function": {"name": name, "arguments": {"h": variant}}}
                for one in asked
            ]
        text = self.tokenizer.template([*before, answer, *words], offered, **self._options)
        _, found, rest = text.rpartition(_HERE)
        ends = [at for end in self._ends if end and (at := rest.find(end)) >= 0]
        return rest[min(ends) :] if found and ends else None
