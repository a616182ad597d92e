"""Chat formats of the `renderers` package, over a tokenizer of one's own.

Promises, beyond those of every rendering:
- any family that the installed package knows can be named: none is listed here;
- a prompt is rendered as the family's chat template does it; reasoning that was sampled stays in the context of
  later turns unless the option `thinking_retention` says otherwise: only then can every answer be extended;
- an answer without its end is closed by ids that belong to the next prompt, never to what was sampled;
- what a family's code makes of an answer never raises: what it cannot read is text, and is counted.
"""

import logging
import threading
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from rookery.core import Message, ToolSchema, UsageError
from rookery.core.errors import describe
from rookery.gateway.renderings.outline import LATER, PROBE, Outline, Plan, plan
from rookery.gateway.renderings.protocol import Unrenderable
from rookery.gateway.renderings.reader import FamilyReader
from rookery.gateway.renderings.tokenizer import Tokenizer, open_tokenizer
from rookery.gateway.renderings.tool_prompts import drops_tools, with_tool_prompt
from rookery.gateway.renderings.words import CallIds, message_of, plain, schemas

if TYPE_CHECKING:
    from rookery.gateway.renderings import RenderingConfig

log = logging.getLogger("rookery.gateway")

PLANS: Final = 4096
"""Outlines that are remembered: those that models really give are a few dozen."""
EXTRA: Final = "pip install 'rookery-rl[renderers]'"
_WELL_KNOWN: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_AS_TEXT: Final = (*_WELL_KNOWN, "<｜DSML｜tool_calls>", "<｜DSML｜invoke", "</｜DSML｜invoke>")  # noqa: RUF001
_NAMED: Final = frozenset({"gpt-oss", "inkling", "gemma4"})
"""Families whose tools' answers say which tool answered."""
_DEVELOPERS: Final = frozenset({"gpt-oss", "deepseek-v4"})
_ELSEWHERE: Final = {"gpt-oss": ("TIKTOKEN_ENCODINGS_BASE", "o200k_base.tiktoken")}
"""Families that would fetch their vocabulary themselves: the variable that says where it lies, and its file."""


class Found(NamedTuple):
    """A parser's findings, where the family's own has failed."""

    content: str
    reasoning_content: str | None = None
    tool_calls: Sequence[Any] = ()


# -------------------------------------------------------------------------------------------------- opening


def package() -> Any:
    """The `renderers` package, in one piece."""
    try:
        import renderers
        import renderers.base
        import renderers.configs
    except ImportError as error:
        raise UsageError(f"chat formats of model families need: {EXTRA} ({describe(error)})") from error
    return renderers


def families() -> tuple[str, ...]:
    """The families that the package knows."""
    base = package().base
    base._populate_registry()
    return tuple(sorted(name for name in base.RENDERER_REGISTRY if name != "default"))


def family_of(tokenizer: Tokenizer) -> str:
    """The family of the model that a tokenizer is of; empty where the package does not know it."""
    known = package().base.MODEL_RENDERER_MAP
    path = tokenizer.folder
    names = [tokenizer.name_or_path, f"{path.parent.name}/{path.name}"]
    # A hub's own cache: models--org--name/snapshots/revision.
    names += [part[8:].replace("--", "/", 1) for part in path.parts if part.startswith("models--")]
    return next((known[name] for name in names if name in known), "")


def open_family(config: "RenderingConfig") -> "Family":
    """The entry point of every family."""
    made = Family(config.name, open_tokenizer(config.tokenizer, config.template), _built(config))
    made.settle_tools(config.tool_prompt, allowed=config.allow_no_tools)
    return made


open_family.families = families  # type: ignore[attr-defined]


def _built(config: "RenderingConfig") -> Any:
    if config.tool_parser or config.reasoning_parser:
        raise UsageError(
            f"the family {config.name!r} has its own parsers: tool_parser and reasoning_parser are for `default`"
        )
    renderers = package()
    tokenizer = open_tokenizer(config.tokenizer, config.template)
    kind = renderers.configs._config_class_for(config.name)
    options = dict(config.options)
    if config.name in _ELSEWHERE:
        _at_home(config.name, tokenizer)
    try:
        chosen = kind(**options)
        if "thinking_retention" not in options:
            chosen = _keeping(kind, options) or chosen
    except (ValueError, TypeError) as error:
        known = ", ".join(sorted(set(kind.model_fields) - {"name"}))
        raise UsageError(
            f"{config.name!r} cannot have these options (it knows {known}): {describe(error)}"
        ) from error
    try:
        return renderers.create_renderer(tokenizer, chosen)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the tokenizer in {tokenizer.folder} does not fit the family {config.name!r}: {describe(error)}"
        ) from error


def _keeping(kind: Any, options: dict[str, Any]) -> Any:
    """The same with reasoning kept across the user's messages; None where an option says otherwise."""
    try:
        return kind(**options, thinking_retention="all")
    except (ValueError, TypeError):
        return None


