"""Chat formats: how messages become token ids and sampled ids become messages again.

Promises:
- a rendering is one function behind an entry point (`rookery.renderings`): adding one edits nothing here;
- a name, a path or an option that cannot be raises `UsageError` when the rendering is opened, in words;
- what is opened in one process opens the same in another: a config travels, and its tokenizer is a folder by then.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.gateway.renderings.protocol import Reader, Rendering, Unrenderable

if TYPE_CHECKING:
    from rookery.gateway.renderings.offloop import Offloop

__all__ = [
    "Reader",
    "Rendering",
    "RenderingConfig",
    "Unrenderable",
    "config_of",
    "open_config",
    "open_offloop",
    "open_rendering",
    "renderings",
    "settle",
]

_GROUP = "rookery.renderings"


class RenderingConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat format and its tokenizer, by name."""

    name: str = "auto"
    """`embedded`, a family (`qwen3`, `llama-3`, …), `auto` (the family of the model that the tokenizer is of, else
    `default`) or `default` (the model's own chat template)."""
    tokenizer: str = ""
    """A folder with a tokenizer.json, or a hub's name."""
    tool_parser: str | None = None
    """How `default` reads calls."""
    reasoning_parser: str | None = None
    """How `default` reads reasoning."""
    template: str | None = None
    """The text of a chat template instead of the tokenizer's own; `settle` also takes a file's path."""
    tool_prompt: str | None = None
    """Describes tools in the system message, instead of the template: `default`, a text with `{tools}` in it, or
    the path of a file with such a text."""
    allow_no_tools: bool = False
    """Send calls without their tools where the template has no place for them, instead of refusing those calls."""
    options: dict[str, Any] = {}
    """What the family or the template knows beyond that, as `enable_thinking`."""


def renderings() -> tuple[str, ...]:
    """The names that can be opened here."""
    names = {point.name for point in _points() if not hasattr(_loaded(point), "families")}
    for point in _points():
        with suppress(UsageError):  # its extra is not installed
            names |= set(_families(point))
    return tuple(sorted(names))


def open_rendering(
    name: str,
    tokenizer: str = "",
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    template: str | None = None,
    options: dict[str, Any] | None = None,
) -> Rendering:
    """The rendering of that name. A hub's tokenizer is fetched where this machine does not have it yet."""
    config = RenderingConfig(
        name=name,
        tokenizer=tokenizer,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        template=template,
        options=options or {},
    )
    return open_config(config)


def open_config(config: RenderingConfig) -> Rendering:
    """The rendering that a config describes; takes a second where its tokenizer is not loaded yet."""
    points = _points()
    missing = ""
    found = next((point for point in points if point.name == config.name), None)
    for point in points if found is None else ():
        try:
            if config.name in _families(point):
                found = point
                break
        except UsageError as error:
            missing = f"; {error}"
    if found is None:
        known = ", ".join(renderings()) or "none: is rookery-rl installed?"
        raise UsageError(f"there is no rendering {config.name!r}; known: {known}{missing}")
    return cast("Callable[[RenderingConfig], Rendering]", _loaded(found))(settle(config))


def settle(config: RenderingConfig) -> RenderingConfig:
    """The config with its tokenizer's folder, fetched where it must be, and its template's text: it can travel."""
    changes: dict[str, Any] = {}
    if config.tokenizer:
        from rookery.gateway.renderings.resolve import settled

        changes["tokenizer"] = settled(config.tokenizer)
    if config.template is not None and "\n" not in config.template and config.template.endswith(".jinja"):
        try:
            changes["template"] = Path(config.template).expanduser().read_text()
        except (OSError, ValueError) as error:
            raise UsageError(f"the chat template {config.template!r} cannot be read: {describe(error)}") from error
    if config.tool_prompt is not None:
        from rookery.gateway.renderings.tool_prompts import read_tool_prompt

        changes["tool_prompt"] = read_tool_prompt(config.tool_prompt)
    return msgspec.structs.replace(config, **changes) if changes else config


def _points() -> list[Any]:
    from importlib.metadata import entry_points  # 20 ms, which `--help` should not pay

    return sorted(entry_points(group=_GROUP), key=lambda point: str(point.name))


def _loaded(point: Any) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the rendering {point.name!r} cannot be loaded: {describe(error)}") from error


def _families(point: Any) -> tuple[str, ...]:
    """The further names that an entry point opens: its function may have `families`, without arguments."""
    families = getattr(_loaded(point), "families", None)
    return tuple(families()) if families is not None else ()


def open_offloop(settings: dict[str, Any]) -> "Offloop":
    """The rendering that plain settings describe, beside the event loop."""
    from rookery.gateway.renderings.offloop import Offloop

    return Offloop(open_config(config_of(settings)))


def config_of(settings: dict[str, Any]) -> RenderingConfig:
    """Plain settings as a config; raises `UsageError` for what it has no place for."""
    strange = sorted(set(settings) - set(RenderingConfig.__struct_fields__))
    if strange:
        raise UsageError(f"a chat format has no setting {strange[0]!r}")
    try:
        return msgspec.convert(settings, RenderingConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"the chat format cannot be used: {error}") from None
