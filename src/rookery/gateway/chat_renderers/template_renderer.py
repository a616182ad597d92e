"""Chat renderer that uses the tokenizer's own chat template (`default`), and the choice between this renderer and
that of a model family (`auto`).

Guarantees, in addition to those of every renderer:
- a prompt is the text that the template renders, tokenised as a whole;
- a reply is extended by the text that the template writes after a reply. That text is found by rendering two short
  conversations that differ in everything but the new messages. It is used only if it is the same in both;
- tool calls and reasoning are parsed by the configured parsers; without a parser, they are part of the text. With
  a tool prompt, the parser of tool calls is `hermes` unless another one is configured.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rookery.core import Message, ToolSchema, UsageError
from rookery.core.errors import describe
from rookery.gateway.chat_renderers.conversion import convert_messages, convert_tools
from rookery.gateway.chat_renderers.family_renderer import (
    FamilyRenderer,
    find_family,
    import_renderers,
    open_family,
)
from rookery.gateway.chat_renderers.protocol import RenderError
from rookery.gateway.chat_renderers.tokenizer import Tokenizer, open_tokenizer
from rookery.gateway.chat_renderers.tool_parsers import HERMES, check_tool_parser

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers import RendererConfig
    from rookery.gateway.chat_renderers.protocol import ChatRenderer

_END_OF_REPLY: Final = "rookery7answer7ends7here"
"""Stands for a reply in rendered text, to find its end. No template writes this text itself."""


def open_auto(config: "RendererConfig") -> "ChatRenderer":
    """Open the renderer of the model family that the tokenizer belongs to. This is the entry point `auto`.

    If the family is not known, or a template or tool parser is configured, the chat template is used (`default`).
    """
    import msgspec

    tokenizer = open_tokenizer(config.tokenizer, config.template)
    family = "" if config.template is not None or config.tool_parser else find_family(tokenizer)
    if family:
        return open_family(msgspec.structs.replace(config, name=family, reasoning_parser=None))
    if not tokenizer.chat_template:
        raise UsageError(
            f"the model family of the tokenizer in {tokenizer.folder} is unknown, and it has no chat template: "
            "configure the family or a template"
        )
    return open_default(msgspec.structs.replace(config, name="default"))


def open_default(config: "RendererConfig") -> "TemplateRenderer":
    """Open the renderer that uses the tokenizer's chat template. This is the entry point `default`."""
    renderers = import_renderers()
    tokenizer = open_tokenizer(config.tokenizer, config.template)
    _ = tokenizer.template  # raises now if it is missing or invalid
    from renderers import parsers

    name, known = config.reasoning_parser, parsers.REASONING_PARSERS
    if name is not None and name not in known:
        raise UsageError(f"there is no reasoning_parser {name!r}; the known ones are {', '.join(sorted(known))}")
    # Every tool prompt shows earlier calls in this format, so it is also the format of new ones.
    tool_parser = config.tool_parser or (HERMES if config.tool_prompt is not None else None)
    check_tool_parser(tool_parser, tokenizer)
    try:
        renderer_config = renderers.configs.DefaultRendererConfig(
            **config.options, tool_parser=tool_parser, reasoning_parser=name
        )
        renderer = renderers.create_renderer(tokenizer, renderer_config)
    except (ValueError, TypeError) as error:
        raise UsageError(f"invalid options for the chat format `default`: {describe(error)}") from error
    template_renderer = TemplateRenderer(tokenizer, renderer, config.options)
    template_renderer.configure_tools(config.tool_prompt, allowed=config.allow_no_tools)
    return template_renderer


class TemplateRenderer(FamilyRenderer):
    """Chat renderer that uses the tokenizer's Jinja chat template."""

    def __init__(self, tokenizer: Tokenizer, renderer: Any, options: dict[str, Any]) -> None:
        self._options = dict(options)
        super().__init__("default", tokenizer, renderer)
        self._stop_texts = [tokenizer.decode([stop_token_ids]) for stop_token_ids in self.stop_token_ids]

    def extend(
        self,
        prompt_tail: bytes,
        sampled: bytes,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        tool_choice: str | None,
    ) -> bytes | None:
        ids = self.get_extensible_reply(prompt_tail, sampled, new_messages)
        if ids is None:
            return None
        context = self.get_context(prompt_tail)
        is_complete = bool(ids) and ids[-1] in self.stop_ids
        if not is_complete:
            parsed = self.parse_ids(context, ids, tools)
            unclosed = any(str(call.status) == "unclosed_block" for call in parsed.tool_calls)
            if unclosed or getattr(parsed, "reasoning_complete", True) is False:
                return None  # the template has no text for an unfinished tool call or unfinished reasoning
        try:
            text = self._render_following(new_messages, tools, tool_choice)
        except RenderError:
            return None
        if text is None:
            return None
        extension = self.tokenizer.encode(text)
        if not extension or extension[0] not in self.stop_ids:
            return None
        if not is_complete:
            return array("i", extension).tobytes()
        return array("i", extension[1:]).tobytes() if extension[0] == ids[-1] else None

    def _render_following(
        self, new_messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None
    ) -> str | None:
        """Return the text that the template writes after a reply: its stop token, the new messages, and so on.

        Returns None if that text depends on the conversation before it.
        """
        converted = convert_messages(new_messages, with_tool_names=True)
        tool_schemas = convert_tools(tools, tool_choice)
        call_ids = [
            word.get("tool_call_id") or f"call{at:05}"
            for at, word in enumerate(converted)
            if word["role"] == "tool"
        ]
        if tool_schemas and self.tool_prompt is not None:  # calls are text, as in `render`
            call_ids, tool_schemas = [], None
        one, other = (self._render_variant(converted, tool_schemas, call_ids, variant) for variant in (0, 1))
        return one if one == other else None

    def _render_variant(
        self,
        converted: list[dict[str, Any]],
        tool_schemas: list[dict[str, Any]] | None,
        call_ids: list[str],
        variant: int,
    ) -> str | None:
        answer: dict[str, Any] = {"role": "assistant", "content": _END_OF_REPLY}
        before: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        if variant:
            answer["reasoning_content"] = "b"
            before = [
                {"role": "system", "content": "c"},
                {"role": "user", "content": "d"},
                {"role": "assistant", "content": "e"},
                {"role": "user", "content": "f"},
            ]
        if call_ids:
            name = tool_schemas[variant % len(tool_schemas)]["function"]["name"] if tool_schemas else "g"
            answer["tool_calls"] = [
                {"type": "function", "id": one, "function": {"name": name, "arguments": {"h": variant}}}
                for one in call_ids
            ]
        text = self.tokenizer.template([*before, answer, *converted], tool_schemas, **self._options)
        _, parsed, rest = text.rpartition(_END_OF_REPLY)
        ends = [at for end in self._stop_texts if end and (at := rest.find(end)) >= 0]
        return rest[min(ends) :] if parsed and ends else None
