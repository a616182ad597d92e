"""Read the settings of a run from the command line, environment variables, a TOML file and defaults.

The command line wins over environment variables, these over the file, and the file over defaults.

Guarantees:
- an unknown key or an invalid value is an error that names the file and the key;
- the origin of every setting can be shown (`describe_origin`);
- an API key is never shown, only the name of the environment variable that holds it.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rookery.core import Limits, Sampling, SandboxSpec, UsageError
from rookery.core.errors import suggestion

if TYPE_CHECKING:
    from click.core import ParameterSource

    from rookery.core.prices import Price
    from rookery.engine import EngineConfig
    from rookery.upstreams import UpstreamConfig

CONFIG_FILE: Final = "rookery.toml"
DEFAULT_RUNS_FOLDER: Final = "runs"
_TABLES_KEY: Final = "rookery.tables"
_SOURCE_KEY: Final = "rookery.toml"
_ALIASES: Final = {"n": "num_tasks", "k": "per_task", "c": "concurrency", "environment": "env"}
_NOT_IN_FILE: Final = frozenset(
    {"config", "json", "dry_run", "arg", "scorer_arg", "role", "role_model", "variable", "help"}
)
_TABLE_NAMES: Final = (
    "arguments",
    "limits",
    "sampling",
    "sandbox",
    "roles",
    "prices",
    "scorer",
    "tool_config",
    "mcp",
    "variables",
)


# ---- the file


def read_table(path: Path, name: str) -> dict[str, Any]:
    """Return the table `name` (`run` or `train`) of a TOML file, or `{}` if the file does not have it.

    Raise `UsageError` if the file cannot be read or has other tables.
    """
    import tomllib

    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        raise UsageError(f"the configuration file {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration file {path} is not TOML: {error}") from None
    strange = sorted(set(found) - {"run", "train"})
    if strange:
        raise UsageError(f"{path}: unknown top-level keys {', '.join(strange)}: move them into [run]")
    table = found.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {name} must be a table, [{name}]")
    return table


def load_config_file(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
    """Callback of the option `--config`: make the settings in the file the defaults of the other options.

    Without the option, `rookery.toml` in the working directory is read if it exists.
    """
    path = Path(value) if value is not None else Path(CONFIG_FILE)
    if value is None and not path.is_file():
        return None
    table = read_table(path, "run")
    if "tool-config" in table:
        table["tool_config"] = table.pop("tool-config")
    ctx.meta[_SOURCE_KEY] = path.name if value is None else str(path)
    # `sandbox = "local"` is the option, `[run.sandbox]` the table of all that a sandbox is; likewise others.
    tables = [
        part
        for part in _TABLE_NAMES
        if part in table and not (part in ("prices", "sandbox", "scorer") and isinstance(table[part], str))
    ]
    ctx.meta[_TABLES_KEY] = {part: table.pop(part) for part in tables}
    train: frozenset[str] = getattr(ctx.command, "train_options", frozenset())
    options = {param.name: param for param in ctx.command.params if param.name and param.name not in _NOT_IN_FILE}
    defaults = _parse_defaults(
        ctx, table, path, "run", {name: one for name, one in options.items() if name not in train}
    )
    if train:
        more = {name: one for name, one in options.items() if name in train}
        defaults |= _parse_defaults(ctx, read_table(path, "train"), path, "train", more)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return str(path)


NUMBERS: Final = "NAME=X"
"""Placeholder in the help of options whose value is a dictionary of numbers, a table in `rookery.toml`."""


def _parse_defaults(
    ctx: click.Context, table: dict[str, Any], path: Path, title: str, params: "dict[str, click.Parameter]"
) -> dict[str, Any]:
    """Return the defaults of the options `params` that a table of the file sets. `title` is the table's name."""
    known = [*params, *(_TABLE_NAMES if title == "run" else ())]
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = _ALIASES.get(key, key.replace("-", "_")) if title == "run" else key.replace("-", "_")
        param = params.get(name)
        if param is None:
            raise UsageError(f"{path}: [{title}] has no key {key!r}{_suggest_key(key, known)}")
        many = bool(getattr(param, "multiple", False))
        if isinstance(value, dict) and getattr(param, "metavar", None) == NUMBERS:
            value = [f"{one}={number}" for one, number in value.items()]  # noqa: PLW2901
        default = [value] if many and not isinstance(value, list) else value
        flag = bool(getattr(param, "is_flag", False))
        if isinstance(value, dict) or isinstance(value, bool) != flag or (isinstance(value, list) and not many):
            raise UsageError(f"{path}: [{title}] {key} cannot be {value!r:.60}")
        try:
            param.type_cast_value(ctx, default)
        except click.BadParameter as error:
            raise UsageError(f"{path}: [{title}] {key} is invalid: {error.message.rstrip('.')}") from None
        found[name] = default
    return found


