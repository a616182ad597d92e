"""Chat renderers convert messages to prompt token IDs, and sampled token IDs back to messages.

They run in runners and in gateway shards. A renderer is opened by a function that is registered under the entry
point group `rookery.chat_renderers`. An unknown name, a missing path or an invalid option raises `UsageError` when
the renderer is opened. A config that was resolved with `resolve_config` opens the same renderer in any process of
the machine, because it names a local tokenizer directory.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.gateway.chat_renderers.protocol import ChatRenderer, RenderError, ReplyParser

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers.threaded import ThreadedRenderer

__all__ = [
    "ChatRenderer",
    "RenderError",
    "RendererConfig",
    "ReplyParser",
    "list_renderers",
    "open_renderer",
    "open_renderer_config",
    "open_threaded_renderer",
    "parse_renderer_config",
    "resolve_config",
]

_ENTRY_POINTS = "rookery.chat_renderers"


class RendererConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of a chat renderer: the chat format, by name, and the tokenizer."""

    name: str = "auto"
    """Name of the chat format: `embedded` (for the embedded policy), a model family (`qwen3`, `llama-3`, …),
    `default` (the tokenizer's own chat template), or `auto` (the family of the tokenizer's model if it is known,
    else `default`)."""
    tokenizer: str = ""
    """A directory with a tokenizer.json, or a name on the Hugging Face hub."""
    tool_parser: str | None = None
    """Name of the parser for tool calls in replies; only for the format `default`. None: `hermes` if there is a
    tool prompt, else tool calls are part of the text."""
    reasoning_parser: str | None = None
    """Name of the parser for reasoning in replies; only for the format `default`."""
    template: str | None = None
    """The text of a chat template that replaces the tokenizer's own; `resolve_config` also accepts the path of a
    .jinja file."""
    tool_prompt: str | None = None
    """Text with which tools are described in the system message, for templates that ignore tools: `default`, a
    text that contains `{tools}`, or the path of a file with such a text. None: the template describes the
    tools."""
    allow_no_tools: bool = False
    """True if calls with tools are accepted although the template ignores tools, so that the model does not see
    them. If not, such calls are rejected."""
    options: dict[str, Any] = {}
    """Further options of the family or the template, such as `enable_thinking`."""


def list_renderers() -> tuple[str, ...]:
    """Return the names of the chat formats that can be opened with the installed packages."""
    names = {point.name for point in _list_entry_points() if not hasattr(_load_entry_point(point), "families")}
    for point in _list_entry_points():
        with suppress(UsageError):  # an optional dependency is not installed
            names |= set(_list_families(point))
    return tuple(sorted(names))


def open_renderer(
    name: str,
    tokenizer: str = "",
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    template: str | None = None,
    options: dict[str, Any] | None = None,
) -> ChatRenderer:
    """Open a chat renderer. The arguments are the fields of `RendererConfig`.

    A tokenizer on the Hugging Face hub is downloaded if it is not cached on this machine.
    """
    config = RendererConfig(
        name=name,
        tokenizer=tokenizer,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        template=template,
        options=options or {},
    )
    return open_renderer_config(config)


def open_renderer_config(config: RendererConfig) -> ChatRenderer:
    """Open the chat renderer described by a config. Raises `UsageError` if its name or an option is invalid.

    Loading a tokenizer takes about a second, and may download it.
    """
    points = _list_entry_points()
    missing = ""
    found = next((point for point in points if point.name == config.name), None)
    for point in points if found is None else ():
        try:
            if config.name in _list_families(point):
                found = point
                break
        except UsageError as error:
            missing = f"; {error}"
    if found is None:
        known = ", ".join(list_renderers()) or "none; reinstall rookery-rl with its entry points"
        raise UsageError(f"there is no chat format {config.name!r}; the known ones are {known}{missing}")
    return cast("Callable[[RendererConfig], ChatRenderer]", _load_entry_point(found))(resolve_config(config))


def resolve_config(config: RendererConfig) -> RendererConfig:
    """Return the config with the tokenizer's local directory, and with the texts of chat template and tool prompt.

    Downloads the tokenizer if needed. The result opens the same renderer in other processes of the machine.
    """
    changes: dict[str, Any] = {}
    if config.tokenizer:
        from rookery.gateway.chat_renderers.tokenizer_cache import resolve_tokenizer

        changes["tokenizer"] = resolve_tokenizer(config.tokenizer)
    if config.template is not None and "\n" not in config.template and config.template.endswith(".jinja"):
        try:
            changes["template"] = Path(config.template).expanduser().read_text()
        except (OSError, ValueError) as error:
            raise UsageError(f"the chat template {config.template!r} cannot be read: {describe(error)}") from error
    if config.tool_prompt is not None:
        from rookery.gateway.chat_renderers.tool_prompt import read_tool_prompt

        changes["tool_prompt"] = read_tool_prompt(config.tool_prompt)
    return msgspec.structs.replace(config, **changes) if changes else config


def _list_entry_points() -> list[Any]:
    from importlib.metadata import entry_points  # takes 20 ms to import; `--help` does not need it

    return sorted(entry_points(group=_ENTRY_POINTS), key=lambda point: str(point.name))


def _load_entry_point(point: Any) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the chat renderer {point.name!r} cannot be loaded: {describe(error)}") from error


def _list_families(point: Any) -> tuple[str, ...]:
    """Return the names of the model families that an entry point can open, besides its own name.

    The entry point's function may have an attribute `families`, a function that returns them.
    """
    families = getattr(_load_entry_point(point), "families", None)
    return tuple(families()) if families is not None else ()


def open_threaded_renderer(settings: dict[str, Any]) -> "ThreadedRenderer":
    """Open the chat renderer described by plain settings (fields of `RendererConfig`), with worker threads."""
    from rookery.gateway.chat_renderers.threaded import ThreadedRenderer

    return ThreadedRenderer(open_renderer_config(parse_renderer_config(settings)))


def parse_renderer_config(settings: dict[str, Any]) -> RendererConfig:
    """Convert plain settings to a `RendererConfig`. Raises `UsageError` for an unknown or invalid setting."""
    unknown = sorted(set(settings) - set(RendererConfig.__struct_fields__))
    if unknown:
        raise UsageError(f"the chat format has no setting {unknown[0]!r}")
    try:
        return msgspec.convert(settings, RendererConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"a setting of the chat format is invalid: {error}") from None
