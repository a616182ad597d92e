"""Launchers: plain data, usually read from TOML, that says how to install and start a command-line agent.

A launcher is found by name among the built-in TOML files and the entry points of the group `rookery.launchers`, or
by the path of a TOML file. Adding a launcher needs no code changes. An invalid launcher is rejected when it is
loaded. Texts of a launcher contain placeholders such as `{prompt}`. They are replaced once, so that a text that
looks like a placeholder inside a prompt is left alone.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from rookery.core import UsageError

GROUP: Final = "rookery.launchers"
"""Entry-point group of launchers. An entry point refers to a `Launcher`, a dict, or the path of a TOML file."""
BUILTIN_DIRECTORY: Final = Path(__file__).parent / "builtin"
MAX_DRIVER: Final = 1 << 20

PromptChannel: TypeAlias = Literal["argv", "stdin", "file"]

PLACEHOLDERS: Final = {
    "prompt": "the task's prompt",
    "prompt_file": "a file in the sandbox that contains the prompt",
    "workdir": "the agent's working directory",
    "home": "a directory for the agent's settings and logs",
    "agent": "where the agent is installed",
    "python": "the Python of the sandbox",
    "driver": "the program that comes with the launcher",
    "script": "the user's program",
    "model": "the model's name",
    "openai_url": "the base URL of OpenAI's protocols, with /v1",
    "anthropic_url": "the base URL of Anthropic's protocol",
    "key": "the API key for both",
    "mcp_file": "the file with the task's MCP servers",
}
_PLACEHOLDER: Final = re.compile(r"\{\{|\}\}|\{([a-z_]+)\}")


class Install(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Packages and commands with which an agent is installed into its own directory, once per machine."""

    python: tuple[str, ...] = ()
    """pip requirements, installed with their dependencies."""
    python_no_deps: tuple[str, ...] = ()
    """pip requirements installed without their dependencies. List the dependencies that are needed in `python`."""
    node: tuple[str, ...] = ()
    """npm packages to install."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Commands to run in the agent's directory on this machine, after the packages are installed."""
    seconds: float = 1800.0
    """Time limit of the whole installation, in seconds."""

    @property
    def is_empty(self) -> bool:
        return not (self.python or self.python_no_deps or self.node or self.commands)


