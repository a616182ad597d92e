"""How a command-line agent is started: data, read from TOML.

Promises:
- a launcher is plain data: adding one edits no code, here or elsewhere;
- what is wrong with one is said in words when it is made: an unknown key, an unknown placeholder, no command;
- a name finds the built-in ones, those of installed packages and a file of the user's own, in this order;
- a placeholder in what comes from outside (a prompt, a name) is text and is never filled in.
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
FOLDER: Final = Path(__file__).parent / "builtin"
MAX_DRIVER: Final = 1 << 20

DialectName: TypeAlias = Literal["chat", "responses", "messages", "completions"]
PromptBy: TypeAlias = Literal["argv", "stdin", "file"]

PLACEHOLDERS: Final = {
    "prompt": "the task's prompt",
    "prompt_file": "a file in the box that holds it",
    "workdir": "the folder that the agent works in",
    "home": "a folder of the agent's own, for its settings and logs",
    "agent": "where the agent is installed",
    "python": "the box's Python",
    "driver": "the launcher's own program",
    "script": "the user's program",
    "model": "the model's name",
    "openai_url": "the base URL of OpenAI's protocols, with /v1",
    "anthropic_url": "the base URL of Anthropic's protocol",
    "key": "the key for both",
    "mcp_file": "the file with the task's MCP servers",
}
_PLACE: Final = re.compile(r"\{\{|\}\}|\{([a-z_]+)\}")


class Install(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is put into the agent's folder, once for a machine."""

    python: tuple[str, ...] = ()
    """Requirements, as pip reads them, with all that they need."""
    python_alone: tuple[str, ...] = ()
    """Without what they need: that is listed in `python`, so that nothing comes along that is never used."""
    node: tuple[str, ...] = ()
    """Packages, as npm reads them."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Programs of this machine, run in the folder afterwards."""
    seconds: float = 1800.0
    """How long all of it may take."""

    @property
    def nothing(self) -> bool:
        return not (self.python or self.python_alone or self.node or self.commands)


