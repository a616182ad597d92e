"""`rookery demo`: real rollouts here and now, offline, with nothing to set up.

Promises:
- it is a run like any other: the same engine, journal, progress, exit codes and way to go on after Ctrl-C;
- it says first what will run and in which sandbox; where nothing isolates here, it says that plainly;
- it ends with where the run lies and with commands that work when pasted.
"""

import os
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import click

from rookery.cli.options import Number
from rookery.core import JournalError, Rollout, RookeryError

if TYPE_CHECKING:
    from rookery.cli.progress import JsonLines
    from rookery.cli.summary import Summary
    from rookery.engine import EngineConfig
    from rookery.sandboxes import Best

ENVIRONMENT: Final = "arithmetic"
SPLIT: Final = "held-out"
POLICY: Final = "embedded"
TASKS: Final = 30
PER_TASK: Final = 4
MOST_TASKS: Final = 10_000
MOST_RUNNERS: Final = 4
"""Each runner costs a start of its own; a demo is over before more of them would pay."""

_HELP = """Runs real rollouts here and now: arithmetic problems, attempted with a python tool by the small policy
that comes along. It needs no network, no GPU and no key.
"""


@click.command(help=_HELP, short_help="Run real rollouts here and now, offline.")
@click.option(
    "-n",
    "--num-tasks",
    metavar="TASKS",
    type=Number(int, 1, MOST_TASKS),
    default=TASKS,
    show_default=True,
    help="How many tasks; their levels take turns.",
)
@click.option(
    "-k",
    "--per-task",
    metavar="PER_TASK",
    type=Number(int, 1),
    default=PER_TASK,
    show_default=True,
    help="Rollouts of each task: a group.",
)
@click.option(
    "-o", "--out", metavar="DIR", envvar="ROOKERY_OUT", help="Where the run's folder goes.  [default: runs]"
)
@click.option(
    "--seed",
    metavar="S",
    type=Number(int, -(2**63), 2**63 - 1),
    default=0,
    show_default=True,
    help="Root of all seeds.",
)
@click.option("--json", is_flag=True, help="Events as JSON, one a line, on stdout.")
def demo(num_tasks: int, per_task: int, out: str | None, seed: int, json: bool) -> int:
    from rookery.cli.progress import JsonLines

    events = JsonLines() if json else None
    try:
        return _demo({"num_tasks": num_tasks, "per_task": per_task, "out": out, "seed": seed}, events)
    except RookeryError as error:
        if events is not None:
            events.write("error", detail=str(error), exit_code=2)
        raise


def _demo(values: dict[str, Any], events: "JsonLines | None") -> int:
    if events is None:
        from rookery.cli.text import tell

        # Before the slow part: a first start compiles the imports below and probes the machine.
        tell("\n".join(_plan(values["num_tasks"], values["per_task"])))
    from rookery.cli.config import runs_folder
    from rookery.cli.drive import finish
    from rookery.cli.progress import open_progress
    from rookery.cli.run import chosen_tasks, driven, pin_blas_threads
    from rookery.engine import Engine
    from rookery.sandboxes import best_provider

    best = best_provider()
    if events is None:
        tell("\n".join(_sandbox(best)))
    else:
        events.write(
            "demo", policy=POLICY, tasks=ENVIRONMENT, split=SPLIT, sandbox=best.name, isolated=best.isolated
        )
    config = _config(best, values)
    pin_blas_threads(config.runners)
    engine = Engine(config.environment, config=config, out=runs_folder(values["out"]))
    tasks = chosen_tasks(engine.environment, {"tasks": None, "num_tasks": values["num_tasks"]})
    progress = open_progress(events, told=frozenset({"sandbox.not_isolated"}))
    return finish(driven(engine, tasks, values["per_task"], progress), events, ending=_after)