def _at_home(name: str, tokenizer: Tokenizer) -> None:
    """A family that would fetch its vocabulary itself is told where it lies, or refused: no call leaves here."""
    import os

    variable, file = _ELSEWHERE[name]
    if not os.environ.get(variable):
        if not (tokenizer.folder / file).is_file():
            raise UsageError(
                f"the family {name!r} needs the file {file}: put it into {tokenizer.folder}, "
                f"or set {variable} to the folder that holds it"
            )
        os.environ[variable] = str(tokenizer.folder)


# ------------------------------------------------------------------------------------------------ rendering


class Family:
    """A chat format of the package."""

    def __init__(self, name: str, tokenizer: Tokenizer, renderer: Any) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.stop: tuple[int, ...] = tuple(dict.fromkeys(renderer.get_stop_token_ids()))
        self.stops = frozenset(self.stop)
        self.added = frozenset(tokenizer.added)
        self._is_mark = np.zeros(max(self.added, default=0) + 2, dtype=bool)
        """By id; the last place stands for all ids above."""
        self._is_mark[list(self.added)] = True
        self.disagreements = 0
        """Answers of which something was told that the whole turned out not to mean."""
        self.failures = 0
        """Answers that the family's own code failed at."""
        self._counting = threading.Lock()
        self._named = name in _NAMED
        self._developer = "developer" if name in _DEVELOPERS else "system"
        self._prompt = self._generation()
        self._probe, self._later = tokenizer.encode(PROBE), tokenizer.encode(LATER)
        self._marks = self._known_marks()
        self.text_marks: tuple[str, ...] = ()
        self.text_marks = tuple(mark for mark in _AS_TEXT if self._reacts(mark))
        self.bare_calls = bool(self.found((), tokenizer.encode('{"name": "a", "parameters": {}}'), ()).tool_calls)
        self._marks = tuple(mark for mark in self._marks if not self._revokes(mark))
        self._plans: dict[tuple[tuple[int, ...], tuple[int, ...]], Plan] = {}
        self.tool_prompt: str | None = None
        self.drops_tools = False
        """Whether the template ignores tools and no prompt describes them."""
        self.refuses_tools = False
        """Whether calls that offer tools are refused for that reason."""

    def settle_tools(self, prompt: str | None, *, allowed: bool) -> None:
        """Decide what becomes of tools: `prompt` describes them; `allowed` drops them where the template does."""
        self.tool_prompt = prompt
        self.drops_tools = prompt is None and drops_tools(self.render)
        self.refuses_tools = self.drops_tools and not allowed

    # ------------------------------------------------------------------------------------- messages to ids

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None) -> bytes:
        words = plain(messages, developer=self._developer, named=self._named)
        offered = schemas(tools, tool_choice)
        if offered and self.tool_prompt is not None:
            words, offered = with_tool_prompt(words, offered, self.tool_prompt), None
        try:
            ids = self.renderer.render_ids(words, tools=offered, add_generation_prompt=True)
        except Unrenderable:
            raise
        except Exception as error:
            raise Unrenderable(
                f"the format {self.name!r} cannot render these messages: {describe(error)}"
            ) from error
        return array("i", ids).tobytes()

    def answer_before(self, tail: bytes, sampled: bytes, new: Sequence[Message]) -> list[int] | None:
        """The ids of an answer that `new` messages can follow; None where they cannot."""
        if not tail or not new or any(message.role == "assistant" for message in new):
            return None
        ids: list[int] = memoryview(sampled).cast("i").tolist()
        if not self.stops.isdisjoint(ids[:-1]):
            return None  # it went on after its end: a format has no words for that
        return ids

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
        context = list(self.context(tail))
        answer = self._outlined(ids)
        try:
            words = plain(new, developer=self._developer, named=self._named)
            bridged = self.renderer.bridge_to_next_turn(context, answer, words, tools=schemas(tools, tool_choice))
        except Unrenderable:
            return None
        except Exception as error:  # noqa: BLE001  (a family's code, on what a model sampled: anything)
            self._failed("extend", error)
            return None
        if bridged is None:
            return None
        longer = bridged.token_ids
        kept = len(context) + len(answer)
        if longer[:kept] != context + answer:  # what was sampled stays, or nothing is sure
            return None
        return array("i", longer[kept:]).tobytes()

    def context(self, tail: bytes) -> tuple[int, ...]:
        """What of a prompt says how its answer begins: all that was rendered for it, or the whole tail."""
        own = self._prompt
        if own and tail.endswith(own):
            return tuple(memoryview(own).cast("i").tolist())
        return tuple(memoryview(tail).cast("i").tolist())

    def _outlined(self, ids: list[int]) -> list[int]:
        """An answer for those who look at its marks only: an outline where text cannot be one, else all of it."""
        if self.text_marks or len(ids) < 64:
            return ids
        outline = Outline()
        start = 0
        spell, encode = self.tokenizer.spell, self.tokenizer.encode
        numbers = np.asarray(ids, dtype=np.int64)
        places = np.flatnonzero(self._is_mark[np.clip(numbers, -1, len(self._is_mark) - 1)])
        for at in (*places.tolist(), len(ids)):
            run = ids[start:at]
            text = spell(run[:64]).decode("utf-8", "replace")
            if not text.strip():
                text = spell(run).decode("utf-8", "replace")
            outline.text(run, text, start, encode)
            if at < len(ids):
                outline.mark(ids[at], self.tokenizer.added[ids[at]], at)
            start = at + 1
        return outline.ids

    # ------------------------------------------------------------------------------------- ids to messages

    def parse(self, tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], *, at: int = 0) -> Message:
        ids = memoryview(sampled).cast("i").tolist()
        return self.parsed(self.context(tail), ids, tools, CallIds(tail, at))

    def parsed(
        self, context: Sequence[int], ids: Sequence[int], tools: Sequence[ToolSchema], calls: CallIds
    ) -> Message:
        found = self.found(context, ids, tools)
        return message_of(found, ids, calls, self.tokenizer.decode)

    def found(self, context: Sequence[int], ids: Sequence[int], tools: Sequence[ToolSchema]) -> Any:
        """What the family's parser finds."""
        try:
            return self.renderer.parse_response(list(ids), tools=schemas(tools), prompt_ids=list(context) or None)
        except Exception as error:  # noqa: BLE001  (a family's code, on what a model sampled: anything)
            self._failed("parse", error)
            end = next((at for at, token in enumerate(ids) if token in self.stops), len(ids))
            return Found(self.tokenizer.decode(ids[:end]))

    def reader(self, tail: bytes, tools: Sequence[ToolSchema], *, at: int = 0) -> FamilyReader:
        return FamilyReader(self, tail, tools, at)

    def encode(self, text: str) -> bytes:
        return array("i", self.tokenizer.encode(text)).tobytes()

    def spelled(self, ids: bytes) -> list[bytes]:
        pieces = self.tokenizer.pieces
        return [pieces[at] if 0 <= at < len(pieces) else b"" for at in memoryview(ids).cast("i").tolist()]

    # -------------------------------------------------------------------------------------------- for readers

    def plan(self, context: tuple[int, ...], outline: tuple[int, ...], allowance: int) -> tuple[Plan | None, int]:
        """What comes next after an outline, and how many ids a parser was asked about for it: none where it is
        remembered; no plan where that would be more than the allowance."""
        key = (context, outline)
        found = self._plans.get(key)
        if found is not None:
            return found, 0
        cost = (len(outline) + 8) * (2 * len(self._marks) + 1)
        if cost > allowance:
            return None, 0

        def parse(ids: Sequence[int]) -> Any:
            return self.found(context, ids, ())

        found = plan(parse, outline, self._marks, self._probe, self._later)
        if len(self._plans) >= PLANS:
            self._plans.clear()
        self._plans[key] = found
        return found, cost

    def disagreed(self) -> None:
        with self._counting:
            self.disagreements += 1

    def _failed(self, what: str, error: Exception) -> None:
        with self._counting:
            self.failures += 1
            first = self.failures == 1
        if first:
            log.warning(
                "the format %r failed to %s an answer, which is text then: %s", self.name, what, describe(error)
            )

    # --------------------------------------------------------------------------------------- found by asking

    def _generation(self) -> bytes:
        """The ids that every prompt ends with, where it does."""
        words = [{"role": "user", "content": "a"}]
        try:
            without = self.renderer.render_ids(words, add_generation_prompt=False)
            prompt = self.renderer.render_ids(words, add_generation_prompt=True)
        except Exception as error:
            raise UsageError(f"the format {self.name!r} cannot render a message: {describe(error)}") from error
        own = prompt[len(without) :] if prompt[: len(without)] == without else []
        return array("i", own).tobytes()

    def _known_marks(self) -> tuple[int, ...]:
        """The marks that the family's code names, and those that any of them may know."""
        values = [*vars(self.renderer).values()]
        for part in (
            getattr(self.renderer, "_tool_parser", None),
            getattr(self.renderer, "_reasoning_parser", None),
        ):
            values += vars(part).values() if part is not None else ()
        marks = {value for value in values if isinstance(value, int) and value in self.added}
        marks |= {at for at, text in self.tokenizer.added.items() if text in _WELL_KNOWN}
        return tuple(sorted((marks | self.stops) & self.added))

    def _revokes(self, mark: int) -> bool:
        """Whether a mark takes back all that came before it: if it counted, nothing could be told early."""
        context = tuple(memoryview(self._prompt).cast("i").tolist())

        def parse(ids: Sequence[int]) -> Any:
            return self.found(context, ids, ())

        return not plan(parse, (), (mark,), self._probe, self._later).sure

    def _reacts(self, mark: str) -> bool:
        """Whether the family reads a mark in plain text: then text cannot be told token by token alone."""
        if self.tokenizer.convert_tokens_to_ids(mark) in self.added:
            return False
        context = tuple(memoryview(self._prompt).cast("i").tolist())
        for before in ("", "a", "<think>a"):
            found = self.found(context, self.tokenizer.encode(f"{before}{mark}b"), ())
            if f"{mark}b" not in f"{found.content} {found.reasoning_content}":
                return True
        return False
