"""Options and option types of the commands.

Options of `rookery run` can also be set by an environment variable or in `rookery.toml`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import click

from rookery.cli.config import DEFAULT_RUNS_FOLDER, NUMBERS, load_config_file
from rookery.core import UsageError

F = TypeVar("F", bound=Callable[..., Any])
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)

if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic only in newer clicks


class Number(_Type):
    """Option type for a number within bounds. Unlike click's ranges, it does not add bounds to the help text."""

    def __init__(
        self, kind: type[int] | type[float], low: float, high: float = inf, *, above: bool = False
    ) -> None:
        self.kind = kind
        self.low = low
        self.high = high
        self.above = above
        """True if the value must be above the lower bound, False if it may be equal to it."""
        self.name = "n" if kind is int else "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        word = "a whole number" if self.kind is int else "a number"
        try:
            if isinstance(value, float) and self.kind is int:
                raise ValueError
            number = self.kind(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r:.80} is not {word}", param, ctx)
        if not self.low <= number <= self.high or (self.above and number == self.low) or number == inf:
            low = f"{'above' if self.above else 'at least'} {self.low:g}"
            high = f" and at most {self.high:g}" if self.high < inf else ""
            self.fail(f"{value!r:.80} is out of range: the value must be {low}{high}", param, ctx)
        return number


class FailureRate(_Type):
    """Option type for a failure rate above 0 and at most 1. The value `off` becomes None."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        if value is None or value == "off":
            return None
        try:
            rate = float(value)
        except (TypeError, ValueError):
            rate = -1.0
        if not 0 < rate <= 1:
            self.fail(f"{value!r} is not a rate above 0 and at most 1, or off", param, ctx)
        return rate


class Size(_Type):
    """Option type for a size in bytes: a number with an optional unit K, M, G or T (powers of 1024)."""

    name = "size"
    _UNITS: ClassVar = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}

    def __init__(self, low: int = 1) -> None:
        self.low = low

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if found is None:
            self.fail(
                f"{value!r:.80} is not a size: write for example 128M, 1G, 512K or a number of bytes", param, ctx
            )
        size = int(float(found[1]) * (1 << self._UNITS[found[2].upper()]))
        if not self.low <= size < 1 << 60:
            self.fail(
                f"{value!r:.80} is out of range: the size must be at least {format_size(self.low)} and less than "
                "1048576T",
                param,
                ctx,
            )
        return size


class PluginName(_Type):
    """Option type for the name of an installed plug-in.

    The entry points of installed packages are read only for the help text and to check a value.
    """

    name = "name"

    def __init__(self, group: str, *more: str) -> None:
        """Accept the plug-ins of the entry-point group `rookery.GROUP`, and the values `more`."""
        self.group = group
        self.more = more

    def list_names(self) -> list[str]:
        from importlib.metadata import entry_points

        return sorted({*self.more, *(point.name for point in entry_points(group=f"rookery.{self.group}"))})

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002
        return f"[{'|'.join(self.list_names())}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = self.list_names()
        if value not in names:
            self.fail(f"{value!r:.80} is not installed: choose one of {', '.join(names)}", param, ctx)
        return str(value)


def format_size(size: int) -> str:
    """Return a size as a number with the largest unit that divides it without a remainder, for example `512M`."""
    for unit, shift in (("T", 40), ("G", 30), ("M", 20), ("K", 10)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def parse_variables(options: Iterable[str], below: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the values of `${NAME}` in tasks, by name.

    `options` are `NAME=VALUE` texts of `--variable`. They override `below`, the table `[run.variables]`.
    """
    found: dict[str, str] = {}
    for name, value in (below or {}).items():
        if not _NAME.fullmatch(name) or isinstance(value, dict | list):
            raise UsageError(
                f'[run.variables] {name!r:.80} must be a name with a string value, such as PORT = "8080"'
            )
        found[name] = str(value).lower() if isinstance(value, bool) else str(value)
    for pair in options:
        name, equals, value = pair.partition("=")
        if not equals or not _NAME.fullmatch(name):
            shown = f" {name!r:.80}" if equals else ""  # do not print a value that may be a secret
            raise UsageError(f"--variable{shown} is not NAME=VALUE; write for example --variable PORT=8080")
        found[name] = value
    return found


