"""`rookery run --dry-run`: show what would run and where each setting comes from.

Guarantees:
- it starts no runner, opens no connection and creates no run directory; it may create one sandbox, to check that
  this machine can, and removes it at once;
- problems that would prevent the start are printed last, with exit code 2;
- API keys are not shown, only the names of the variables that hold them.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rookery.cli.config import build_engine_config, describe_key_source, describe_origin, get_table
from rookery.cli.errors import Exit, print_error
from rookery.cli.run import select_tasks
from rookery.cli.terminal import bold, dim, escape_controls, format_table, one_line, plural
from rookery.core import DEFAULT_LIMITS, SandboxSpec, Taskset, UsageError

if TYPE_CHECKING:
    from rookery.cli.progress import JsonLines
    from rookery.engine import EngineConfig
    from rookery.environments import Environment

MAX_INVALID = 5
SHOWN_IF_SET = frozenset(
    (
        "task-data",
        "tool-parser",
        "replica-concurrency",
        "wait-for-upstream",
        "cluster",
        "shared-files",
        "public-url",
        "gateway-listen",
    )
)


class Setting(msgspec.Struct, frozen=True):
    """A setting of the run, its value, where the value comes from, and a note."""

    name: str
    value: Any
    origin: str
    note: str = ""


def dry_run(
    ctx: click.Context,
    values: dict[str, Any],
    events: "JsonLines | None",
    more: Sequence[str] = (),
    check: "Callable[[Environment, EngineConfig], None] | None" = None,
) -> int:
    """Show the settings of the run and of the options `more`; return the exit code.

    `check` raises `UsageError` for a further problem that would prevent the start.
    """
    from rookery.environments import load_environment

    config = build_engine_config(ctx, values)
    environment = load_environment(config.environment, **config.arguments)
    tasks = select_tasks(environment, values)
    rows = _collect_settings(ctx, values, config, environment)
    if "group_size" in more:  # it replaces the rollouts per task
        rows = [row for row in rows if row.name != "per-task"]
    rows += [Setting(name.replace("_", "-"), values[name], describe_origin(ctx, name)) for name in more]
    problems = _find_problems(config, values["out"])
    try:
        if check is not None:
            check(environment, config)
    except UsageError as error:
        problems.append(str(error))
    code = Exit.USAGE if problems else Exit.OK
    if events is not None:
        events.write(
            "dry-run",
            values=[msgspec.to_builtins(row) for row in rows],
            environment=environment.title,
            tools=[msgspec.to_builtins(tool) for tool in environment.tools()],
            tasks=len(tasks),
            invalid=[task.invalid for task in tasks if task.invalid],
            rollouts=len(tasks) * values["per_task"],
            problems=problems,
            exit_code=int(code),
        )
    else:
        _print(rows, environment, tasks, values["per_task"])
    for problem in problems:
        print_error(f"the run would not start: {problem}")
    return code


def _find_problems(config: "EngineConfig", out: str) -> list[str]:
    """Return messages about all problems that can be found without starting a run or opening a connection."""
    from rookery.engine import Engine
    from rookery.upstreams import open_upstream

    found = []
    for upstream in config.upstreams.values():
        try:
            if upstream.urls:
                open_upstream(upstream)
        except UsageError as error:
            found.append(str(error))
    if not _is_writable(Path(out)):
        found.append(f"cannot write into {out}: choose another directory with -o")
    try:
        Engine(config.environment, config=config, out=out).check_sandbox()
    except UsageError as error:
        found.append(str(error))
    return found


def _is_writable(folder: Path) -> bool:
    """Return True if files can be created in the directory, or if the directory itself can be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _collect_settings(
    ctx: click.Context, values: dict[str, Any], config: "EngineConfig", environment: "Environment"
) -> list[Setting]:
    from rookery.engine.config import DEFAULT_WARM
    from rookery.upstreams import kind_of, own_rendering
    from rookery.upstreams.urls import redact

    policy = config.upstreams["policy"]
    rendering = own_rendering(policy) | config.rendering

    def setting(name: str, value: Any, note: str = "", *, option: str = "") -> Setting:
        return Setting(name, value, describe_origin(ctx, option or name.replace("-", "_")), note)

    rows = [
        setting("environment", values["env"], config.environment, option="env"),
        setting("tasks", values["tasks"] or "the environment's own"),
        setting("task-data", values["task_data"]),
        *(
            Setting(f"variable.{name}", text, _find_variable_origin(ctx, name, values))
            for name, text in values["variables"].items()
        ),
        setting("policy", [redact(url) for url in policy.urls] or None),
        _kind_setting(ctx, kind_of(policy)),
        setting("record", config.record or config.recording),
        setting("tokenizer", rendering.get("tokenizer")),
        setting("renderer", rendering.get("name", "auto") if config.recording == "tokens" else None),
        setting("tool-parser", config.tool_parser),
        setting("top-logprobs", config.top_logprobs or None),
        setting("replica-concurrency", config.replica_concurrency),
        setting("metrics", config.metrics),
        setting("traces", config.traces),
        setting("log-format", config.log_format),
        setting("wait-for-upstream", config.wait_for_upstream),
        setting("model", policy.model or "the server's only one"),
        Setting("key", describe_key_source(policy.key_env), "environment"),
        setting("num-tasks", values["num_tasks"] or "all"),
        setting("per-task", values["per_task"]),
        setting("concurrency", config.concurrency),
        setting("runners", config.runners, "the number of cores" if values["runners"] is None else ""),
        setting("cluster", config.cluster),
        setting("shared-files", config.shared_files),
        setting("warm", f"{DEFAULT_WARM} at most" if config.warm is None else config.warm),
        setting("public-url", config.public),
        setting("gateway-listen", config.gateway_listen),
        setting("gateway", config.gateway_url),
        setting("out", values["out"]),
        setting("seed", config.root_seed),
        setting("attempts", config.retry.attempts),
        setting("breaker", "off" if config.breaker is None else config.breaker),
    ]
    rows = [row for row in rows if row.value or row.name not in SHOWN_IF_SET]
    rows += _sandbox_settings(ctx, config, environment)
    rows += _argument_settings(ctx, values, config)
    rows += _sampling_settings(ctx, config, environment)
    rows += _limit_settings(ctx, config, environment)
    for role, upstream in config.upstreams.items():
        if role != "policy":
            urls = [redact(url) for url in upstream.urls]
            rows.append(
                Setting(
                    f"roles.{role}",
                    urls,
                    _config_name(ctx),
                    f"{upstream.model}, key {describe_key_source(upstream.key_env)}",
                )
            )
    return rows


