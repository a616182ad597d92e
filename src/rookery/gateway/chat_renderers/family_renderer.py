"""Chat renderers for model families, from the `renderers` package, with Rookery's own `Tokenizer`.

Guarantees, in addition to those of every renderer:
- every family that the installed `renderers` package knows can be used;
- a prompt is rendered like the family's chat template, except that sampled reasoning stays in the context of later
  turns, so that every reply can be extended. The option `thinking_retention` changes that;
- if a reply was sampled without its stop token, the tokens that close it are part of the next prompt, not of the
  sampled tokens;
- exceptions in the package's code for parsing and extending a reply are caught: a reply that it cannot parse
  becomes text, and the failure is counted.
"""

import logging
import threading
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from rookery.core import Message, ToolSchema, UsageError
from rookery.core.errors import describe
from rookery.gateway.chat_renderers.conversion import CallIds, build_message, convert_messages, convert_tools
from rookery.gateway.chat_renderers.protocol import RenderError
from rookery.gateway.chat_renderers.reply_parser import FamilyReplyParser
from rookery.gateway.chat_renderers.reply_skeleton import (
    LATER_PROBE,
    PROBE,
    ReplySkeleton,
    StreamPlan,
    make_stream_plan,
)
from rookery.gateway.chat_renderers.tokenizer import Tokenizer, open_tokenizer
from rookery.gateway.chat_renderers.tool_prompt import ignores_tools, insert_tool_prompt

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers import RendererConfig

log = logging.getLogger("rookery.gateway")

MAX_CACHED_PLANS: Final = 4096
"""Maximum number of cached stream plans (see `StreamPlan`). Models use a few dozen."""
INSTALL_HINT: Final = "pip install 'rookery-rl[renderers]'"
_COMMON_MARKERS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_POSSIBLE_TEXT_MARKERS: Final = (*_COMMON_MARKERS, "<｜DSML｜tool_calls>", "<｜DSML｜invoke", "</｜DSML｜invoke>")  # noqa: RUF001
_WITH_TOOL_NAMES: Final = frozenset({"gpt-oss", "inkling", "gemma4"})
"""Families whose chat format includes the name of the tool in tool results."""
_WITH_DEVELOPER_ROLE: Final = frozenset({"gpt-oss", "deepseek-v4"})
_VOCABULARY_FILES: Final = {"gpt-oss": ("TIKTOKEN_ENCODINGS_BASE", "o200k_base.tiktoken")}
"""Families whose code downloads a vocabulary file, unless an environment variable names its directory: the
variable and the name of the file."""


class PlainReply(NamedTuple):
    """Result for a reply that the family's parser cannot parse: all of it is text."""

    content: str
    reasoning_content: str | None = None
    tool_calls: Sequence[Any] = ()


def import_renderers() -> Any:
    """Import the `renderers` package and return it. Raises `UsageError` if it is not installed."""
    try:
        import renderers
        import renderers.base
        import renderers.configs
    except ImportError as error:
        raise UsageError(
            f"chat formats of model families need an optional dependency: {INSTALL_HINT} ({describe(error)})"
        ) from error
    return renderers


def list_families() -> tuple[str, ...]:
    """Return the names of the model families that the installed `renderers` package knows."""
    base = import_renderers().base
    base._populate_registry()
    return tuple(sorted(name for name in base.RENDERER_REGISTRY if name != "default"))


def find_family(tokenizer: Tokenizer) -> str:
    """Return the family of the model that a tokenizer belongs to, judged by the model's name.

    Returns an empty string if the `renderers` package does not know the model.
    """
    known = import_renderers().base.MODEL_RENDERER_MAP
    path = tokenizer.folder
    names = [tokenizer.name_or_path, f"{path.parent.name}/{path.name}"]
    # Directory layout of the hub's own cache: models--org--name/snapshots/revision.
    names += [part[8:].replace("--", "/", 1) for part in path.parts if part.startswith("models--")]
    return next((known[name] for name in names if name in known), "")


def open_family(config: "RendererConfig") -> "FamilyRenderer":
    """Open the renderer of the model family `config.name`. This is the entry point of every family."""
    renderer = FamilyRenderer(
        config.name, open_tokenizer(config.tokenizer, config.template), _build_renderer(config)
    )
    renderer.configure_tools(config.tool_prompt, allowed=config.allow_no_tools)
    return renderer


open_family.families = list_families  # type: ignore[attr-defined]