def parse_columns(options: Iterable[str]) -> dict[str, str]:
    """Return the names of columns by field, from texts such as `prompt=question,answer=target`."""
    found: dict[str, str] = {}
    for pair in (pair for text in options for pair in text.split(",")):
        field, equals, column = (part.strip() for part in pair.partition("="))
        if not equals or not field or not column:
            raise UsageError(f"--columns {pair!r:.80} is not FIELD=COLUMN; write for example prompt=question")
        found[field] = column
    return found


NETWORKS: Final = ("none", "model", "allow", "all")
UNSAFE: Final = "Allow programs to run without isolation, as your user, if no sandbox provider isolates."


def option(*names: str, env: bool = False, **settings: Any) -> Callable[[F], F]:
    """Like `click.option`, but the help shows a default that is not empty, unless it contains `[default: …]`.

    With `env`, the option `--some-name` can also be set by the environment variable `ROOKERY_SOME_NAME`.
    """
    if env:
        settings["envvar"] = f"ROOKERY_{names[-1].strip('-').replace('-', '_').upper()}"
    shown = settings.get("default") not in (None, "") and "[default:" not in settings.get("help", "")
    return click.option(*names, show_default=shown, **settings)


def listen_options(port: int) -> Callable[[F], F]:
    """Return a decorator that adds `--host` and `--port`, for commands that serve HTTP."""
    host_option = option("--host", metavar="HOST", default="127.0.0.1", help="Address to listen on.")
    port_option = option(
        "--port",
        metavar="PORT",
        type=Number(int, 0, 65535),
        default=port,
        help="Port to listen on; 0 picks a free one.",
    )
    return lambda command: host_option(port_option(command))


_TASK_DATA: Final = "Directory of the task folders that rows name by task_id.  [default: beside the rows]"
_VARIABLE: Final = "Value of ${NAME} in tasks. Repeatable. It is stored in the journal, so do not pass secrets."


_SOURCE_OPTIONS: Final = (
    option("--task-data", metavar="SRC", env=True, help=_TASK_DATA),
    option(
        "--row-format",
        type=PluginName("row_formats"),
        env=True,
        help="Format of the rows of a well-known dataset.  [default: rows with a prompt]",
    ),
    option(
        "--columns",
        metavar="FIELD=COLUMN",
        multiple=True,
        env=True,
        help="Columns of the rows, for example prompt=question,answer=target. Repeatable.",
    ),
    option("--variable", metavar="NAME=VALUE", multiple=True, help=_VARIABLE),
)


def source_options(command: F) -> F:
    """Decorator that adds the options on how to read tasks, for commands that do not read rookery.toml."""
    for decorate in reversed(_SOURCE_OPTIONS):
        command = decorate(command)
    return command