def _suggest_key(key: str, names: list[str]) -> str:
    return suggestion(key, names) or f"; its keys are {', '.join(sorted(names))}"


def find_runs_folder(option: str | None) -> Path:
    """Return the directory that contains the runs.

    It is `option` (the command line or ROOKERY_OUT) if it is set, else `out` in rookery.toml, else `runs`.
    """
    if option is not None:
        return Path(option)
    if Path(CONFIG_FILE).is_file():
        out = read_table(Path(CONFIG_FILE), "run").get("out")
        if isinstance(out, str):
            return Path(out)
    return Path(DEFAULT_RUNS_FOLDER)


runs_option = click.option(
    "--runs",
    "root",
    metavar="DIR",
    envvar="ROOKERY_OUT",
    help="Directory of runs.  [default: runs]",
)


# ---- values


def describe_origin(ctx: click.Context, name: str) -> str:
    """Return where the value of a parameter comes from: the command line, a variable, a file or the default."""
    from click.core import ParameterSource as Source

    source: ParameterSource | None = ctx.get_parameter_source(name)
    if source is Source.COMMANDLINE:
        return "command line"
    if source is Source.ENVIRONMENT:
        param = next(param for param in ctx.command.params if param.name == name)
        return f"${param.envvar}"
    if source is Source.DEFAULT_MAP:
        return str(ctx.meta.get(_SOURCE_KEY, CONFIG_FILE))
    return "default"


def get_table(ctx: click.Context, name: str) -> dict[str, Any]:
    """Return a table below `[run]` in the configuration file, such as `[run.limits]`, or `{}` if it is missing."""
    found = ctx.meta.get(_TABLES_KEY, {}).get(name, {})
    if not isinstance(found, dict):
        raise UsageError(f"{ctx.meta[_SOURCE_KEY]}: [run] {name} must be a table, [run.{name}]")
    return found


_SIZE_KEYS: Final = {"sandbox": ("memory", "disk", "output")}
"""The keys of each table whose value is a size in bytes: a number (also `256e6`) or a string such as "1G"."""


