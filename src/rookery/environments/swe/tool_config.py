"""Configuration of the `swe` environment's tools: a dict from Python, TOML or the command line.

Its key `preset` names one of the built-in configurations in `PRESETS`, which the other keys override. Unknown keys
raise `UsageError`.
"""

from typing import Any, Final, Literal

import msgspec

from rookery.core import UsageError

MARKER: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BUILT_IN: Final = ("bash", "edit", "submit")


class ToolSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of one tool. An empty string or None means the tool's default."""

    name: str = ""
    """Name under which the policy calls the tool."""
    description: str = ""
    """Description of the tool that the policy reads."""
    timeout: float | None = None
    """Time limit of one call in seconds. None means the rollout's `limits.call`."""
    output: int = 16_384
    """Maximum bytes of a result; longer results are cut in the middle."""

    def __post_init__(self) -> None:
        if self.output < 64:
            raise ValueError(f"output must be at least 64 bytes, not {self.output}")
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout must be a finite number above 0, not {self.timeout}")


class ToolConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tools of a `SweEnvironment` and their settings."""

    tools: tuple[str, ...] = BUILT_IN
    """Names of built-in or registered tools, or functions as `module:function`."""
    marker: str = ""
    """Text that submits the work if it is the first or last line that a bash command prints. Empty means none."""
    editor_commands: Literal["short", "long"] = "short"
    """`long` renames the commands `replace` and `undo` of the tool `edit` to `str_replace` and `undo_edit`."""
    create_parents: bool = False
    """True if the command `create` of the tool `edit` creates missing parent directories."""
    timeouts: bool = True
    """True if the policy may set a shorter time limit in a call of `bash`."""
    bash: ToolSettings = ToolSettings()
    edit: ToolSettings = ToolSettings()
    submit: ToolSettings = ToolSettings()
    others: dict[str, ToolSettings] = {}
    """Settings of tools that are not built in, by their name in `tools`."""


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "rookery": {},
    "open-instruct": {
        "editor_commands": "long",
        "create_parents": True,
        "timeouts": False,
        "bash": {"name": "execute_bash"},
        "edit": {"name": "str_replace_editor"},
        "submit": {"name": "submit"},
    },
    "open-instruct-marker": {
        "tools": ["bash", "edit"],
        "editor_commands": "long",
        "create_parents": True,
        "timeouts": False,
        "marker": MARKER,
        "bash": {"name": "execute_bash"},
        "edit": {"name": "str_replace_editor"},
    },
    "bash-only": {"tools": ["bash"], "marker": MARKER},
}

_OPTIONS: Final = ("marker", "editor_commands", "create_parents", "timeouts")


def parse_tool_config(tools: Any, config: Any) -> ToolConfig:
    """Return the configuration for `config`, a dict; raise `UsageError` if it is invalid.

    `tools`, a list of names or a string with commas, overrides the key `tools` of `config`. None means no
    override.
    """
    table = _parse_table("tool_config", {} if config is None else config)
    preset = table.pop("preset", "rookery")
    if preset not in PRESETS:
        raise UsageError(f"unknown tool preset {preset!r:.80}: known are {', '.join(PRESETS)}")
    values = _merge(PRESETS[preset], table)
    configured_names = values.pop("tools", BUILT_IN)
    names = _parse_names(configured_names if tools is None else tools)
    options: dict[str, Any] = {name: values.pop(name) for name in _OPTIONS if name in values}
    settings = {name: _parse_settings(name, values.pop(name)) for name in BUILT_IN if name in values}
    output = values.pop("output", None)
    others: dict[str, ToolSettings] = {}
    for name in list(values):
        if name not in names:
            known = ", ".join([*_OPTIONS, "preset", "tools", "output", *dict.fromkeys((*BUILT_IN, *names))])
            raise UsageError(f"tool_config has no key {name!r:.80}: known are {known}")
        others[name] = _parse_settings(name, values.pop(name))
    try:
        parsed = msgspec.convert({**options, "tools": names}, ToolConfig)
        parsed = msgspec.structs.replace(parsed, **settings, others=others)
        if output is not None:
            settings = {name: _with_output(getattr(parsed, name), output) for name in BUILT_IN}
            parsed = msgspec.structs.replace(parsed, **settings)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"tool_config: {error}") from None
    if "submit" not in names and not parsed.marker and not any(name not in BUILT_IN for name in names):
        raise UsageError(
            "the policy has no way to submit: add `submit` to tools, or set the key `marker` of tool_config, for "
            f"example to {MARKER}"
        )
    return parsed


def _with_output(settings: ToolSettings, output: Any) -> ToolSettings:
    """Return the settings with the common limit `output`, unless the tool's own limit differs from the default."""
    if settings.output != ToolSettings().output:
        return settings
    return msgspec.convert({**msgspec.to_builtins(settings), "output": output}, ToolSettings)


def _parse_names(names: Any) -> tuple[str, ...]:
    if isinstance(names, str):
        names = [part.strip() for part in names.split(",")]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"tools must be names such as bash, edit, submit or module:function, not {names!r:.100}")
    if not names:
        raise UsageError(f"tools is empty: list some of {', '.join(BUILT_IN)}, or your own")
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise UsageError(f"the tool {duplicates[0]!r} is listed twice in tools: remove one")
    return tuple(names)


def _parse_table(key: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
        raise UsageError(f"{key} must be a table, not {table!r:.80}")
    return {name if ":" in name else name.replace("-", "_"): value for name, value in table.items()}


def _parse_settings(name: str, table: Any) -> ToolSettings:
    try:
        return msgspec.convert(_parse_table(f"tool_config.{name}", table), ToolSettings)
    except msgspec.ValidationError as error:
        fields = ", ".join(ToolSettings.__struct_fields__)
        raise UsageError(f"tool_config.{name}: {error}; the keys of a tool are {fields}") from None


def _merge(preset: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return `preset` overridden by `table`. Dicts, such as the settings of a tool, are merged key by key."""
    merged = dict(preset)
    for name, value in table.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = {**merged[name], **value} if both else value
    return merged
