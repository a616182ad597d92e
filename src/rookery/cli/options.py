"""The options of `rookery run`: each with its environment variable and its place in `rookery.toml`."""

import re
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import click

from rookery.cli.config import RUNS, from_file
from rookery.core import UsageError

F = TypeVar("F", bound=Callable[..., Any])
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)

if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic only in newer clicks


class Number(_Type):
    """A number within bounds; click's own ranges write their bounds into every line of the help."""

    def __init__(
        self, kind: type[int] | type[float], low: float, high: float = inf, *, above: bool = False
    ) -> None:
        self.kind = kind
        self.low = low
        self.high = high
        self.above = above
        """Whether `low` itself is too low."""
        self.name = "integer" if kind is int else "number"

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
            self.fail(f"it must be {low}{f' and at most {self.high:g}' if self.high < inf else ''}", param, ctx)
        return number


class Rate(_Type):
    """A rate above 0 and at most 1, or `off`."""

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
    """Bytes: a number, with K, M, G or T for powers of 1024."""

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
            self.fail(f"it must be at least {shown_size(self.low)} and less than 1048576T", param, ctx)
        return size


def shown_size(size: int) -> str:
    """As one would write it: the largest unit that it is a whole number of."""
    for unit, shift in (("T", 40), ("G", 30), ("M", 20), ("K", 10)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def task_variables(given: Iterable[str], below: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What `--variable NAME=VALUE` says, over a file's `[run.variables]`; a value is a text."""
    found: dict[str, str] = {}
    for name, value in (below or {}).items():
        if not _NAME.fullmatch(name) or isinstance(value, dict | list):
            raise UsageError(f'[run.variables] {name!r:.80} must be a name with a text, such as PORT = "8080"')
        found[name] = str(value).lower() if isinstance(value, bool) else str(value)
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not _NAME.fullmatch(name):
            shown = f" {name!r:.80}" if equals else ""  # without a name it is all value, and maybe a key
            raise UsageError(f"--variable{shown} is not NAME=VALUE; write for example --variable PORT=8080")
        found[name] = value
    return found


NETWORKS: Final = ("none", "model", "allow", "all")
UNSAFE: Final = "Where nothing isolates here, run programs without isolation: as you, on your files and network."


def _option(*names: str, env: str = "", **settings: Any) -> Callable[[F], F]:
    if env:
        settings |= {"envvar": f"ROOKERY_{env}"}
    return click.option(*names, **settings)


_TASK_DATA: Final = "Where the folders lie that rows of tasks name by their task_id.  [default: beside the rows]"
_VARIABLE: Final = "What ${NAME} means in tasks; repeat it. It is journaled: no secrets."


def source_options(command: F) -> F:
    """Those that belong to a source of tasks, for commands that read one and have no file of values."""
    for option in (
        click.option("--variable", metavar="NAME=VALUE", multiple=True, help=_VARIABLE),
        click.option("--task-data", metavar="SRC", envvar="ROOKERY_TASK_DATA", help=_TASK_DATA),
    ):
        command = option(command)
    return command


TOOL_PROMPT: Final = (
    "For chat templates without tools: a text that describes them, with {tools} in it; or `default`."
)
ALLOW_NO_TOOLS: Final = "Go on without tools where the chat template has no place for them."

_OPTIONS = (
    click.argument("env", metavar="ENV", required=False, envvar="ROOKERY_ENV"),
    _option(
        "--tasks",
        metavar="SRC",
        env="TASKS",
        help="A file of tasks (.jsonl, .json), task folders, an archive of them, or hf:….  [default: its own]",
    ),
    _option("--task-data", metavar="SRC", env="TASK_DATA", help=_TASK_DATA),
    _option("--variable", metavar="NAME=VALUE", multiple=True, help=_VARIABLE),
    _option(
        "--policy",
        metavar="URL",
        multiple=True,
        env="POLICY",
        help="The model server; repeat for its replicas. Or `embedded`, the small policy that comes along.",
    ),
    _option(
        "--upstream-kind",
        type=click.Choice(("vllm", "sglang", "openai", "embedded")),
        env="UPSTREAM_KIND",
        help="What the model servers are.  [default: openai, or what the address says]",
    ),
    _option("--model", metavar="M", env="MODEL", help="The model's name.  [default: the server's only one]"),
    _option(
        "--record",
        type=click.Choice(("tokens", "messages", "plain")),
        env="RECORD",
        help="We render prompts and sample ids; the server renders and tells the ids; no ids.  "
        "[default: tokens with --tokenizer, messages else]",
    ),
    _option(
        "--tokenizer", metavar="PATH", env="TOKENIZER", help="The policy's tokenizer, a folder or a hub name."
    ),
    _option("--renderer", metavar="NAME", env="RENDERER", help="Its chat format, such as qwen3.  [default: auto]"),
    _option("--tool-prompt", metavar="FILE", env="TOOL_PROMPT", help=TOOL_PROMPT),
    _option("--allow-no-tools", is_flag=True, env="ALLOW_NO_TOOLS", help=ALLOW_NO_TOOLS),
    _option(
        "--tool-parser",
        metavar="NAME",
        env="TOOL_PARSER",
        help="With --tokenizer: how the model writes tool calls, where its chat format leaves that open.",
    ),
    _option(
        "--replica-concurrency",
        metavar="N",
        type=Number(int, 1),
        env="REPLICA_CONCURRENCY",
        help="Model calls under way at once at each replica of the policy.  [default: what it reports, or 256]",
    ),
    _option(
        "--wait-for-upstream",
        metavar="SECONDS",
        type=Number(float, 0),
        default=0.0,
        env="WAIT_FOR_UPSTREAM",
        help="Wait so long for a model server that is gone before the run stops.  [default: 0, no wait]",
    ),
    _option(
        "-n",
        "--num-tasks",
        metavar="TASKS",
        type=Number(int, 1),
        env="NUM_TASKS",
        help="Only the first so many tasks.",
    ),
    _option(
        "-k",
        "--per-task",
        metavar="PER_TASK",
        type=Number(int, 1),
        default=1,
        show_default=True,
        env="PER_TASK",
        help="Rollouts of each task: a group.",
    ),
    _option(
        "-c",
        "--concurrency",
        metavar="N",
        type=Number(int, 1),
        default=64,
        show_default=True,
        env="CONCURRENCY",
        help="Rollouts under way at once.",
    ),
    _option(
        "--runners",
        metavar="N",
        type=Number(int, 0),
        env="RUNNERS",
        help="Runner processes; 0 runs in this process.  [default: the number of cores]",
    ),
    _option(
        "-o",
        "--out",
        metavar="DIR",
        default=RUNS,
        show_default=True,
        env="OUT",
        help="Where the run's folder goes.",
    ),
    _option(
        "--seed",
        metavar="S",
        type=Number(int, -(2**63), 2**63 - 1),
        env="SEED",
        help="Root of all seeds; if given, also sent to model servers, as one for each call. [default: 0]",
    ),
    _option(
        "--launcher",
        metavar="NAME",
        env="LAUNCHER",
        help="For the environment agent: which agent, by name or as FILE.toml.",
    ),
    _option(
        "--arg", metavar="KEY=VALUE", multiple=True, help="An argument for the environment; VALUE is JSON or text."
    ),
    _option(
        "--tools",
        metavar="NAMES",
        multiple=True,
        env="TOOLS",
        help="The environment's tools: names, or functions as module:function, with commas.",
    ),
    _option(
        "--tool-config",
        metavar="KEY=VALUE",
        multiple=True,
        help="Of its tools: preset=…, bash.output=8192, …; or a TOML file. VALUE is JSON or text.",
    ),
    _option(
        "--limit-turns",
        metavar="N",
        type=Number(int, 1),
        env="LIMIT_TURNS",
        help="Model calls a rollout may make.",
    ),
    _option(
        "--limit-tokens",
        metavar="N",
        type=Number(int, 1),
        env="LIMIT_TOKENS",
        help="Tokens a rollout may sample.",
    ),
    _option(
        "--test-timeout",
        metavar="SECONDS",
        type=Number(float, 0, above=True),
        env="TEST_TIMEOUT",
        help="One run of a task's tests; wins over what tasks say.",
    ),
    _option(
        "--max-tokens",
        metavar="N",
        type=Number(int, 1),
        env="MAX_TOKENS",
        help="Tokens of one answer.",
    ),
    _option("--temperature", metavar="T", type=Number(float, 0), env="TEMPERATURE", help="Of the sampling."),
    _option(
        "--top-p",
        metavar="P",
        type=Number(float, 0, 1, above=True),
        env="TOP_P",
        help="Of the sampling.",
    ),
    _option(
        "--attempts",
        metavar="N",
        type=Number(int, 1),
        default=3,
        show_default=True,
        env="ATTEMPTS",
        help="Attempts at a rollout that infrastructure fails.",
    ),
    _option(
        "--breaker",
        metavar="RATE",
        type=Rate(),
        default="0.5",
        show_default=True,
        env="BREAKER",
        help="Stop when more attempts than this fail; off: never.",
    ),
    _option(
        "--sandbox",
        metavar="PROVIDER",
        env="SANDBOX",
        help="Where programs run; rookery doctor lists the providers.  [default: the best that isolates here]",
    ),
    _option(
        "--image", metavar="I", env="IMAGE", help="What a sandbox's files are made from.  [default: this system]"
    ),
    _option(
        "--network",
        metavar="N",
        type=click.Choice(NETWORKS),
        env="NETWORK",
        help="What a sandbox reaches: none, model, allow or all.  [default: the environment's, else none]",
    ),
    _option(
        "--warm",
        metavar="N",
        type=Number(int, 0),
        env="WARM",
        help="Sandboxes to make ahead of need where that takes long (docker).  [default: as many as -c, up to 32]",
    ),
    _option(
        "--public-url",
        metavar="URL",
        env="PUBLIC_URL",
        help="Where agents on other machines call models: a URL that leads here, or ssh:USER@HOST.",
    ),
    _option(
        "--gateway-listen",
        metavar="HOST:PORT",
        env="GATEWAY_LISTEN",
        help="Where the run's gateway listens, for a --public-url that leads to it.",
    ),
    _option("--allow", metavar="HOST", multiple=True, help="A host that a sandbox may reach; repeat it."),
    _option("--unsafe", is_flag=True, env="UNSAFE", help=UNSAFE),
    _option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=from_file,
        env="CONFIG",
        help="A TOML file with a [run] table.  [default: rookery.toml, if there is one]",
    ),
    click.option("--json", is_flag=True, help="Events as JSON, one a line, on stdout."),
    click.option(
        "--dry-run", is_flag=True, help="Show what would run, and where each value is from; start nothing."
    ),
)


def run_options(command: F) -> F:
    """Adds them all, in the order of the help."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
