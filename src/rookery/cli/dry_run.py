"""`rookery run --dry-run`: what would run, and where each value is from.

Promises:
- it starts nothing of the run: no runner, no pool, no connection, no run folder; a sandbox at most to try whether
  this machine can make one, gone again at once;
- what would keep the run from starting is said, with exit code 2, after everything else was shown;
- no key is shown, only the name of the variable that holds it.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rookery.cli.config import engine_config, key_origin, origin, part
from rookery.cli.errors import Exit, say_error
from rookery.cli.run import chosen_tasks
from rookery.cli.text import bold, clean, dim, line, plural, table
from rookery.core import DEFAULT_LIMITS, SandboxSpec, Taskset, UsageError

if TYPE_CHECKING:
    from rookery.cli.progress import JsonLines
    from rookery.engine import EngineConfig
    from rookery.environments import Environment

MAX_INVALID = 5


class Value(msgspec.Struct, frozen=True):
    """One row: a setting, its value, where it is from."""

    name: str
    value: Any
    origin: str
    note: str = ""


def dry_run(ctx: click.Context, values: dict[str, Any], events: "JsonLines | None") -> int:
    from rookery.environments import load_environment

    config = engine_config(ctx, values)
    environment = load_environment(config.environment, **config.arguments)
    tasks = chosen_tasks(environment, values)
    rows = _values(ctx, values, config, environment)
    problems = _problems(config, values["out"])
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
        say_error(f"this would not start: {problem}")
    return code


def _problems(config: "EngineConfig", out: str) -> list[str]:
    """Everything that can be told to be wrong without starting or connecting to anything."""
    from rookery.engine import Engine
    from rookery.upstreams import open_upstream

    found = []
    for upstream in config.upstreams.values():
        try:
            if upstream.urls:
                open_upstream(upstream)
        except UsageError as error:
            found.append(str(error))
    if not _writable(Path(out)):
        found.append(f"nothing can be written into {out}; choose another folder with -o")
    try:
        Engine(config.environment, config=config, out=out).check_sandbox()
    except UsageError as error:
        found.append(str(error))
    return found


def _writable(folder: Path) -> bool:
    """Whether a folder could be made or written there, as far as asking tells."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _values(
    ctx: click.Context, values: dict[str, Any], config: "EngineConfig", environment: "Environment"
) -> list[Value]:
    from rookery.engine.config import WARM
    from rookery.upstreams import kind_of
    from rookery.upstreams.urls import redact

    policy = config.upstreams["policy"]
    said = origin(ctx, "runners")
    rows = [
        Value("environment", values["env"], origin(ctx, "env"), config.environment),
        Value("tasks", values["tasks"] or "the environment's own", origin(ctx, "tasks")),
        *([Value("task-data", values["task_data"], origin(ctx, "task_data"))] if values["task_data"] else []),
        *(Value(f"variable.{name}", text, _from(ctx, name, values)) for name, text in values["variables"].items()),
        Value("policy", [redact(url) for url in policy.urls] or None, origin(ctx, "policy")),
        _kind(ctx, kind_of(policy)),
        Value("record", config.recording, origin(ctx, "record")),
        Value("tokenizer", config.rendering.get("tokenizer"), origin(ctx, "tokenizer")),
        Value("renderer", _renderer(config, kind_of(policy)), origin(ctx, "renderer")),
        *([Value("tool-parser", config.tool_parser, origin(ctx, "tool_parser"))] if config.tool_parser else []),
        *(
            [Value("replica-concurrency", config.replica_concurrency, origin(ctx, "replica_concurrency"))]
            if config.replica_concurrency is not None
            else []
        ),
        *(
            [Value("wait-for-upstream", config.wait_for_upstream, origin(ctx, "wait_for_upstream"))]
            if config.wait_for_upstream
            else []
        ),
        Value("model", policy.model or "the server's only one", origin(ctx, "model")),
        Value("key", key_origin(policy.key_env), "environment"),
        Value("num-tasks", values["num_tasks"] or "all", origin(ctx, "num_tasks")),
        Value("per-task", values["per_task"], origin(ctx, "per_task")),
        Value("concurrency", config.concurrency, origin(ctx, "concurrency")),
        Value("runners", config.runners, said, "the number of cores" if said == "default" else ""),
        Value("warm", f"{WARM} at most" if config.warm is None else config.warm, origin(ctx, "warm")),
        *([Value("public-url", config.public, origin(ctx, "public_url"))] if config.public else []),
        *(
            [Value("gateway-listen", config.gateway_listen, origin(ctx, "gateway_listen"))]
            if config.gateway_listen
            else []
        ),
        Value("out", values["out"], origin(ctx, "out")),
        Value("seed", config.root_seed, origin(ctx, "seed")),
        Value("attempts", config.retry.attempts, origin(ctx, "attempts")),
        Value("breaker", "off" if config.breaker is None else config.breaker, origin(ctx, "breaker")),
    ]
    rows += _sandbox(ctx, config, environment)
    rows += _arguments(ctx, values, config)
    rows += _sampling(ctx, config, environment)
    rows += _limits(ctx, config, environment)
    for role, upstream in config.upstreams.items():
        if role != "policy":
            urls = [redact(url) for url in upstream.urls]
            rows.append(
                Value(f"roles.{role}", urls, _file(ctx), f"{upstream.model}, key {key_origin(upstream.key_env)}")
            )
    return rows