class Mcp(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How an agent is told of MCP servers."""

    format: Literal["json", "toml"] = "json"
    """`json`: an object `mcpServers`, by name. `toml`: tables `mcp_servers.NAME`."""
    file: str = "{home}/mcp.json"
    append: bool = False
    """Whether the tables are added to a file that the launcher writes anyway."""
    arguments: tuple[str, ...] = ()
    """Put behind the command, where a task has servers."""


class Launcher(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One agent. Texts may hold placeholders, `{prompt}` for example; `{{` and `}}` are braces."""

    name: str
    command: tuple[str, ...]
    about: str = ""
    dialect: DialectName = "chat"
    """What it speaks to the gateway; every door speaks all of them, so that this tells people."""
    prompt: PromptBy = "argv"
    install: Install = Install()
    environment: dict[str, str] = {}
    """Over the base URLs and keys that OpenAI's and Anthropic's libraries read."""
    files: dict[str, str] = {}
    """Written into the box before the start: path → text."""
    needs: tuple[str, ...] = ()
    """Programs that the box must have."""
    check: tuple[str, ...] = ()
    """A command that fails where the agent cannot start; run once for an image. Else an image that lacks a library
    would look like a policy that does nothing."""
    driver: str = ""
    """A program that comes with the launcher: a file beside its TOML."""
    driver_text: str = ""
    """The same as text; read from the file where one is named."""
    script: bool = False
    """Whether it starts a program of the user's, given by the option `script`."""
    collect: tuple[str, ...] = ()
    """Files of the box that are kept in the record, bounded."""
    ok: tuple[int, ...] = (0,)
    """Exit codes of an agent that came to its own end."""
    mcp: Mcp | None = None

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise UsageError(f"launcher {self.name or '?'}: {'; '.join(problems)}")

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every text that may hold placeholders, and where it stands."""
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
        return any(name in placeholders(text) for _, text in self.texts())

    @property
    def needs_python(self) -> bool:
        return bool(self.install.python or self.install.python_alone) or self.uses("python")


def placeholders(text: str) -> list[str]:
    return [found[1] for found in _PLACE.finditer(text) if found[1]]


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders filled in, once: what they are filled with is left as it is."""

    def one(found: re.Match[str]) -> str:
        return found[0][0] if not found[1] else values[found[1]]

    return _PLACE.sub(one, text)


def _problems(launcher: Launcher) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", launcher.name):
        yield f"its name must be letters, digits, '-', '_' and '.', not {launcher.name!r:.80}"
    if not launcher.command or not launcher.command[0].strip():
        yield "it has no command"
    for where, text in launcher.texts():
        if strange := [name for name in placeholders(text) if name not in PLACEHOLDERS]:
            yield f"{where} has the unknown placeholder {{{strange[0]}}}; there are {', '.join(PLACEHOLDERS)}"
    if launcher.prompt == "argv" and not any("prompt" in placeholders(text) for text in launcher.command):
        yield "its prompt goes by argv, and its command has no {prompt}"
    if launcher.prompt == "file" and not launcher.uses("prompt_file"):
        yield "its prompt goes by a file, and {prompt_file} stands nowhere"
    known = ("agent", "python", "home", "workdir")
    if any(name not in known for text in launcher.check for name in placeholders(text)):
        yield f"check may use {{{'}, {'.join(known)}}} and no others"
    if launcher.install.nothing and launcher.uses("agent"):
        yield "it uses {agent} and installs nothing"
    if bool(launcher.driver or launcher.driver_text) != launcher.uses("driver"):
        yield "a driver and {driver} go together"
    if launcher.script != launcher.uses("script"):
        yield "script = true and {script} go together"
    if launcher.mcp is None and launcher.uses("mcp_file"):
        yield "it uses {mcp_file} and has no [mcp]"
    if not 0 < launcher.install.seconds < float("inf"):
        yield f"install.seconds must be a finite number above 0, not {launcher.install.seconds!r}"
    if any(not command for command in launcher.install.commands):
        yield "install.commands has an empty one"


# ---- finding one


def find_launcher(given: "str | Path | Mapping[str, Any] | Launcher") -> Launcher:
    """A built-in one, one of an installed package, or one of a file; `UsageError` says what is wrong."""
    if isinstance(given, Launcher):
        return given
    if isinstance(given, Mapping):
        return _made(dict(given), "the launcher", None)
    text = str(given)
    if text.endswith(".toml"):
        return read_launcher(Path(text))
    if (FOLDER / f"{text}.toml").is_file() and Path(text).name == text:
        return read_launcher(FOLDER / f"{text}.toml")
    for point in entry_points(group=GROUP):
        if point.name == text:
            return _loaded(point.name, point.load)
    raise UsageError(
        f"there is no launcher {text!r:.80}; there are {', '.join(known_launchers())}, or name a file: FILE.toml"
    )


def known_launchers() -> list[str]:
    return sorted({path.stem for path in FOLDER.glob("*.toml")} | {one.name for one in entry_points(group=GROUP)})


def read_launcher(path: Path) -> Launcher:
    try:
        found = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"the launcher {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"the launcher {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the launcher {path} is not TOML: {error}") from None
    found.setdefault("name", path.stem)
    return _made(found, f"the launcher {path}", path.expanduser().parent)


def _loaded(name: str, load: Any) -> Launcher:
    """Of an installed package: a `Launcher`, a table, or the path of a TOML file."""
    try:
        value = load()
    except Exception as error:
        raise UsageError(f"the launcher {name} cannot be imported: {error}") from error
    if isinstance(value, Launcher):
        return value
    if isinstance(value, Mapping):
        return _made({"name": name, **value}, f"the launcher {name}", None)
    if isinstance(value, str | Path):
        return read_launcher(Path(value))
    raise UsageError(f"the launcher {name} is {type(value).__name__}: it must be a Launcher, a table or a path")


def _made(table: dict[str, Any], what: str, folder: Path | None) -> Launcher:
    if isinstance(table.get("command"), str):
        table["command"] = shlex.split(table["command"])
    if table.get("driver") and not table.get("driver_text"):
        table["driver_text"] = _driver(str(table["driver"]), what, folder)
    unknown = sorted(set(table) - set(Launcher.__struct_fields__))
    if unknown:
        raise UsageError(
            f"{what} has no key {unknown[0]!r:.80}; its keys are {', '.join(Launcher.__struct_fields__)}"
        )
    if "command" not in table:
        raise UsageError(f"{what} has no command")
    try:
        return msgspec.convert(table, Launcher)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        raise UsageError(f"{what}: {error}") from None


def _driver(name: str, what: str, folder: Path | None) -> str:
    if folder is None or Path(name).name != name:
        raise UsageError(f"{what}: driver must be the name of a file beside its TOML, not {name!r:.80}")
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{what}: its driver {name} cannot be read: {error}") from None
    if len(text) > MAX_DRIVER:
        raise UsageError(f"{what}: its driver {name} has more than {MAX_DRIVER} characters")
    return text
