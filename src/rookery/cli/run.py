"""`rookery run`: an environment over tasks.

Promises:
- every problem with the environment, the tasks, the policy, the sandbox or the output folder is found before the
  first rollout is admitted, said in one sentence, exit code 2;
- a row that is no valid task is quarantined and the others run, exit code 3;
- all tasks are in the journal before the first one runs, so that a resume knows those not begun.
"""

import os
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.config import part
from rookery.cli.options import run_options, task_variables
from rookery.core import RookeryError, Taskset, UsageError
from rookery.core.blas_threads import one_blas_thread

if TYPE_CHECKING:
    from rookery.cli.drive import Drive
    from rookery.cli.progress import JsonLines, Progress
    from rookery.engine import Engine
    from rookery.environments import Environment

_HELP = """Runs ENV over tasks, -k times each, and journals every rollout.

ENV is the name of an installed environment, `module:attr`, or `file.py` (`file.py:attr` where it holds several).

Each option can also stand in an environment variable (ROOKERY_POLICY, ROOKERY_CONCURRENCY, …) or in the [run]
table of rookery.toml; the command line goes over the variable, that over the file. --dry-run shows which one won.
"""


@click.command(help=_HELP, short_help="Run an environment over tasks.")
@run_options
@click.pass_context
def run(ctx: click.Context, /, **values: Any) -> int:
    from rookery.cli.progress import JsonLines

    events = JsonLines() if values["json"] else None  # first: the environment's import may print
    try:
        values["variables"] = task_variables(values["variable"], part(ctx, "variables"))
        if values["dry_run"]:
            from rookery.cli.dry_run import dry_run

            return dry_run(ctx, values, events)
        return _run(ctx, values, events)
    except RookeryError as error:
        if events is not None:
            events.write("error", detail=str(error), exit_code=2)
        raise


def _run(ctx: click.Context, values: dict[str, Any], events: "JsonLines | None") -> int:
    from rookery.cli.config import engine_config
    from rookery.cli.drive import finish
    from rookery.cli.progress import open_progress
    from rookery.engine import Engine

    config = engine_config(ctx, values)
    pin_blas_threads(config.runners)
    engine = Engine(config.environment, config=config, out=values["out"])
    tasks = chosen_tasks(engine.environment, values)
    _ready(engine, events)
    return finish(driven(engine, tasks, values["per_task"], open_progress(events)), events)


def pin_blas_threads(runners: int) -> None:
    """Give this process one BLAS thread if it has runner processes beside it. Call before numpy is imported."""
    if runners:
        os.environ.update(one_blas_thread(os.environ))


def _ready(engine: "Engine", events: "JsonLines | None") -> None:
    """An agent that is not there yet is installed before the run's clock starts, for boxes without an image."""
    from rookery.environments.agent import AgentEnvironment

    env = engine.environment
    if not isinstance(env, AgentEnvironment) or engine.sandbox.image is not None:
        return
    import asyncio

    def say(text: str) -> None:
        if events is not None:
            events.write("agent", detail=text)
        else:
            click.echo(text, err=True)

    engine.check_sandbox()
    asyncio.run(env.ready(say))


def driven(engine: "Engine", tasks: Taskset, k: int, progress: "Progress") -> "Drive":
    """A new run of these tasks, to its end."""
    from rookery.cli.drive import Drive
    from rookery.cli.progress import Start

    def about(engine: "Engine") -> Start:
        assert engine.folder is not None
        return Start(
            run=engine.folder,
            environment=engine.environment.title,
            model=engine.config.upstreams["policy"].model,
            tasks=len(tasks),
            invalid=sum(bool(task.invalid) for task in tasks),
            k=k,
            concurrency=engine.config.concurrency,
            runners=engine.config.runners,
        )

    drive = Drive(engine, progress, tasks=tasks, k=k, about=about)
    drive.run()
    return drive


def chosen_tasks(environment: "Environment", values: dict[str, Any]) -> Taskset:
    """The tasks of the file, or the environment's own; the first -n of them."""
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
        )
    if task_data or variables:
        what = "--task-data" if task_data else "--variable"
        raise UsageError(f"{what} says something about the tasks of --tasks, and there is no --tasks")
    try:
        own = environment.tasks()
        return tasks_from(own, environment.title, limit=values["num_tasks"], own_limits=environment.own_limits)
    except RookeryError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise UsageError(f"the tasks of {environment.title} cannot be made: {describe(error)}") from error