def _kind_setting(ctx: click.Context, kind: str) -> Setting:
    origin = describe_origin(ctx, "upstream_kind")
    if ctx.params["upstream_kind"] != kind and ctx.params["policy"] and kind != "auto":
        origin = describe_origin(ctx, "policy")
    return Setting("upstream-kind", kind, origin)


def _sandbox_settings(ctx: click.Context, config: "EngineConfig", environment: "Environment") -> list[Setting]:
    """Return the settings of the sandbox of an attempt whose task names no image."""
    from rookery.sandboxes import is_isolated, resolve_spec

    spec, problem = resolve_spec(config.sandbox.over(environment.sandbox, config.explicit_sandbox_fields))
    if problem:
        isolation = "no provider isolates on this machine: see `rookery doctor`, or run unisolated with --unsafe"
    else:
        isolation = "isolated" if is_isolated(spec.provider) else "not isolated: programs run as your user"
    rows = [
        Setting("sandbox", spec.provider or None, _find_sandbox_origin(ctx, "provider", environment), isolation)
    ]
    for name, value in msgspec.to_builtins(spec).items():
        where = _find_sandbox_origin(ctx, name, environment)
        if name != "provider" and where != "default":
            rows.append(Setting(f"sandbox.{name}", value, where))
    if "network" not in {row.name.removeprefix("sandbox.") for row in rows}:
        rows.append(Setting("sandbox.network", spec.network, _find_sandbox_origin(ctx, "network", environment)))
    return rows