def _build_renderer(config: "RendererConfig") -> Any:
    if config.tool_parser or config.reasoning_parser:
        raise UsageError(
            f"the family {config.name!r} has its own parsers: tool_parser and reasoning_parser are for `default`"
        )
    renderers = import_renderers()
    tokenizer = open_tokenizer(config.tokenizer, config.template)
    config_class = renderers.configs._config_class_for(config.name)
    options = dict(config.options)
    if config.name in _VOCABULARY_FILES:
        _set_vocabulary_path(config.name, tokenizer)
    try:
        renderer_config = config_class(**options)
        if "thinking_retention" not in options:
            renderer_config = _retain_reasoning(config_class, options) or renderer_config
    except (ValueError, TypeError) as error:
        known = ", ".join(sorted(set(config_class.model_fields) - {"name"}))
        raise UsageError(
            f"invalid options for the family {config.name!r} (known: {known}): {describe(error)}"
        ) from error
    try:
        return renderers.create_renderer(tokenizer, renderer_config)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the tokenizer in {tokenizer.folder} does not match the family {config.name!r}: {describe(error)}"
        ) from error


def _retain_reasoning(config_class: Any, options: dict[str, Any]) -> Any:
    """Return the family's config with reasoning of earlier turns kept in the prompt.

    Returns None if the options forbid that.
    """
    try:
        return config_class(**options, thinking_retention="all")
    except (ValueError, TypeError):
        return None


def _set_vocabulary_path(name: str, tokenizer: Tokenizer) -> None:
    """Set the environment variable with the directory of a family's vocabulary file, so that it is not downloaded.

    Raises `UsageError` if the file is not in the tokenizer's directory.
    """
    import os

    variable, file = _VOCABULARY_FILES[name]
    if not os.environ.get(variable):
        if not (tokenizer.folder / file).is_file():
            raise UsageError(
                f"the family {name!r} needs the file {file}: put it into {tokenizer.folder}, "
                f"or set {variable} to its directory"
            )
        os.environ[variable] = str(tokenizer.folder)