def _config(best: "Best", values: dict[str, Any]) -> "EngineConfig":
    from rookery.core import SandboxSpec
    from rookery.engine import EngineConfig
    from rookery.upstreams import UpstreamConfig

    return EngineConfig(
        environment=ENVIRONMENT,
        arguments={"split": SPLIT, "size": values["num_tasks"]},
        upstreams={"policy": UpstreamConfig(urls=(POLICY,))},
        # The user is told before anything starts, and the policy is the one that comes along.
        sandbox=SandboxSpec(provider=best.name, untrusted_ok=not best.isolated),
        runners=min(len(os.sched_getaffinity(0)), MOST_RUNNERS),
        seed=values["seed"],
        stream={"k": values["per_task"], "tasks": ""},
    )


def _plan(tasks: int, k: int) -> list[str]:
    """Describe the policy and the tasks."""
    from rookery.cli.text import bold, plural

    what = f"{plural(tasks, 'unseen arithmetic problem')} x {plural(k, 'rollout')}"
    return [
        f"{bold('policy')}   {POLICY}: a small model that comes along and runs on this CPU, offline",
        f"{bold('tasks')}    {what}, with a python tool",
    ]


def _sandbox(best: "Best") -> list[str]:
    """Describe where the policy's programs will run, and say what takes the next seconds."""
    from rookery.cli.text import bold, columns, line

    if best.isolated:
        lines = [f"{bold('sandbox')}  {best.name}: what the policy writes runs isolated from you"]
    else:
        plain = click.style("not isolated: the policy's programs run as you", fg="yellow")
        width = columns() - 9
        lines = [
            f"{bold('sandbox')}  {best.name}, {plain}",
            *(f"         {line(f'{name} cannot be used: {why}', width)}" for name, why in best.refused.items()),
        ]
    return [*lines, "", "loading the policy and starting the runner processes"]


# ---- what to try next


def _after(summary: "Summary") -> list[str]:
    from rookery.cli.summary import commands, next_lines
    from rookery.cli.text import program, quoted

    run, rookery = quoted(summary.path), program()
    if summary.left or not summary.stats.valid:
        return next_lines(summary)
    wrong, right = _worth_seeing(summary)
    rows = [(f"{rookery} show {run}", "every rollout, with its transcript, tokens and timings")]
    if wrong is not None:
        rows.append((f"{rookery} show {run} {wrong.id}", f"a wrong answer{_level(wrong)}"))
    if right is not None:
        rows.append((f"{rookery} show {run} {right.id}", f"a right answer{_level(right)}"))
    rows += [
        (f"{rookery} init mine", "an environment of your own, to begin with"),
        (f"{rookery} run mine/mine.py --policy {POLICY} -k 4", "and to run"),
        (
            f"{rookery} run {ENVIRONMENT} --policy http://localhost:8000/v1 -n {TASKS} -k 8",
            "such tasks with a model of your own, on any OpenAI-compatible server",
        ),
    ]
    failures = next_lines(summary)[:3] if summary.stats.failed else []
    return ["", f"the run lies in {run}", *failures, "", *commands(rows)]


def _worth_seeing(summary: "Summary") -> tuple[Rollout | None, Rollout | None]:
    """A wrong answer to what others of its group solved, and a right one of the hardest level there is."""
    from rookery.journal import RunReader

    wrong: tuple[tuple[bool, bool], Rollout] | None = None
    right: tuple[tuple[float, bool], Rollout] | None = None
    try:
        with RunReader(summary.path) as reader:
            for _, members in groupby(reader.each(), key=lambda record: record.group):
                group = [record for record in members if record.valid]
                solved = any(record.reward == 1.0 for record in group)
                for record in group:
                    tools = record.usage.tool_calls > 0
                    if record.reward == 1.0:
                        hard = (record.metrics.get("level", 0.0), tools)
                        right = max(right or (hard, record), (hard, record), key=lambda pair: pair[0])
                    elif record.reward == 0.0:
                        telling = (tools, solved)
                        wrong = max(wrong or (telling, record), (telling, record), key=lambda pair: pair[0])
    except JournalError:
        return None, None  # the table is out already; what to look at is only an offer
    return wrong and wrong[1], right and right[1]


def _level(record: Rollout) -> str:
    level = record.metrics.get("level")
    return f", level {level:g}" if level is not None else ""