def _find_sandbox_origin(ctx: click.Context, field: str, environment: "Environment") -> str:
    """Return where the value of a field of the sandbox spec comes from."""
    option = {"provider": "sandbox", "untrusted_ok": "unsafe"}.get(field, field)
    if ctx.params.get(option):
        return describe_origin(ctx, option)
    if field == "network" and ctx.params["allow"]:
        return describe_origin(ctx, "allow")
    if field in get_table(ctx, "sandbox"):
        return _config_name(ctx)
    own = environment.sandbox
    if own is not None and getattr(own, field) != getattr(SandboxSpec(), field):
        return "environment's code"
    return "default"


def _find_variable_origin(ctx: click.Context, name: str, values: dict[str, Any]) -> str:
    from_options = {pair.partition("=")[0] for pair in values["variable"]}
    return "command line" if name in from_options else _config_name(ctx)


def _config_name(ctx: click.Context) -> str:
    return str(ctx.meta.get("rookery.toml", "rookery.toml"))


def _argument_settings(ctx: click.Context, values: dict[str, Any], config: "EngineConfig") -> list[Setting]:
    origins = {pair.partition("=")[0].strip().replace("-", "_"): "command line" for pair in values["arg"]}
    from rookery.environments.mixture import MIXTURE

    origins |= {name: describe_origin(ctx, name) for name in ("tools", "tool_config", "launcher") if values[name]}
    if config.environment == MIXTURE:
        return [
            Setting(
                f"environments.{one.get('name') or one['environment']}",
                {key: value for key, value in one.items() if key != "name"},
                values["env"],
            )
            for one in config.arguments["environments"]
        ]
    return [
        Setting(f"arg.{name}", value, origins.get(name, _config_name(ctx)))
        for name, value in config.arguments.items()
    ]


def _sampling_settings(ctx: click.Context, config: "EngineConfig", environment: "Environment") -> list[Setting]:
    rows = []
    for name, value in msgspec.to_builtins(config.sampling.over(environment.sampling)).items():
        where = "environment's code"
        if name in ctx.params and ctx.params[name] is not None:
            where = describe_origin(ctx, name)
        elif name in get_table(ctx, "sampling"):
            where = _config_name(ctx)
        rows.append(Setting(name.replace("_", "-"), value, where))
    return rows


def _limit_settings(ctx: click.Context, config: "EngineConfig", environment: "Environment") -> list[Setting]:
    """Return the limits that apply to every rollout. A task can replace limits that the run does not set."""
    rows = []
    limits = config.limits.over(environment.limits.over(DEFAULT_LIMITS))
    for name, value in msgspec.to_builtins(limits).items():
        where = "default"
        option = name if name == "test_timeout" else f"limit_{name}"
        if ctx.params.get(option) is not None:
            where = describe_origin(ctx, option)
        elif name in get_table(ctx, "limits"):
            where = _config_name(ctx)
        elif getattr(environment.limits, name) is not None:
            where = "environment's code"
        rows.append(Setting(f"limits.{name}", value, where))
    return rows


def _print(rows: list[Setting], environment: "Environment", tasks: Taskset, k: int) -> None:
    cells = [
        [
            row.name,
            bold(_format_value(row.value)),
            row.origin if row.origin != "default" else dim(row.origin),
            dim(one_line(row.note, 100)),
        ]
        for row in rows
    ]
    invalid = [task for task in tasks if task.invalid]
    about = f", {len(invalid):,} of them not valid" if invalid else ""
    times = f", {k} rollouts each: {plural(len(tasks) * k, 'rollout')}" if k > 1 else ""
    lines = [*format_table(cells), "", f"{plural(len(tasks), 'task')}{about}{times}"]
    lines += [click.style(f"  {one_line(task.invalid, 200)}", fg="yellow") for task in invalid[:MAX_INVALID]]
    if len(invalid) > MAX_INVALID:
        lines.append(dim(f"  and {plural(len(invalid) - MAX_INVALID, 'more row')}"))
    tools = environment.tools()
    lines.append(plural(len(tools), "tool") if tools else "no tools")
    for tool in tools:
        lines.append(f"  {bold(escape_controls(tool.name))}  {one_line(tool.description, 100)}")
        lines.append(dim(f"    {one_line(msgspec.json.encode(tool.parameters).decode(), 2_000)}"))
    click.echo("\n".join([*lines, "", "dry run: nothing was started"]))


def _format_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return one_line(value, 80)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return one_line(" ".join(value), 120)
    return one_line(msgspec.json.encode(value).decode(), 80)
