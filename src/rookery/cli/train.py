"""`rookery train`: train a policy on an environment.

Guarantees:
- problems with the settings, the policy, the environment or the tasks are reported before the first rollout, with
  exit code 2;
- an error during training keeps the last checkpoint, says how to continue, and exits with 4;
- with `--json`, the last line of stdout is an object with `eval_before`, `eval_after`, `steps` and `seconds`.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.config import build_engine_config, get_table
from rookery.cli.errors import Exit, describe_error, print_error
from rookery.cli.options import parse_variables, train_options
from rookery.cli.plugins import CommandWithPlugins
from rookery.core import RookeryError, UsageError
from rookery.trainer.config import TrainConfig

if TYPE_CHECKING:
    from types import FrameType

    from rookery.cli.progress import JsonLines
    from rookery.engine import EngineConfig
    from rookery.environments import Environment
    from rookery.trainer import Trainer, TrainResult

_HELP = """Train a policy on ENV, and evaluate it on held-out tasks.

ENV names an environment or a mixture file, as for `rookery run`. The policy is `embedded`, `embedded:PATH`, or
`hf:PATH` for a causal language model of transformers. With --push and --server, vLLM or SGLang servers sample from
that model.

The options of `rookery run` apply and come from the [run] table of rookery.toml; those of training come from the
[train] table. The run is a directory with metrics.jsonl, checkpoints and the rollouts. --resume continues it.
"""


class TrainCommand(CommandWithPlugins):
    """The command `train`. The options that are settings of `TrainConfig` come from the `[train]` table."""

    train_options = frozenset(TrainConfig.__struct_fields__)


@click.command(cls=TrainCommand, help=_HELP, short_help="Train a policy on an environment.")
@train_options
@click.option("--resume", metavar="RUN", help="Continue a training run: its directory, its name or `latest`.")
@click.option("--plot", is_flag=True, help="Draw the learning curve at the end (learning.png, learning.svg).")
@click.pass_context
def train(ctx: click.Context, /, **values: Any) -> int:
    from rookery.cli.progress import JsonLines

    events = JsonLines() if values["json"] else None
    try:
        values["variables"] = parse_variables(values["variable"], get_table(ctx, "variables"))
        values["policy"] = values["policy"] or ("embedded",)
        if _rank_source(ctx, "per_task") < _rank_source(ctx, "group_size"):
            values["group_size"] = values["per_task"]
        if len(values["policy"]) > 1:
            raise UsageError("one policy is trained: pass --policy once")
        if values["dry_run"]:
            return _dry_run(ctx, values, events)
        if values["plot"]:
            from rookery.trainer.plot import import_pyplot

            import_pyplot()
        trainer = _resume(ctx, values) if values["resume"] else _start(ctx, values)
        return _train(trainer, events, plot=values["plot"])
    except RookeryError as error:
        if events is not None:
            events.write("error", detail=str(error), exit_code=2)
        raise


def _rank_source(ctx: click.Context, name: str) -> int:
    """Return how explicitly an option is set: 0 on the command line, up to 3 for the default."""
    from click.core import ParameterSource as Source

    order = (Source.COMMANDLINE, Source.ENVIRONMENT, Source.DEFAULT_MAP)
    source = ctx.get_parameter_source(name)
    return order.index(source) if source in order else len(order)


def _select_settings(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in TrainConfig.__struct_fields__}


def _dry_run(ctx: click.Context, values: dict[str, Any], events: "JsonLines | None") -> int:
    """Show the settings of a new training run, and the problems that would prevent its start."""
    from rookery.cli.dry_run import dry_run
    from rookery.trainer.setup import check_config, check_engine, check_quotas, choose_learning_rate

    if values["resume"]:
        raise UsageError("--dry-run shows a new run: leave out --resume")
    config, policy = TrainConfig(**_select_settings(values)), values["policy"][0]

    def check(environment: "Environment", engine: "EngineConfig") -> None:
        check_config(config, policy)
        check_engine(environment, engine, engine.upstreams["policy"].sampling)
        check_quotas(environment, config)

    shown = _select_settings(values) | {"learning_rate": choose_learning_rate(config, policy)}
    return dry_run(ctx, values | shown | {"per_task": config.group_size}, events, list(shown), check)


def _start(ctx: click.Context, values: dict[str, Any]) -> "Trainer":
    import msgspec

    from rookery.cli.run import select_tasks
    from rookery.environments import load_environment
    from rookery.trainer import Trainer
    from rookery.upstreams import absolute_address

    config = TrainConfig(**_select_settings(values))
    engine = build_engine_config(ctx, values | {"policy": ()})
    stream = {**engine.stream, "variables": values["variables"]}
    tasks = None
    if values["tasks"] or values["num_tasks"]:
        tasks = select_tasks(load_environment(engine.environment, **engine.arguments), values)
        if values["tasks"]:  # `--resume` reads them again, perhaps from another working directory
            stream["tasks"] = tasks.source
    if values["task_data"] and Path(values["task_data"]).exists():
        stream["task_data"] = str(Path(values["task_data"]).absolute())
    engine = msgspec.structs.replace(engine, stream=stream)
    return Trainer(
        engine.environment,
        policy=absolute_address(values["policy"][0]),
        config=config,
        tasks=tasks,
        out=values["out"],
        engine=engine,
    )


def _resume(ctx: click.Context, values: dict[str, Any]) -> "Trainer":
    """Open a training run with its settings. Training options on the command line replace stored ones.

    Raise `UsageError` for other options on the command line, which would have no effect.
    """
    from rookery.cli.run import select_tasks
    from rookery.environments import load_environment
    from rookery.trainer import find_training_run, read_settings, resume_training

    given = {param.name: param for param in ctx.command.params if param.name and not _rank_source(ctx, param.name)}
    settings = _select_settings(values)
    for name, param in given.items():
        if name not in (*settings, "per_task", "resume", "config", "out", "json", "plot"):
            raise UsageError(
                "--resume continues a run with its own environment and settings, and only training options can be "
                f"changed: leave out {'ENV' if name == 'env' else param.opts[-1]}"
            )
    folder = find_training_run(values["resume"], Path(values["out"]))
    if {*(ctx.default_map or {})} - {"out"}:
        text = f"the settings in {values['config']} are ignored: --resume uses those that are stored in the run"
        click.echo(click.style("warning: ", fg="yellow") + text, err=True)
    changes = {name: value for name, value in settings.items() if name in given}
    if "per_task" in given:
        changes["group_size"] = settings["group_size"]
    engine = read_settings(folder).engine
    stream = {"tasks": "", "num_tasks": None, "task_data": None, "variables": {}} | engine.get("stream", {})
    tasks = None
    if stream["tasks"] or stream["num_tasks"]:
        tasks = list(select_tasks(load_environment(engine["environment"], **engine.get("arguments", {})), stream))
    return resume_training(folder, tasks=tasks, **changes)


def _train(trainer: "Trainer", events: "JsonLines | None", *, plot: bool) -> int:
    from rookery.cli.train_progress import open_train_progress

    progress = open_train_progress(events, trainer)
    trainer.on_row = progress.row
    trainer.on_start = lambda: progress.started(trainer.engine.metrics_url)
    result: TrainResult | None = None
    interrupted: list[int] = []
    with _signals(interrupted):
        try:
            result = trainer.train()
            code = int(Exit.OK)
        except KeyboardInterrupt:
            code = 128 + (interrupted[0] if interrupted else signal.SIGINT)
        except RookeryError as error:
            code = int(Exit.STOPPED)
            print_error(describe_error(error))
        finally:
            progress.close()
    if plot and trainer.folder.has_metrics:
        from rookery.trainer.plot import plot_learning

        plot_learning([trainer.folder.path], trainer.folder.path / "learning")
    progress.finished(result, trainer, code)
    return code


@contextmanager
def _signals(received: list[int]) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, and store the number of the signal in `received`."""

    def interrupt(number: int, _: "FrameType | None") -> None:
        received.append(number)
        raise KeyboardInterrupt

    kinds = [
        one
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(one) is not signal.SIG_IGN
    ]
    before = {kind: signal.signal(kind, interrupt) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
