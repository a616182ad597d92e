"""Where a run's values come from: command line, environment variable, TOML, default, in this order.

Promises:
- a key that nobody knows, or a value that cannot be, is an error that names the file and the key;
- every value knows its origin;
- a key (secret) is no value of a run: only the name of the variable that holds it is ever shown.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rookery.core import Limits, Sampling, SandboxSpec, UsageError
from rookery.core.suggestions import suggestion

if TYPE_CHECKING:
    from click.core import ParameterSource

    from rookery.engine import EngineConfig
    from rookery.upstreams import UpstreamConfig

FILE: Final = "rookery.toml"
RUNS: Final = "runs"
_TABLES: Final = "rookery.tables"
_SOURCE: Final = "rookery.toml"
_ALIASES: Final = {"n": "num_tasks", "k": "per_task", "c": "concurrency", "environment": "env"}
_NOT_IN_FILE: Final = frozenset({"config", "json", "dry_run", "arg", "variable", "help"})
_PARTS: Final = ("arguments", "limits", "sampling", "sandbox", "roles", "tool_config", "mcp", "variables")


# ---- the file


def read_file(path: Path) -> dict[str, Any]:
    """A TOML file's `[run]` table; anything else in it is refused by name."""
    import tomllib

    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        raise UsageError(f"the configuration file {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    strange = sorted(set(found) - {"run"})
    if strange:
        raise UsageError(f"{path}: unknown at its top: {', '.join(strange)}; everything belongs into [run]")
    table = found.get("run", {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: run must be a table, [run]")
    return table


def from_file(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
    """Callback of the eager `--config`: what the file says becomes click's defaults."""
    path = Path(value) if value is not None else Path(FILE)
    if value is None and not path.is_file():
        return None
    table = read_file(path)
    if "tool-config" in table:
        table["tool_config"] = table.pop("tool-config")
    ctx.meta[_SOURCE] = path.name if value is None else str(path)
    # `sandbox = "local"` is the option, `[run.sandbox]` the table of all that a sandbox is.
    tables = [
        part for part in _PARTS if part in table and not (part == "sandbox" and isinstance(table[part], str))
    ]
    ctx.meta[_TABLES] = {part: table.pop(part) for part in tables}
    ctx.default_map = {**(ctx.default_map or {}), **_defaults(ctx, table, path)}
    return str(path)


def _defaults(ctx: click.Context, table: dict[str, Any], path: Path) -> dict[str, Any]:
    params = {param.name: param for param in ctx.command.params if param.name not in _NOT_IN_FILE}
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = _ALIASES.get(key, key.replace("-", "_"))
        param = params.get(name)
        if param is None:
            raise UsageError(f"{path}: [run] has no key {key!r}{_near(key, [*filter(None, params), *_PARTS])}")
        many = bool(getattr(param, "multiple", False))
        given = [value] if many and not isinstance(value, list) else value
        flag = bool(getattr(param, "is_flag", False))
        if isinstance(value, dict) or isinstance(value, bool) != flag or (isinstance(value, list) and not many):
            raise UsageError(f"{path}: [run] {key} cannot be {value!r:.60}")
        try:
            param.type_cast_value(ctx, given)
        except click.BadParameter as error:
            raise UsageError(f"{path}: [run] {key}: {error.message.rstrip('.')}") from None
        found[name] = given
    return found


def _near(key: str, names: list[str]) -> str:
    return suggestion(key, names) or f"; its keys are {', '.join(sorted(names))}"


def runs_folder(given: str | None) -> Path:
    """Where runs lie, for the commands that only look: option, ROOKERY_OUT (by click), file, default."""
    if given is not None:
        return Path(given)
    if Path(FILE).is_file():
        out = read_file(Path(FILE)).get("out")
        if isinstance(out, str):
            return Path(out)
    return Path(RUNS)


runs_option = click.option(
    "--runs",
    "root",
    metavar="DIR",
    envvar="ROOKERY_OUT",
    help="Where the runs lie.  [default: runs]",
)


# ---- values


def origin(ctx: click.Context, name: str) -> str:
    """Where a parameter's value came from, in words."""
    from click.core import ParameterSource as Source

    source: ParameterSource | None = ctx.get_parameter_source(name)
    if source is Source.COMMANDLINE:
        return "command line"
    if source is Source.ENVIRONMENT:
        param = next(param for param in ctx.command.params if param.name == name)
        return f"${param.envvar}"
    if source is Source.DEFAULT_MAP:
        return str(ctx.meta.get(_SOURCE, FILE))
    return "default"


def part(ctx: click.Context, name: str) -> dict[str, Any]:
    """A sub-table of the file, `[run.limits]` for example."""
    found = ctx.meta.get(_TABLES, {}).get(name, {})
    if not isinstance(found, dict):
        raise UsageError(f"{ctx.meta[_SOURCE]}: [run] {name} must be a table, [run.{name}]")
    return found


_SIZES: Final = {"sandbox": ("memory", "disk", "output")}
"""Keys of a table that hold bytes: a number (also `256e6`), or a text such as "1G"."""


def _struct(ctx: click.Context, name: str, kind: Any) -> Any:
    import msgspec

    table = dict(part(ctx, name))
    for key in table:
        if key not in kind.__struct_fields__:
            raise UsageError(
                f"{ctx.meta[_SOURCE]}: [run.{name}] has no key {key!r}{_near(key, list(kind.__struct_fields__))}"
            )
    for key in _SIZES.get(name, ()):
        if isinstance(table.get(key), str | float):
            table[key] = _size(table[key], f"{ctx.meta[_SOURCE]}: [run.{name}] {key}")
    try:
        return msgspec.convert(table, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{ctx.meta[_SOURCE]}: [run.{name}] {error}") from None


def _size(text: str | float, where: str) -> int:
    from rookery.cli.options import Size

    try:
        return Size().convert(text, None, None)
    except click.BadParameter as error:
        raise UsageError(f"{where}: {error.message.rstrip('.')}") from None


def arguments(ctx: click.Context, given: tuple[str, ...]) -> dict[str, Any]:
    """The environment's keyword arguments: `[run.arguments]` below `--arg KEY=VALUE`, VALUE as JSON or text."""
    import msgspec

    found = dict(part(ctx, "arguments"))
    for pair in given:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(f"--arg {pair!r:.80} is not KEY=VALUE; write for example --arg max_turns=8")
        try:
            found[key] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            found[key] = text
    return found


def tool_arguments(ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """What `--tools`, `--tool-config`, `[run.tool_config]` and `[[run.mcp]]` say, for the environment."""
    found: dict[str, Any] = {}
    names = [name.strip() for given in values["tools"] for name in given.split(",")]
    if names:
        found["tools"] = names
    table = _tool_table(part(ctx, "tool_config"), values["tool_config"])
    if table:
        found["tool_config"] = table
    servers = ctx.meta.get(_TABLES, {}).get("mcp")
    if servers is not None:
        if not isinstance(servers, list):
            raise UsageError(f"{ctx.meta[_SOURCE]}: [run] mcp must be a list of tables, [[run.mcp]]")
        found["mcp"] = servers
    return found


def _tool_table(below: dict[str, Any], given: tuple[str, ...]) -> dict[str, Any]:
    import tomllib

    import msgspec

    made = {name: dict(value) if isinstance(value, dict) else value for name, value in below.items()}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals:
            try:
                more = tomllib.loads(Path(pair).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"--tool-config {pair!r:.80} is neither KEY=VALUE nor a TOML file that can be read: {error}"
                ) from None
            for name, value in more.items():
                old = made.get(name)
                made[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
            continue
        # The last dot parts a tool from its field: a function's own name may hold some.
        name, _, field = key.strip().rpartition(".")
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            value = text
        if not name:
            made[field] = value
        else:
            table = made.setdefault(name, {})
            if not isinstance(table, dict):
                raise UsageError(f"--tool-config {pair!r:.80}: {name} is no table")
            table[field] = value
    return made


def _with_launcher(found: dict[str, Any], launcher: str | None) -> dict[str, Any]:
    """Files by their absolute paths, so that a resume finds them from anywhere."""
    if launcher is not None:
        found["launcher"] = launcher
    for name in ("launcher", "script"):
        value = found.get(name)
        if isinstance(value, str) and value.endswith((".toml", ".py")):
            found[name] = str(Path(value).expanduser().absolute())
    return found


def absolute(spec: str) -> str:
    """The environment's name with the path of a file made absolute, so that a resume finds it from anywhere."""
    head, _, attr = spec.rpartition(":")
    path, name = (spec, "") if spec.endswith(".py") else (head, attr)
    if not path.endswith(".py"):
        return spec
    try:
        resolved = str(Path(path).expanduser().resolve())
    except (RuntimeError, OSError, ValueError) as error:
        raise UsageError(f"the environment file {path} cannot be found: {error}") from None
    return f"{resolved}:{name}" if name else resolved


def _roles(ctx: click.Context) -> "dict[str, UpstreamConfig]":
    import msgspec

    from rookery.upstreams import UpstreamConfig, settled

    found: dict[str, UpstreamConfig] = {}
    for role, table in part(ctx, "roles").items():
        where = f"{ctx.meta[_SOURCE]}: [run.roles.{role}]"
        if not isinstance(table, dict):
            raise UsageError(f"{where} must be a table with url and model")
        plain = dict(table)
        if "url" in plain:
            plain["urls"] = [settled(str(plain.pop("url")))]
        strange = sorted(set(plain) - set(UpstreamConfig.__struct_fields__))
        if strange or role == "policy":
            said = "is given by `policy`, not here" if role == "policy" else f"has no key {strange[0]!r}"
            raise UsageError(f"{where} {said}")
        try:
            found[role] = msgspec.convert(plain, UpstreamConfig)
        except msgspec.ValidationError as error:
            raise UsageError(f"{where} {error}") from None
    return found


def sandbox_of(ctx: click.Context, values: dict[str, Any]) -> tuple[SandboxSpec, tuple[str, ...]]:
    """The sandbox that was asked for, options over `[run.sandbox]`; and which of its fields were said."""
    import msgspec

    given: dict[str, Any] = {"provider": values["sandbox"], "image": values["image"], "network": values["network"]}
    if values["allow"]:
        given |= {"allow": values["allow"], "network": values["network"] or "allow"}
    given = {name: value for name, value in given.items() if value is not None}
    spec: SandboxSpec = _struct(ctx, "sandbox", SandboxSpec)
    named = tuple(sorted({*part(ctx, "sandbox"), *given}))
    return msgspec.structs.replace(spec, **given, untrusted_ok=spec.untrusted_ok or values["unsafe"]), named


_RENDERING: Final = {"tokenizer": "tokenizer", "name": "renderer", "tool_prompt": "tool_prompt"}


def engine_config(ctx: click.Context, values: dict[str, Any]) -> "EngineConfig":
    """The run's configuration out of its parts; what cannot be is said before anything starts."""
    import msgspec

    from rookery.engine import EngineConfig, RetryPolicy
    from rookery.upstreams import UpstreamConfig, settled

    if not values["env"]:
        raise UsageError("name an environment: rookery run ENV, with ENV a name, module:attr or file.py")
    limits: Limits = _struct(ctx, "limits", Limits)
    limits = Limits(
        turns=values["limit_turns"], tokens=values["limit_tokens"], test_timeout=values["test_timeout"]
    ).over(limits)
    sampling: Sampling = Sampling(
        temperature=values["temperature"], top_p=values["top_p"], max_tokens=values["max_tokens"]
    ).over(_struct(ctx, "sampling", Sampling))
    policy = UpstreamConfig(urls=tuple(map(settled, values["policy"])), model=values["model"] or "")
    if values["upstream_kind"]:
        policy = msgspec.structs.replace(policy, kind=values["upstream_kind"])
    rendering = {name: values[option] for name, option in _RENDERING.items() if values[option]}
    env = absolute(values["env"])
    stream: dict[str, Any] = {"k": values["per_task"], "tasks": values["tasks"] or ""}
    if values.get("num_tasks"):
        stream["num_tasks"] = values["num_tasks"]
    if values.get("task_data"):
        stream["task_data"] = values["task_data"]
    if ":" in env and ".py" not in env:
        stream["path"] = str(Path.cwd())  # a module is found from here, and must be again by a resume
    sandbox, named = sandbox_of(ctx, values)
    chosen = {name: values[name] for name in ("runners", "warm") if values[name] is not None}
    if values["tool_parser"]:
        chosen["tool_parser"] = values["tool_parser"]
    if values["replica_concurrency"] is not None:
        chosen["replica_concurrency"] = values["replica_concurrency"]
    if values["wait_for_upstream"]:
        chosen["wait_for_upstream"] = values["wait_for_upstream"]
    if values["public_url"]:
        chosen["public"] = values["public_url"]
    if values["gateway_listen"]:
        chosen["gateway_listen"] = values["gateway_listen"]
    return EngineConfig(
        environment=env,
        arguments=_with_launcher(
            {**arguments(ctx, values["arg"]), **tool_arguments(ctx, values)}, values["launcher"]
        ),
        upstreams={"policy": policy, **_roles(ctx)},
        sandbox=sandbox,
        sandbox_named=named,
        limits=limits,
        sampling=sampling,
        concurrency=values["concurrency"],
        seed=values["seed"],
        retry=RetryPolicy(attempts=values["attempts"]),
        breaker=values["breaker"],
        stream=stream,
        record=values["record"],
        rendering=rendering,
        allow_no_tools=values["allow_no_tools"],
        **chosen,
    )


def key_origin(key_env: str = "ROOKERY_API_KEY") -> str:
    """The variable that holds the key, never the key."""
    for name in (key_env, "OPENAI_API_KEY"):
        if os.environ.get(name):
            return f"from ${name}"
    return "none"