def _kind(ctx: click.Context, kind: str) -> Value:
    said = origin(ctx, "upstream_kind")
    if ctx.params["upstream_kind"] != kind and ctx.params["policy"] and kind != "openai":
        said = origin(ctx, "policy")
    return Value("upstream-kind", kind, said)


def _renderer(config: "EngineConfig", kind: str) -> str | None:
    if config.recording != "tokens":
        return None
    return str(config.rendering.get("name") or ("embedded" if kind == "embedded" else "auto"))


def _sandbox(ctx: click.Context, config: "EngineConfig", environment: "Environment") -> list[Value]:
    """As an attempt gets it, unless its task names an image."""
    from rookery.sandboxes import is_isolated, settle

    spec, unsettled = settle(config.sandbox.over(environment.sandbox, config.sandbox_named))
    if unsettled:
        walls = "nothing isolates here: sandboxes are refused; see `rookery doctor`, or consent with --unsafe"
    else:
        walls = "isolated" if is_isolated(spec.provider) else "not isolated: programs run as you"
    rows = [Value("sandbox", spec.provider or None, _said(ctx, "provider", environment), walls)]
    for name, value in msgspec.to_builtins(spec).items():
        where = _said(ctx, name, environment)
        if name != "provider" and where != "default":
            rows.append(Value(f"sandbox.{name}", value, where))
    if "network" not in {row.name.removeprefix("sandbox.") for row in rows}:
        rows.append(Value("sandbox.network", spec.network, _said(ctx, "network", environment)))
    return rows


def _said(ctx: click.Context, field: str, environment: "Environment") -> str:
    """Where a field of the sandbox is from."""
    option = {"provider": "sandbox", "untrusted_ok": "unsafe"}.get(field, field)
    if ctx.params.get(option):
        return origin(ctx, option)
    if field == "network" and ctx.params["allow"]:
        return origin(ctx, "allow")
    if field in part(ctx, "sandbox"):
        return _file(ctx)
    own = environment.sandbox
    if own is not None and getattr(own, field) != getattr(SandboxSpec(), field):
        return "environment's code"
    return "default"


def _from(ctx: click.Context, name: str, values: dict[str, Any]) -> str:
    given = {pair.partition("=")[0] for pair in values["variable"]}
    return "command line" if name in given else _file(ctx)


def _file(ctx: click.Context) -> str:
    return str(ctx.meta.get("rookery.toml", "rookery.toml"))


def _arguments(ctx: click.Context, values: dict[str, Any], config: "EngineConfig") -> list[Value]:
    given = {pair.partition("=")[0].strip().replace("-", "_"): "command line" for pair in values["arg"]}
    given |= {name: origin(ctx, name) for name in ("tools", "tool_config", "launcher") if values[name]}
    return [Value(f"arg.{name}", value, given.get(name, _file(ctx))) for name, value in config.arguments.items()]


def _sampling(ctx: click.Context, config: "EngineConfig", environment: "Environment") -> list[Value]:
    rows = []
    for name, value in msgspec.to_builtins(config.sampling.over(environment.sampling)).items():
        where = "environment's code"
        if name in ctx.params and ctx.params[name] is not None:
            where = origin(ctx, name)
        elif name in part(ctx, "sampling"):
            where = _file(ctx)
        rows.append(Value(name.replace("_", "-"), value, where))
    return rows


def _limits(ctx: click.Context, config: "EngineConfig", environment: "Environment") -> list[Value]:
    """List the limits of every rollout. A task's own limits replace those that the run does not say."""
    rows = []
    limits = config.limits.over(environment.limits.over(DEFAULT_LIMITS))
    for name, value in msgspec.to_builtins(limits).items():
        where = "default"
        option = name if name == "test_timeout" else f"limit_{name}"
        if ctx.params.get(option) is not None:
            where = origin(ctx, option)
        elif name in part(ctx, "limits"):
            where = _file(ctx)
        elif getattr(environment.limits, name) is not None:
            where = "environment's code"
        rows.append(Value(f"limits.{name}", value, where))
    return rows


def _print(rows: list[Value], environment: "Environment", tasks: Taskset, k: int) -> None:
    cells = [
        [
            row.name,
            bold(_shown(row.value)),
            row.origin if row.origin != "default" else dim(row.origin),
            dim(line(row.note, 100)),
        ]
        for row in rows
    ]
    invalid = [task for task in tasks if task.invalid]
    about = f", {len(invalid):,} of them not valid" if invalid else ""
    times = f", {k} rollouts each: {plural(len(tasks) * k, 'rollout')}" if k > 1 else ""
    lines = [*table(cells), "", f"{plural(len(tasks), 'task')}{about}{times}"]
    lines += [click.style(f"  {line(task.invalid, 200)}", fg="yellow") for task in invalid[:MAX_INVALID]]
    if len(invalid) > MAX_INVALID:
        lines.append(dim(f"  and {plural(len(invalid) - MAX_INVALID, 'more row')}"))
    tools = environment.tools()
    lines.append(plural(len(tools), "tool") if tools else "no tools")
    for tool in tools:
        lines.append(f"  {bold(clean(tool.name))}  {line(tool.description, 100)}")
        lines.append(dim(f"    {line(msgspec.json.encode(tool.parameters).decode(), 2_000)}"))
    click.echo("\n".join([*lines, "", "dry run: nothing was started"]))


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return line(value, 80)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return line(" ".join(value), 120)
    return line(msgspec.json.encode(value).decode(), 80)
