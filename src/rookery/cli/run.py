"""`rookery run`: run an environment over tasks.

Guarantees:
- problems with the environment, tasks, policy, sandbox or output directory are reported before the first rollout,
  in one sentence and with exit code 2;
- if a row is not a valid task, its rollouts fail and the other tasks run; the exit code is 3;
- all tasks are in the journal before the first one runs, so `resume` knows those that did not start.
"""

import os
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.config import get_table
from rookery.cli.options import parse_columns, parse_variables, run_options
from rookery.cli.plugins import CommandWithPlugins
from rookery.core import RookeryError, Taskset, UsageError
from rookery.core.child_processes import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from rookery.cli.foreground_run import ForegroundRun
    from rookery.cli.progress import JsonLines, ProgressDisplay
    from rookery.engine import Engine
    from rookery.environments import Environment

_HELP = """Run ENV over tasks, -k times each, and record every rollout in a journal.

ENV is an installed environment, `module:attr`, `file.py` (`file.py:attr` if the file defines several), or an
environment of another system (`verifiers:NAME`). A mixture file, `file.toml`, names several environments that run
together.

Most options can also be set by an environment variable (ROOKERY_POLICY, ROOKERY_CONCURRENCY, …) or in the [run]
table of rookery.toml. The command line overrides variables, which override the file; see --dry-run.
"""


@click.command(cls=CommandWithPlugins, help=_HELP, short_help="Run an environment over tasks.")
@run_options
@click.pass_context
def run(ctx: click.Context, /, **values: Any) -> int:
    from rookery.cli.progress import json_events

    with json_events(values["json"]) as events:  # before the import of the environment, which may print
        values["variables"] = parse_variables(values["variable"], get_table(ctx, "variables"))
        if values["dry_run"]:
            from rookery.cli.dry_run import dry_run

            return dry_run(ctx, values, events)
        return _run(ctx, values, events)


def _run(ctx: click.Context, values: dict[str, Any], events: "JsonLines | None") -> int:
    from rookery.cli.config import build_engine_config
    from rookery.cli.foreground_run import report_run
    from rookery.cli.progress import open_progress
    from rookery.engine import Engine

    config = build_engine_config(ctx, values)
    pin_blas_threads(config.runners)
    engine = Engine(config.environment, config=config, out=values["out"])
    tasks = select_tasks(engine.environment, values)
    engine.on_preparation = _preparation_reporter(events)
    return report_run(run_tasks(engine, tasks, values["per_task"], open_progress(events)), events)


def pin_blas_threads(runners: int) -> None:
    """Set environment variables so that this process and its runner processes use one BLAS thread each.

    Does nothing if `runners` is 0. It must be called before numpy is imported.
    """
    if runners:
        os.environ.update(one_blas_thread(os.environ))


def _preparation_reporter(events: "JsonLines | None") -> "Callable[[str], None]":
    """Return a callback that shows messages about what the environment prepares before the first rollout."""

    def report(text: str) -> None:
        if events is not None:
            events.write("agent", detail=text)
        else:
            click.echo(text, err=True)

    return report


def run_tasks(engine: "Engine", tasks: Taskset, k: int, progress: "ProgressDisplay") -> "ForegroundRun":
    """Run these tasks with `k` rollouts each, and return when the run has ended."""
    from rookery.cli.foreground_run import ForegroundRun
    from rookery.cli.progress import RunStart

    def about(engine: "Engine") -> RunStart:
        assert engine.folder is not None
        return RunStart(
            run=engine.folder,
            environment=engine.environment.title,
            model=engine.config.upstreams["policy"].model,
            tasks=len(tasks),
            invalid=sum(bool(task.invalid) for task in tasks),
            k=k,
            concurrency=engine.config.concurrency,
            runners=engine.config.runners,
        )

    run = ForegroundRun(engine, progress, tasks=tasks, k=k, about=about)
    run.run()
    return run


def select_tasks(environment: "Environment", values: dict[str, Any]) -> Taskset:
    """Return the tasks of --tasks or, without this option, those of the environment. -n limits their number."""
    from rookery.core.errors import describe
    from rookery.tasks import load_tasks, tasks_from

    task_data, variables = values.get("task_data"), values.get("variables")
    if values["tasks"]:
        return load_tasks(
            values["tasks"],
            limit=values["num_tasks"],
            own_limits=environment.own_limits,
            task_data=task_data,
            variables=variables,
            row_format=values.get("row_format") or "",
            columns=parse_columns(values.get("columns", ())),
        )
    names = ("task_data", "variables", "row_format", "columns")
    if given := next((name for name in names if values.get(name)), None):
        what = "--variable" if given == "variables" else f"--{given.replace('_', '-')}"
        raise UsageError(f"{what} needs --tasks: add --tasks SRC")
    try:
        own = environment.tasks()
        return tasks_from(own, environment.title, limit=values["num_tasks"], own_limits=environment.own_limits)
    except RookeryError:
        raise
    except Exception as error:  # user code can raise anything
        raise UsageError(f"the tasks of {environment.title} could not be created: {describe(error)}") from error