def parse_source_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `source_options` as arguments of `load_tasks`."""
    return {
        "task_data": values["task_data"],
        "variables": parse_variables(values["variable"]),
        "row_format": values["row_format"] or "",
        "columns": parse_columns(values["columns"]),
    }


METRICS: Final = option(
    "--metrics",
    metavar="HOST:PORT",
    env=True,
    help="Serve metrics for Prometheus at http://HOST:PORT/metrics, without a key; port 0 picks a free one.",
)
TRACES: Final = option(
    "--traces",
    metavar="URL",
    env=True,
    help="Send OpenTelemetry traces to this OTLP/HTTP endpoint, for example http://localhost:4318.",
)
TRACE_CONTENT: Final = option(
    "--trace-content", is_flag=True, env=True, help="With --traces: include prompts, replies and tool results."
)
LOG_FORMAT: Final = option(
    "--log-format",
    type=click.Choice(("text", "json")),
    default="text",
    env=True,
    help="Format of the logs; json has one object per line, with the IDs of run, rollout and attempt.",
)
ROLE: Final = option(
    "--role",
    metavar="NAME=URL",
    multiple=True,
    help="Inference engine of another model role, for example judge=http://localhost:8001. Repeatable.",
)
ROLE_MODEL: Final = option(
    "--role-model", metavar="NAME=MODEL", multiple=True, help="Model name of another model role. Repeatable."
)
PRICES: Final = option(
    "--prices",
    metavar="FILE",
    help="TOML file with a table per model name: the price of a million `prompt` and `sampled` tokens.",
)
TOOL_PROMPT: Final = (
    "For chat templates without tools: file with a tool prompt that contains {tools}, or `default`."
)
ALLOW_NO_TOOLS: Final = "Continue without tools if the chat template does not support them."

_OPTIONS = (
    click.argument("env", metavar="ENV", required=False, envvar="ROOKERY_ENV"),
    option(
        "--tasks",
        metavar="SRC",
        env=True,
        help="Tasks: .jsonl or .json file, task directories, archive, or hf:….  [default: the environment's]",
    ),
    *_SOURCE_OPTIONS,
    option(
        "--policy",
        metavar="URL",
        multiple=True,
        env=True,
        help="URL of the inference engine, or `embedded` for the built-in policy. Repeat for replicas.",
    ),
    option(
        "--upstream-kind",
        type=PluginName("upstreams"),
        env=True,
        help="Kind of the inference engine.  [default: the prefix of the URL, or detected]",
    ),
    option("--model", metavar="M", env=True, help="Model name.  [default: the server's only model]"),
    option(
        "--record",
        type=click.Choice(("tokens", "messages", "plain", "off")),
        env=True,
        help="tokens: Rookery renders prompts; messages: the server does and returns token IDs; plain: no IDs; "
        "off: agents call the server directly, unrecorded.  [default: tokens with --tokenizer, else messages]",
    ),
    option(
        "--pass-key",
        is_flag=True,
        env=True,
        help="With --record off and another network than `model`: give the server's API key to the agents.",
    ),
    option("--tokenizer", metavar="PATH", env=True, help="Tokenizer of the policy: a directory or a hub name."),
    option("--renderer", metavar="NAME", env=True, help="Chat renderer, for example qwen3.  [default: auto]"),
    option("--tool-prompt", metavar="FILE", env=True, help=TOOL_PROMPT),
    option("--allow-no-tools", is_flag=True, env=True, help=ALLOW_NO_TOOLS),
    option(
        "--top-logprobs",
        metavar="N",
        type=Number(int, 0, 20),
        env=True,
        help="Record the N most likely tokens at each position, if the inference engine returns their IDs.",
    ),
    option(
        "--tool-parser",
        metavar="NAME",
        env=True,
        help="With --tokenizer: parser for tool calls, if the chat format does not define it.",
    ),
    option(
        "--replica-concurrency",
        type=Number(int, 1),
        env=True,
        help="Concurrent calls to each replica of the policy.  [default: what the replica reports, or 256]",
    ),
    option(
        "--wait-for-upstream",
        metavar="SECONDS",
        type=Number(float, 0),
        default=0.0,
        env=True,
        help="Seconds to wait for an unreachable inference engine before the run stops.  [default: 0]",
    ),
    option(
        "-n", "--num-tasks", metavar="TASKS", type=Number(int, 1), env=True, help="Run only the first TASKS tasks."
    ),
    option(
        "-k",
        "--per-task",
        metavar="PER_TASK",
        type=Number(int, 1),
        default=1,
        env=True,
        help="Rollouts per task (group size).",
    ),
    option("-c", "--concurrency", type=Number(int, 1), default=64, env=True, help="Concurrent rollouts."),
    option(
        "--longest-first",
        is_flag=True,
        env=True,
        help="Start rollouts first that are probably long, judged by earlier rollouts of the task or environment.",
    ),
    option(
        "--runners",
        type=Number(int, 0),
        env=True,
        help="Number of runner processes; 0 executes rollouts in this process.  [default: the number of cores]",
    ),
    option(
        "--cluster",
        metavar="NAME[:ADDRESS]",
        env=True,
        help="Start the runners on the nodes of a cluster: ray (the running Ray cluster), ray:ADDRESS, or local:N "
        "(N nodes on this machine). --runners is then their number on each node.",
    ),
    option(
        "--shared-files",
        is_flag=True,
        env=True,
        help="The nodes of the cluster share the run's directory: runners write their tokens there, and none are "
        "sent over the network.",
    ),
    option("-o", "--out", metavar="DIR", default=DEFAULT_RUNS_FOLDER, env=True, help="Directory of runs."),
    option(
        "--seed",
        metavar="S",
        type=Number(int, -(2**63), 2**63 - 1),
        env=True,
        help="Root of all random seeds. If it is set, every model call gets a seed derived from it.  [default: 0]",
    ),
    option(
        "--launcher",
        metavar="NAME",
        env=True,
        help="For the environment `agent`: name of the launcher, or FILE.toml.",
    ),
    option(
        "--arg",
        metavar="KEY=VALUE",
        multiple=True,
        help="Argument of the environment; VALUE is JSON or text. Repeatable.",
    ),
    option(
        "--tools",
        metavar="NAMES",
        multiple=True,
        env=True,
        help="Tools of the environment: names or module:function, separated by commas.",
    ),
    option(
        "--tool-config",
        metavar="KEY=VALUE",
        multiple=True,
        help="Tool settings, for example bash.output=8192, or a TOML file. Repeatable.",
    ),
    option(
        "--scorer",
        metavar="NAME",
        env=True,
        help="Scorer that grades the answers: answer, exact, numeric, regex, math, json-schema, judge, command, "
        "none, or module:attribute.  [default: the environment's]",
    ),
    option(
        "--scorer-arg",
        metavar="KEY=VALUE",
        multiple=True,
        help="Argument of the scorer; VALUE is JSON or text. Repeatable.",
    ),
    ROLE,
    ROLE_MODEL,
    option("--limit-turns", type=Number(int, 1), env=True, help="Maximum model calls of a rollout."),
    option("--limit-tokens", type=Number(int, 1), env=True, help="Maximum sampled tokens of a rollout."),
    option(
        "--test-timeout",
        metavar="SECONDS",
        type=Number(float, 0, above=True),
        env=True,
        help="Time limit of one execution of a task's tests; overrides the limits in the tasks.",
    ),
    option("--max-tokens", type=Number(int, 1), env=True, help="Maximum tokens of one reply."),
    option("--temperature", metavar="T", type=Number(float, 0), env=True, help="Sampling temperature."),
    option(
        "--top-p",
        metavar="P",
        type=Number(float, 0, 1, above=True),
        env=True,
        help="Nucleus sampling probability.",
    ),
    option(
        "--attempts",
        type=Number(int, 1),
        default=3,
        env=True,
        help="Maximum attempts at a rollout that fails because of the infrastructure.",
    ),
    option(
        "--breaker",
        type=FailureRate(),
        default="0.5",
        env=True,
        help="Stop the run if a larger fraction of the latest attempts failed; `off` never stops it.",
    ),
    option(
        "--sandbox",
        metavar="PROVIDER",
        env=True,
        help="Sandbox provider; see `rookery doctor`.  [default: the best that isolates]",
    ),
    option("--image", metavar="I", env=True, help="Image of the sandboxes.  [default: this system's files]"),
    option(
        "--network",
        metavar="N",
        type=click.Choice(NETWORKS),
        env=True,
        help="Network access of sandboxes.  [default: the environment's, else none]",
    ),
    option(
        "--warm",
        type=Number(int, 0),
        env=True,
        help="Sandboxes to create in advance, if the provider is slow.  [default: as many as -c, up to 32]",
    ),
    option(
        "--public-url",
        metavar="URL",
        env=True,
        help="URL at which agents on other machines reach the gateway, or ssh:USER@HOST.",
    ),
    option(
        "--gateway-listen",
        metavar="HOST:PORT",
        env=True,
        help="Address on which the gateway listens, for --public-url.",
    ),
    option(
        "--gateway",
        "gateway_url",
        metavar="URL",
        env=True,
        help="Use a gateway that is already running. Its admin key is read from ROOKERY_GATEWAY_KEY.",
    ),
    option("--allow", metavar="HOST", multiple=True, help="Host that sandboxes may reach. Repeatable."),
    option("--unsafe", is_flag=True, env=True, help=UNSAFE),
    option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=load_config_file,
        env=True,
        help="TOML file with a [run] table.  [default: rookery.toml, if it exists]",
    ),
    METRICS,
    TRACES,
    TRACE_CONTENT,
    LOG_FORMAT,
    PRICES,
    option(
        "--cache",
        metavar="DIR",
        envvar="ROOKERY_REPLY_CACHE",  # ROOKERY_CACHE is the directory of tokenizers
        help="Directory of a cache of model replies, which repeated evaluations share. Not for training.",
    ),
    option("--json", is_flag=True, help="Write events to stdout as JSON lines."),
    option("--dry-run", is_flag=True, help="Show what would run and the origin of each value; start nothing."),
)


def run_options(command: F) -> F:
    """Decorator that adds all options of `rookery run`, in the order of the help text."""
    for add_option in reversed(_OPTIONS):
        command = add_option(command)
    return command


def _parse_numbers(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, float]:  # noqa: ARG001
    """Return the dictionary that `NAME=X` texts describe. They may be separated by commas."""
    found: dict[str, float] = {}
    for pair in (pair for text in pairs for pair in str(text).split(",")):
        name, _, text = (part.strip() for part in pair.rpartition("="))
        try:
            found[name] = float(text)
        except ValueError:
            name = ""
        if not name:
            raise UsageError(f"{param.opts[0]} {pair!r:.80} is not NAME=NUMBER; write for example words=0.25")
    return found


def train_options(command: F) -> F:
    """Decorator that adds the options of `rookery run`, and one option for each setting of `TrainConfig`."""
    from rookery.trainer.config import TrainConfig, field_types

    defaults = TrainConfig(steps=1)
    for name, kind in reversed(field_types().items()):
        default = None if name == "steps" else getattr(defaults, name)
        command = _train_option(name, kind, default)(command)
    return run_options(command)


def _train_option(name: str, kind: Any, default: Any) -> Callable[[F], F]:
    """Return the option for a field of `TrainConfig` with this annotated type."""
    from msgspec import inspect

    info = inspect.type_info(kind)
    about = ""
    while isinstance(info, inspect.Metadata):
        about = about or (info.extra_json_schema or {}).get("description", "")
        info = info.type
    if isinstance(info, inspect.UnionType):  # an optional value
        info = next(one for one in info.types if not isinstance(one, inspect.NoneType))
    flag = f"--{name.replace('_', '-')}"
    settings: dict[str, Any] = {"envvar": f"ROOKERY_TRAIN_{name.upper()}", "default": default, "help": about}
    if isinstance(info, inspect.BoolType):
        return option(f"{flag}/--no-{flag[2:]}", **settings)
    if isinstance(info, inspect.VarTupleType):
        if isinstance(info.item_type, inspect.LiteralType):
            return option(flag, **settings, multiple=True, type=click.Choice(info.item_type.values))
        return option(flag, **settings, multiple=True, metavar="URL")
    if isinstance(info, inspect.DictType):
        return option(flag, **settings | {"default": ()}, multiple=True, metavar=NUMBERS, callback=_parse_numbers)
    if isinstance(info, inspect.LiteralType):
        settings["type"] = click.Choice(info.values)
    elif isinstance(info, inspect.IntType | inspect.FloatType):
        low, high = info.ge if info.ge is not None else info.gt, info.le
        number = int if isinstance(info, inspect.IntType) else float
        settings |= {"metavar": "N" if number is int else "X"}
        settings["type"] = Number(number, low or 0, inf if high is None else high, above=info.gt is not None)
    return option(flag, **settings)