class FamilyRenderer:
    """Chat renderer for a model family. `renderer` is the family's object of the `renderers` package."""

    def __init__(self, name: str, tokenizer: Tokenizer, renderer: Any) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(renderer.get_stop_token_ids()))
        self.stop_ids = frozenset(self.stop_token_ids)
        self.added_ids = frozenset(tokenizer.added_tokens)
        self._is_marker_id = np.zeros(max(self.added_ids, default=0) + 2, dtype=bool)
        """One flag per token ID: True if it is a marker (an added token). The last entry stands for all larger
        IDs."""
        self._is_marker_id[list(self.added_ids)] = True
        self.disagreements = 0
        """Number of replies whose streamed deltas contradicted the result of parsing the complete reply."""
        self.failures = 0
        """Number of times that the family's code raised an exception while parsing or extending a reply."""
        self._count_lock = threading.Lock()
        self.with_tool_names = name in _WITH_TOOL_NAMES
        self.developer_role = "developer" if name in _WITH_DEVELOPER_ROLE else "system"
        self._generation_prompt = self._find_generation_prompt()
        self._probe_ids, self._later_probe_ids = tokenizer.encode(PROBE), tokenizer.encode(LATER_PROBE)
        self.marker_ids = self._find_marker_ids()
        self.text_markers: tuple[str, ...] = ()
        self.text_markers = tuple(marker for marker in _POSSIBLE_TEXT_MARKERS if self._is_text_marker(marker))
        self.has_bare_json_calls = bool(
            self.parse_ids((), tokenizer.encode('{"name": "a", "parameters": {}}'), ()).tool_calls
        )
        self.marker_ids = tuple(marker for marker in self.marker_ids if not self._is_revoking(marker))
        self._plan_cache: dict[tuple[tuple[int, ...], tuple[int, ...]], StreamPlan] = {}
        self.tool_prompt: str | None = None
        self.drops_tools = False
        """True if the model does not see tools: the chat template ignores them, and no tool prompt describes
        them."""
        self.rejects_tools = False
        """True if calls with tools have to be rejected, because `drops_tools` is set and the config does not allow
        that."""

    def configure_tools(self, prompt: str | None, *, allowed: bool) -> None:
        """Set how the tools of a model request are described to the model.

        If `prompt` is given, it describes them in the system message; otherwise the chat template does. If
        `prompt` is None and the template ignores tools, the model does not see them: requests that define tools
        are then rejected, unless `allowed` is True.
        """
        self.tool_prompt = prompt
        self.drops_tools = prompt is None and ignores_tools(self.render)
        self.rejects_tools = self.drops_tools and not allowed

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None) -> bytes:
        converted = convert_messages(messages, developer=self.developer_role, with_tool_names=self.with_tool_names)
        tool_schemas = convert_tools(tools, tool_choice)
        if tool_schemas and self.tool_prompt is not None:
            converted, tool_schemas = insert_tool_prompt(converted, tool_schemas, self.tool_prompt), None
        try:
            ids = self.renderer.render_ids(converted, tools=tool_schemas, add_generation_prompt=True)
        except RenderError:
            raise
        except Exception as error:
            raise RenderError(
                f"the chat format {self.name!r} cannot render these messages: {describe(error)}"
            ) from error
        return array("i", ids).tobytes()

    def get_extensible_reply(
        self, prompt_tail: bytes, sampled: bytes, new_messages: Sequence[Message]
    ) -> list[int] | None:
        """Return the token IDs of a reply if `new_messages` can follow it.

        Returns None if new messages are missing or include an assistant message, or if a stop token is not at the
        end of the reply.
        """
        if not prompt_tail or not new_messages or any(message.role == "assistant" for message in new_messages):
            return None
        ids: list[int] = memoryview(sampled).cast("i").tolist()
        if not self.stop_ids.isdisjoint(ids[:-1]):
            return None  # the model sampled past the end of its message: formats cannot express that
        return ids

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
        context = list(self.get_context(prompt_tail))
        answer = self._make_skeleton(ids)
        try:
            converted = convert_messages(
                new_messages, developer=self.developer_role, with_tool_names=self.with_tool_names
            )
            bridge = self.renderer.bridge_to_next_turn(
                context, answer, converted, tools=convert_tools(tools, tool_choice)
            )
        except RenderError:
            return None
        except Exception as error:  # noqa: BLE001  (third-party code on arbitrary sampled tokens)
            self._count_failure("extend", error)
            return None
        if bridge is None:
            return None
        extended = bridge.token_ids
        length = len(context) + len(answer)
        if extended[:length] != context + answer:  # the sampled tokens would change
            return None
        return array("i", extended[length:]).tobytes()

    def get_context(self, prompt_tail: bytes) -> tuple[int, ...]:
        """Return the last token IDs of the prompt, which the parser of the reply gets together with the reply.

        `prompt_tail` is the end of the prompt. If it ends with the generation prompt (the tokens with which the
        chat template starts a reply), only those are returned, otherwise all of `prompt_tail`.
        """
        generation_prompt = self._generation_prompt
        if generation_prompt and prompt_tail.endswith(generation_prompt):
            return tuple(memoryview(generation_prompt).cast("i").tolist())
        return tuple(memoryview(prompt_tail).cast("i").tolist())

    def _make_skeleton(self, ids: list[int]) -> list[int]:
        """Return the skeleton of a reply: its special tokens, with placeholders for text (see `ReplySkeleton`).

        A short reply, and every reply of a family whose markers are plain text, is returned unchanged.
        """
        if self.text_markers or len(ids) < 64:
            return ids
        skeleton = ReplySkeleton()
        start = 0
        decode, encode = self.tokenizer.decode_bytes, self.tokenizer.encode
        id_array = np.asarray(ids, dtype=np.int64)
        positions = np.flatnonzero(self._is_marker_id[np.clip(id_array, -1, len(self._is_marker_id) - 1)])
        for at in (*positions.tolist(), len(ids)):
            tokens = ids[start:at]
            text = decode(tokens[:64]).decode("utf-8", "replace")
            if not text.strip():
                text = decode(tokens).decode("utf-8", "replace")
            skeleton.add_text(tokens, text, start, encode)
            if at < len(ids):
                skeleton.add_marker(ids[at], self.tokenizer.added_tokens[ids[at]], at)
            start = at + 1
        return skeleton.ids

    def parse(
        self, prompt_tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], *, prompt_length: int = 0
    ) -> Message:
        ids = memoryview(sampled).cast("i").tolist()
        return self.parse_message(self.get_context(prompt_tail), ids, tools, CallIds(prompt_tail, prompt_length))

    def parse_message(
        self, context: Sequence[int], ids: Sequence[int], tools: Sequence[ToolSchema], calls: CallIds
    ) -> Message:
        result = self.parse_ids(context, ids, tools)
        return build_message(result, ids, calls, self.tokenizer.decode)

    def parse_ids(self, context: Sequence[int], ids: Sequence[int], tools: Sequence[ToolSchema]) -> Any:
        """Parse a reply with the family's parser. If that raises, return the whole reply as text."""
        try:
            return self.renderer.parse_response(
                list(ids), tools=convert_tools(tools), prompt_ids=list(context) or None
            )
        except Exception as error:  # noqa: BLE001  (third-party code on arbitrary sampled tokens)
            self._count_failure("parse", error)
            end = next((at for at, token in enumerate(ids) if token in self.stop_ids), len(ids))
            return PlainReply(self.tokenizer.decode(ids[:end]))

    def new_reply_parser(
        self, prompt_tail: bytes, tools: Sequence[ToolSchema], *, prompt_length: int = 0
    ) -> FamilyReplyParser:
        return FamilyReplyParser(self, prompt_tail, tools, prompt_length)

    def encode(self, text: str) -> bytes:
        return array("i", self.tokenizer.encode(text)).tobytes()

    def token_bytes(self, ids: bytes) -> list[bytes]:
        pieces = self.tokenizer.token_bytes
        return [pieces[at] if 0 <= at < len(pieces) else b"" for at in memoryview(ids).cast("i").tolist()]

    def get_plan(
        self, context: tuple[int, ...], skeleton: tuple[int, ...], budget: int
    ) -> tuple[StreamPlan | None, int]:
        """Return how text after a skeleton will be parsed, and the number of tokens parsed to find out.

        For a cached plan that number is 0. The plan is None if it would cost more than `budget` tokens.
        """
        key = (context, skeleton)
        result = self._plan_cache.get(key)
        if result is not None:
            return result, 0
        cost = (len(skeleton) + 8) * (2 * len(self.marker_ids) + 1)
        if cost > budget:
            return None, 0

        def parse(ids: Sequence[int]) -> Any:
            return self.parse_ids(context, ids, ())

        result = make_stream_plan(parse, skeleton, self.marker_ids, self._probe_ids, self._later_probe_ids)
        if len(self._plan_cache) >= MAX_CACHED_PLANS:
            self._plan_cache.clear()
        self._plan_cache[key] = result
        return result, cost

    def count_disagreement(self) -> None:
        with self._count_lock:
            self.disagreements += 1

    def _count_failure(self, what: str, error: Exception) -> None:
        with self._count_lock:
            self.failures += 1
            first = self.failures == 1
        if first:
            log.warning(
                "the chat format %r failed to %s a reply; further failures are only counted: %s",
                self.name,
                what,
                describe(error),
            )

    def _find_generation_prompt(self) -> bytes:
        """Return the generation prompt, the token IDs with which the format starts a reply.

        Returns empty bytes if the format does not simply append them to the conversation.
        """
        converted = [{"role": "user", "content": "a"}]
        try:
            bare = self.renderer.render_ids(converted, add_generation_prompt=False)
            prompt = self.renderer.render_ids(converted, add_generation_prompt=True)
        except Exception as error:
            raise UsageError(
                f"the chat format {self.name!r} cannot render a message: {describe(error)}"
            ) from error
        generation_prompt = prompt[len(bare) :] if prompt[: len(bare)] == bare else []
        return array("i", generation_prompt).tobytes()

    def _find_marker_ids(self) -> tuple[int, ...]:
        """Return the IDs of the markers (added tokens) that the family's code refers to, and of common markers."""
        values = [*vars(self.renderer).values()]
        for part in (
            getattr(self.renderer, "_tool_parser", None),
            getattr(self.renderer, "_reasoning_parser", None),
        ):
            values += vars(part).values() if part is not None else ()
        markers = {value for value in values if isinstance(value, int) and value in self.added_ids}
        markers |= {at for at, text in self.tokenizer.added_tokens.items() if text in _COMMON_MARKERS}
        return tuple(sorted((markers | self.stop_ids) & self.added_ids))

    def _is_revoking(self, marker: int) -> bool:
        """Return whether a marker changes how the text before it is parsed.

        Such markers are left out of stream plans: with them, no text could be streamed.
        """
        context = tuple(memoryview(self._generation_prompt).cast("i").tolist())

        def parse(ids: Sequence[int]) -> Any:
            return self.parse_ids(context, ids, ())

        return not make_stream_plan(parse, (), (marker,), self._probe_ids, self._later_probe_ids).certain

    def _is_text_marker(self, marker: str) -> bool:
        """Return whether the family recognises a marker that is written as plain text instead of a special token.

        Then a part of the text has to be held back while it may be the start of a marker.
        """
        if marker in self.tokenizer.added_tokens.values():
            return False
        context = tuple(memoryview(self._generation_prompt).cast("i").tolist())
        for before in ("", "a", "<think>a"):
            result = self.parse_ids(context, self.tokenizer.encode(f"{before}{marker}b"), ())
            if f"{marker}b" not in f"{result.content} {result.reasoning_content}":
                return True
        return False