def _convert_table(ctx: click.Context, name: str, kind: Any) -> Any:
    import msgspec

    table = dict(get_table(ctx, name))
    for key in table:
        if key not in kind.__struct_fields__:
            hint = _suggest_key(key, list(kind.__struct_fields__))
            raise UsageError(f"{ctx.meta[_SOURCE_KEY]}: [run.{name}] has no key {key!r}{hint}")
    for key in _SIZE_KEYS.get(name, ()):
        if isinstance(table.get(key), str | float):
            table[key] = _parse_size(table[key], f"{ctx.meta[_SOURCE_KEY]}: [run.{name}] {key}")
    try:
        return msgspec.convert(table, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{ctx.meta[_SOURCE_KEY]}: [run.{name}] {error}") from None


def _parse_size(text: str | float, where: str) -> int:
    from rookery.cli.options import Size

    try:
        return Size().convert(text, None, None)
    except click.BadParameter as error:
        raise UsageError(f"{where}: {error.message.rstrip('.')}") from None


def parse_arguments(ctx: click.Context, options: tuple[str, ...]) -> dict[str, Any]:
    """Return the environment's keyword arguments: those in `[run.arguments]`, overridden by `--arg KEY=VALUE`.

    A value that is not JSON is taken as text.
    """
    return {**get_table(ctx, "arguments"), **parse_pairs("--arg", options, "max_turns=8")}


def parse_scorer(ctx: click.Context, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the table of the scorer, with its name and arguments, or None if the run does not set one.

    It comes from `--scorer`, `--scorer-arg` and `[run.scorer]`.
    """
    found = {
        **get_table(ctx, "scorer"),
        **parse_pairs("--scorer-arg", values["scorer_arg"], "tolerance=0.01"),
    }
    if values["scorer"]:
        found["name"] = values["scorer"]
    if found and "name" not in found:
        raise UsageError("the arguments of a scorer need its name: add --scorer NAME")
    return found or None


def parse_pairs(option: str, pairs: tuple[str, ...], example: str) -> dict[str, Any]:
    """Return the `KEY=VALUE` texts of an option as a dictionary. A value that is not JSON is taken as text."""
    import msgspec

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(f"{option} {pair!r:.80} is not KEY=VALUE; write for example {option} {example}")
        try:
            found[key] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            found[key] = text
    return found


def parse_tool_arguments(ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the environment's keyword arguments `tools`, `tool_config`, `mcp` and `scorer`, as far as they are
    set.

    They come from `--tools`, `--tool-config`, `--scorer` and their tables in the configuration file.
    """
    found: dict[str, Any] = {}
    names = [name.strip() for option in values["tools"] for name in option.split(",")]
    if names:
        found["tools"] = names
    table = _merge_tool_config(get_table(ctx, "tool_config"), values["tool_config"])
    if table:
        found["tool_config"] = table
    servers = ctx.meta.get(_TABLES_KEY, {}).get("mcp")
    if servers is not None:
        if not isinstance(servers, list):
            raise UsageError(f"{ctx.meta[_SOURCE_KEY]}: [run] mcp must be a list of tables, [[run.mcp]]")
        found["mcp"] = servers
    if (scorer := parse_scorer(ctx, values)) is not None:
        found["scorer"] = scorer
    return found


def _merge_tool_config(below: dict[str, Any], options: tuple[str, ...]) -> dict[str, Any]:
    import tomllib

    import msgspec

    made = {name: dict(value) if isinstance(value, dict) else value for name, value in below.items()}
    for pair in options:
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
        # Split at the last dot: the name of a tool may contain dots.
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
                raise UsageError(f"--tool-config {pair!r:.80}: {name} is not a table")
            table[field] = value
    return made


def _add_launcher(found: dict[str, Any], launcher: str | None) -> dict[str, Any]:
    """Add the launcher to the arguments. Paths are made absolute, so that `resume` works from any directory."""
    if launcher is not None:
        found["launcher"] = launcher
    for name in ("launcher", "script"):
        value = found.get(name)
        if isinstance(value, str) and value.endswith((".toml", ".py")):
            found[name] = str(Path(value).expanduser().absolute())
    return found


def make_absolute(spec: str) -> str:
    """Make the path in an environment reference absolute, so that `resume` works from any directory."""
    head, _, attr = spec.rpartition(":")
    path, name = (spec, "") if spec.endswith(".py") else (head, attr)
    if not path.endswith(".py"):
        return spec
    try:
        resolved = str(Path(path).expanduser().resolve())
    except (RuntimeError, OSError, ValueError) as error:
        raise UsageError(f"the environment file {path} cannot be found: {error}") from None
    return f"{resolved}:{name}" if name else resolved


def read_prices(path: str) -> "dict[str, Price]":
    """Read a TOML file with the prices of models: a table with `prompt` and `sampled` per model name."""
    import tomllib

    try:
        table = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the price table {path} cannot be read: {error}") from None
    return _convert_prices(table, path)


def _convert_prices(table: Any, where: str) -> "dict[str, Price]":
    import msgspec

    from rookery.core.prices import Price

    try:
        return msgspec.convert(table, dict[str, Price])
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(
            f'{where}: {error}; write a table per model, such as ["my-model"] with prompt = 0.5 and sampled = 1.5'
        ) from None


def add_roles(
    found: "dict[str, UpstreamConfig]", urls: tuple[str, ...], models: tuple[str, ...]
) -> "dict[str, UpstreamConfig]":
    """Return the upstreams of model roles with the changes of `--role NAME=URL` and `--role-model NAME=MODEL`."""
    import msgspec

    from rookery.upstreams import UpstreamConfig, absolute_address

    changed = dict(found)
    for option, pairs in (("--role", urls), ("--role-model", models)):
        for pair in pairs:
            role, equals, value = pair.partition("=")
            if not equals or not role.isidentifier() or not value:
                raise UsageError(f"{option} {pair!r:.80} is not NAME=VALUE; write for example --role judge=URL")
            if role == "policy":
                raise UsageError(f"{option} is for other roles than the policy: use --policy and --model")
            config = changed.get(role, UpstreamConfig())
            if option == "--role":
                changed[role] = msgspec.structs.replace(config, kind="auto", urls=(absolute_address(value),))
            else:
                changed[role] = msgspec.structs.replace(config, model=value)
    return changed


def _build_roles(ctx: click.Context) -> "dict[str, UpstreamConfig]":
    import msgspec

    from rookery.upstreams import UpstreamConfig, absolute_address

    found: dict[str, UpstreamConfig] = {}
    for role, table in get_table(ctx, "roles").items():
        where = f"{ctx.meta[_SOURCE_KEY]}: [run.roles.{role}]"
        if not isinstance(table, dict):
            raise UsageError(f"{where} must be a table with url and model")
        plain = dict(table)
        if "url" in plain:
            plain["urls"] = [absolute_address(str(plain.pop("url")))]
        strange = sorted(set(plain) - set(UpstreamConfig.__struct_fields__))
        if strange or role == "policy":
            problem = "is not allowed: set `policy` in [run]" if role == "policy" else f"has no key {strange[0]!r}"
            raise UsageError(f"{where} {problem}")
        try:
            found[role] = msgspec.convert(plain, UpstreamConfig)
        except msgspec.ValidationError as error:
            raise UsageError(f"{where} {error}") from None
    return found


def build_sandbox_spec(ctx: click.Context, values: dict[str, Any]) -> tuple[SandboxSpec, tuple[str, ...]]:
    """Return the requested sandbox spec and the names of its fields that were set explicitly.

    Options of the command line override `[run.sandbox]`.
    """
    import msgspec

    options: dict[str, Any] = {
        "provider": values["sandbox"],
        "image": values["image"],
        "network": values["network"],
    }
    if values["allow"]:
        options |= {"allow": values["allow"], "network": values["network"] or "allow"}
    options = {name: value for name, value in options.items() if value is not None}
    spec: SandboxSpec = _convert_table(ctx, "sandbox", SandboxSpec)
    named = tuple(sorted({*get_table(ctx, "sandbox"), *options}))
    return msgspec.structs.replace(spec, **options, untrusted_ok=spec.untrusted_ok or values["unsafe"]), named


_RENDERING: Final = {"tokenizer": "tokenizer", "name": "renderer", "tool_prompt": "tool_prompt"}


def build_engine_config(ctx: click.Context, values: dict[str, Any]) -> "EngineConfig":
    """Return the configuration of a run for the option values. Raise `UsageError` if one of them is invalid."""
    import msgspec

    from rookery.engine import EngineConfig, RetryPolicy
    from rookery.environments.mixture import MIXTURE, is_mixture_file, read_mixture
    from rookery.upstreams import UpstreamConfig, absolute_address

    if not values["env"]:
        raise UsageError(
            f"name an environment: rookery {ctx.command.name} ENV, with ENV a name, module:attr or file.py"
        )
    limits: Limits = _convert_table(ctx, "limits", Limits)
    limits = Limits(
        turns=values["limit_turns"], tokens=values["limit_tokens"], test_timeout=values["test_timeout"]
    ).over(limits)
    sampling: Sampling = Sampling(
        temperature=values["temperature"], top_p=values["top_p"], max_tokens=values["max_tokens"]
    ).over(_convert_table(ctx, "sampling", Sampling))
    policy = UpstreamConfig(urls=tuple(map(absolute_address, values["policy"])), model=values["model"] or "")
    if values["upstream_kind"]:
        policy = msgspec.structs.replace(policy, kind=values["upstream_kind"])
    rendering = {name: values[option] for name, option in _RENDERING.items() if values[option]}
    env = make_absolute(values["env"])
    arguments = {**parse_arguments(ctx, values["arg"]), **parse_tool_arguments(ctx, values)}
    if is_mixture_file(env):
        if arguments or values["launcher"] or values["tasks"] or values["num_tasks"]:
            raise UsageError(
                f"{env} sets the tasks and arguments of each environment: remove --tasks, --num-tasks, --arg, "
                "--tools, --tool-config, --scorer and --launcher"
            )
        env, arguments = MIXTURE, read_mixture(env) | {"seed": values["seed"] or 0}
    stream: dict[str, Any] = {"k": values["per_task"], "tasks": values["tasks"] or ""}
    if values.get("num_tasks"):
        stream["num_tasks"] = values["num_tasks"]
    for name in ("task_data", "row_format", "columns"):
        if values.get(name):
            stream[name] = values[name]
    if ":" in env and ".py" not in env:
        stream["path"] = str(Path.cwd())  # `resume` must find the module too
    sandbox, named = build_sandbox_spec(ctx, values)
    names = (
        "cache",
        "cluster",
        "gateway_listen",
        "gateway_url",
        "log_format",
        "longest_first",
        "metrics",
        "pass_key",
        "replica_concurrency",
        "runners",
        "shared_files",
        "tool_parser",
        "top_logprobs",
        "traces",
        "trace_content",
        "wait_for_upstream",
        "warm",
    )
    chosen = {name: values[name] for name in names if values[name] not in (None, "")}
    if values["cache"]:
        chosen["cache"] = str(Path(values["cache"]).expanduser().absolute())
    if values["prices"]:
        chosen["prices"] = read_prices(values["prices"])
    elif table := get_table(ctx, "prices"):
        chosen["prices"] = _convert_prices(table, f"{ctx.meta[_SOURCE_KEY]}: [run.prices]")
    return EngineConfig(
        environment=env,
        arguments=_add_launcher(arguments, values["launcher"]),
        upstreams={"policy": policy, **add_roles(_build_roles(ctx), values["role"], values["role_model"])},
        sandbox=sandbox,
        explicit_sandbox_fields=named,
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
        public=values["public_url"] or "",
        **chosen,
    )


def describe_key_source(key_env: str = "ROOKERY_API_KEY") -> str:
    """Return which environment variable holds the API key, as `from $NAME`, or `none`. Never return the key."""
    for name in (key_env, "OPENAI_API_KEY"):
        if os.environ.get(name):
            return f"from ${name}"
    return "none"