class Mcp(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Describes how to tell an agent about a task's MCP servers: the format and path of a configuration file."""

    format: Literal["json", "toml"] = "json"
    """`json`: an object `mcpServers` with the servers by name. `toml`: tables `mcp_servers.NAME`."""
    file: str = "{home}/mcp.json"
    """Path of the configuration file in the sandbox; may contain placeholders."""
    append: bool = False
    """True to append the servers to the text that the launcher's `files` defines for the same path."""
    arguments: tuple[str, ...] = ()
    """Arguments appended to the agent's command if the task has MCP servers."""


class Launcher(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Describes how to install and start one command-line agent.

    Texts may contain placeholders such as `{prompt}`; `PLACEHOLDERS` lists them. Write `{{` and `}}` for braces.
    """

    name: str
    command: tuple[str, ...]
    """The command that starts the agent in the sandbox."""
    about: str = ""
    """One-line description for users."""
    dialect: str = "chat"
    """The model API that the agent uses: `chat`, `responses` or `messages`. For information only, since every
    gateway session serves all APIs."""
    prompt: PromptChannel = "argv"
    """The way the agent gets its prompt: as a command-line argument, on stdin, or in a file."""
    install: Install = Install()
    environment: dict[str, str] = {}
    """Environment variables of the agent. The base URLs and API keys that the OpenAI and Anthropic libraries read
    are always set."""
    files: dict[str, str] = {}
    """Files to write into the sandbox before the agent starts: path → text."""
    needs: tuple[str, ...] = ()
    """Programs that must be on the PATH of the sandbox."""
    check: tuple[str, ...] = ()
    """A command that fails if the agent cannot start in a sandbox; run once per container image. Without a check,
    an agent that cannot start because the image lacks a library may look like a policy that does nothing."""
    driver: str = ""
    """File name of a program that comes with the launcher, in the same directory as its TOML file. It is written
    into the sandbox; `{driver}` is its path there."""
    driver_text: str = ""
    """Source of the driver. If empty, it is read from the file `driver`."""
    script: bool = False
    """True if the user must pass a program with the environment's option `script`, which the agent runs."""
    collect: tuple[str, ...] = ()
    """Paths of files in the sandbox to store in the rollout's record. Long files are shortened."""
    ok: tuple[int, ...] = (0,)
    """Exit codes of the agent that mean success."""
    mcp: Mcp | None = None
    """Description of how to configure MCP servers; None if the agent does not support MCP."""

    def __post_init__(self) -> None:
        problems = list(_find_problems(self))
        if problems:
            raise UsageError(f"launcher {self.name or '?'}: {'; '.join(problems)}")

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield every text of the launcher that may contain placeholders, as pairs of field name and text."""
        yield from ((f"command[{at}]", text) for at, text in enumerate(self.command))
        yield from ((f"check[{at}]", text) for at, text in enumerate(self.check))
        for name, value in self.environment.items():
            yield f"environment.{name}", value
        for path, text in self.files.items():
            yield "files", path
            yield f"files.{path}", text
        yield from (("collect", path) for path in self.collect)
        if self.mcp is not None:
            yield "mcp.file", self.mcp.file
            yield from ((f"mcp.arguments[{at}]", text) for at, text in enumerate(self.mcp.arguments))

    def uses(self, name: str) -> bool:
        """Return whether any text of the launcher contains the placeholder `name`."""
        return any(name in find_placeholders(text) for _, text in self.texts())

    @property
    def needs_python(self) -> bool:
        """True if the sandbox must have a `python3`."""
        return bool(self.install.python or self.install.python_no_deps) or self.uses("python")


def find_placeholders(text: str) -> list[str]:
    """Return the names of the placeholders in `text`."""
    return [match[1] for match in _PLACEHOLDER.finditer(text) if match[1]]


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder in `text` by its value. Placeholders inside the values are not replaced."""

    def replace_match(match: re.Match[str]) -> str:
        return match[0][0] if not match[1] else values[match[1]]

    return _PLACEHOLDER.sub(replace_match, text)


def _find_problems(launcher: Launcher) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", launcher.name):
        yield f"its name must be 1 to 64 letters, digits, '-', '_' and '.', not {launcher.name!r:.80}"
    if not launcher.command or not launcher.command[0].strip():
        yield "it has no command"
    for field, text in launcher.texts():
        if unknown := [name for name in find_placeholders(text) if name not in PLACEHOLDERS]:
            yield f"{field} has the unknown placeholder {{{unknown[0]}}}; known are {', '.join(PLACEHOLDERS)}"
    if launcher.prompt == "argv" and not any("prompt" in find_placeholders(text) for text in launcher.command):
        yield "prompt is 'argv', but the command has no {prompt}"
    if launcher.prompt == "file" and not launcher.uses("prompt_file"):
        yield "prompt is 'file', but {prompt_file} is not used"
    known = ("agent", "python", "home", "workdir")
    if any(name not in known for text in launcher.check for name in find_placeholders(text)):
        yield f"check may only use the placeholders {{{'}, {'.join(known)}}}"
    if launcher.install.is_empty and launcher.uses("agent"):
        yield "it uses {agent} but installs nothing"
    if bool(launcher.driver or launcher.driver_text) != launcher.uses("driver"):
        yield "the key driver and the placeholder {driver} must be used together"
    if launcher.script != launcher.uses("script"):
        yield "script = true and the placeholder {script} must be used together"
    if launcher.mcp is None and launcher.uses("mcp_file"):
        yield "it uses {mcp_file} but has no [mcp] table"
    if not 0 < launcher.install.seconds < float("inf"):
        yield f"install.seconds must be a finite number above 0, not {launcher.install.seconds!r}"
    if any(not command for command in launcher.install.commands):
        yield "install.commands contains an empty command"


# ---- loading


def find_launcher(launcher: "str | Path | Mapping[str, Any] | Launcher") -> Launcher:
    """Return the launcher for a name, the path of a TOML file, a dict, or a `Launcher`.

    Raise `UsageError` if there is no such launcher or it is invalid.
    """
    if isinstance(launcher, Launcher):
        return launcher
    if isinstance(launcher, Mapping):
        return _convert(dict(launcher), "the launcher", None)
    text = str(launcher)
    if text.endswith(".toml"):
        return read_launcher(Path(text))
    if (BUILTIN_DIRECTORY / f"{text}.toml").is_file() and Path(text).name == text:
        return read_launcher(BUILTIN_DIRECTORY / f"{text}.toml")
    for point in entry_points(group=GROUP):
        if point.name == text:
            return _load_entry_point(point.name, point.load)
    raise UsageError(
        f"unknown launcher {text!r:.80}: known are {', '.join(list_launchers())}; or name a file: FILE.toml"
    )


def list_launchers() -> list[str]:
    """Return the names of the built-in launchers and of those from installed packages, sorted."""
    return sorted(
        {path.stem for path in BUILTIN_DIRECTORY.glob("*.toml")}
        | {point.name for point in entry_points(group=GROUP)}
    )


def read_launcher(path: Path) -> Launcher:
    """Read a launcher from a TOML file."""
    try:
        table = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"the launcher {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"the launcher {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the launcher {path} is not TOML: {error}") from None
    table.setdefault("name", path.stem)
    return _convert(table, f"the launcher {path}", path.expanduser().parent)


def _load_entry_point(name: str, load: Any) -> Launcher:
    """Load a launcher from an entry point."""
    try:
        value = load()
    except Exception as error:
        raise UsageError(f"the launcher {name} cannot be imported: {error}") from error
    if isinstance(value, Launcher):
        return value
    if isinstance(value, Mapping):
        return _convert({"name": name, **value}, f"the launcher {name}", None)
    if isinstance(value, str | Path):
        return read_launcher(Path(value))
    raise UsageError(f"the launcher {name} is {type(value).__name__}: it must be a Launcher, a table or a path")


def _convert(table: dict[str, Any], what: str, folder: Path | None) -> Launcher:
    if isinstance(table.get("command"), str):
        table["command"] = shlex.split(table["command"])
    if table.get("driver") and not table.get("driver_text"):
        table["driver_text"] = _read_driver(str(table["driver"]), what, folder)
    unknown = sorted(set(table) - set(Launcher.__struct_fields__))
    if unknown:
        raise UsageError(
            f"{what} has no key {unknown[0]!r:.80}; its keys are {', '.join(Launcher.__struct_fields__)}"
        )
    if "command" not in table:
        raise UsageError(f"{what} has no key 'command'; set it to a list of the program and its arguments")
    try:
        return msgspec.convert(table, Launcher)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        raise UsageError(f"{what}: {error}") from None


def _read_driver(name: str, what: str, folder: Path | None) -> str:
    if folder is None or Path(name).name != name:
        raise UsageError(f"{what}: driver must be the name of a file next to the TOML file, not {name!r:.80}")
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{what}: the driver file {name} cannot be read: {error}") from None
    if len(text) > MAX_DRIVER:
        raise UsageError(f"{what}: the content of the driver file {name} exceeds {MAX_DRIVER} characters")
    return text
