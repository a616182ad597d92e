"""`rookery demo`: run rollouts with the embedded policy (a small built-in model), offline and without setup.

Guarantees:
- it is an ordinary run: the same engine, journal, progress, exit codes and `resume` after Ctrl-C;
- it first prints what will run and in which sandbox, and warns if no sandbox provider of this machine isolates;
- it ends with the directory of the run and with commands to try next.
"""

import os
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import click

from rookery.cli.options import Number, option
from rookery.core import JournalError, Rollout

if TYPE_CHECKING:
    from rookery.cli.progress import JsonLines
    from rookery.engine import EngineConfig
    from rookery.sandboxes import ProviderChoice
    from rookery.view.summary import Summary

ENVIRONMENT: Final = "arithmetic"
SPLIT: Final = "held-out"
POLICY: Final = "embedded"
TASKS: Final = 30
PER_TASK: Final = 4
MAX_TASKS: Final = 10_000
MAX_RUNNERS: Final = 4
"""Maximum number of runner processes. A demo is so short that starting more would not pay off."""

_HELP = """Run rollouts of arithmetic problems with the embedded policy (a small built-in model) and a Python tool.

It needs no network, no GPU and no API key.
"""


@click.command(help=_HELP, short_help="Run a short demonstration, offline.")
@option(
    "-n",
    "--num-tasks",
    metavar="TASKS",
    type=Number(int, 1, MAX_TASKS),
    default=TASKS,
    help="Number of tasks, spread evenly over the levels of difficulty.",
)
@option(
    "-k",
    "--per-task",
    metavar="PER_TASK",
    type=Number(int, 1),
    default=PER_TASK,
    help="Rollouts per task (group size).",
)
@option("-o", "--out", metavar="DIR", envvar="ROOKERY_OUT", help="Directory of runs.  [default: runs]")
@option(
    "--seed",
    metavar="S",
    type=Number(int, -(2**63), 2**63 - 1),
    default=0,
    help="Root from which all random seeds are derived.",
)
@option("--json", is_flag=True, help="Write events to stdout as JSON lines.")
def demo(num_tasks: int, per_task: int, out: str | None, seed: int, json: bool) -> int:
    from rookery.cli.progress import json_events

    with json_events(json) as events:
        return _run_demo({"num_tasks": num_tasks, "per_task": per_task, "out": out, "seed": seed}, events)


def _run_demo(values: dict[str, Any], events: "JsonLines | None") -> int:
    if events is None:
        from rookery.cli.terminal import write_line

        # Printed before the slow part: the first start compiles modules and probes the machine.
        write_line("\n".join(_describe_plan(values["num_tasks"], values["per_task"])))
    from rookery.cli.config import find_runs_folder
    from rookery.cli.foreground_run import report_run
    from rookery.cli.progress import open_progress
    from rookery.cli.run import pin_blas_threads, run_tasks, select_tasks
    from rookery.engine import Engine
    from rookery.sandboxes import best_provider

    best = best_provider()
    if events is None:
        write_line("\n".join(describe_sandbox(best)))
    else:
        events.write(
            "demo", policy=POLICY, tasks=ENVIRONMENT, split=SPLIT, sandbox=best.name, isolated=best.isolated
        )
    config = _build_config(best, values)
    pin_blas_threads(config.runners)
    engine = Engine(config.environment, config=config, out=find_runs_folder(values["out"]))
    tasks = select_tasks(engine.environment, {"tasks": None, "num_tasks": values["num_tasks"]})
    progress = open_progress(events, muted=frozenset({"sandbox.not_isolated"}))
    return report_run(run_tasks(engine, tasks, values["per_task"], progress), events, ending=_suggest_next_steps)


def _build_config(best: "ProviderChoice", values: dict[str, Any]) -> "EngineConfig":
    from rookery.core import SandboxSpec
    from rookery.engine import EngineConfig
    from rookery.upstreams import UpstreamConfig

    return EngineConfig(
        environment=ENVIRONMENT,
        arguments={"split": SPLIT, "size": values["num_tasks"]},
        upstreams={"policy": UpstreamConfig(urls=(POLICY,))},
        # The user has been warned, and the policy is the embedded one.
        sandbox=SandboxSpec(provider=best.name, untrusted_ok=not best.isolated),
        runners=min(len(os.sched_getaffinity(0)), MAX_RUNNERS),
        seed=values["seed"],
        stream={"k": values["per_task"], "tasks": ""},
    )


def _describe_plan(tasks: int, k: int) -> list[str]:
    """Return lines that describe the policy and the tasks of the demo."""
    from rookery.cli.terminal import bold, plural

    what = f"{plural(tasks, 'unseen arithmetic problem')} x {plural(k, 'rollout')}"
    return [
        f"{bold('policy')}   {POLICY}: a small model that runs on this CPU, offline",
        f"{bold('tasks')}    {what}, with a python tool",
    ]


def describe_sandbox(best: "ProviderChoice") -> list[str]:
    """Return lines that describe the sandbox of the policy's programs, and what takes the next seconds."""
    from rookery.cli.terminal import bold, one_line, terminal_width

    if best.isolated:
        lines = [f"{bold('sandbox')}  {best.name}: programs of the policy run isolated"]
    else:
        plain = click.style("not isolated: programs of the policy run as your user", fg="yellow")
        width = terminal_width() - 9
        lines = [
            f"{bold('sandbox')}  {best.name}, {plain}",
            *(
                f"         {one_line(f'{name} cannot be used: {why}', width)}"
                for name, why in best.refused.items()
            ),
        ]
    return [*lines, "", "loading the policy and starting the runner processes"]


# ---- what to try next


def _suggest_next_steps(summary: "Summary") -> list[str]:
    from rookery.cli.summary import format_commands, format_next_steps
    from rookery.cli.terminal import program_name, shell_quote

    run, rookery = shell_quote(summary.path), program_name()
    if summary.left or not summary.stats.valid:
        return format_next_steps(summary)
    wrong, right = _pick_examples(summary)
    rows = [(f"{rookery} show {run}", "every rollout, with its transcript, tokens and timings")]
    if wrong is not None:
        rows.append((f"{rookery} show {run} {wrong.id}", f"a wrong answer{_describe_level(wrong)}"))
    if right is not None:
        rows.append((f"{rookery} show {run} {right.id}", f"a right answer{_describe_level(right)}"))
    rows += [
        (f"{rookery} init mine", "create your own environment"),
        (f"{rookery} run mine/mine.py --policy {POLICY} -k 4", "run it"),
        (
            f"{rookery} run {ENVIRONMENT} --policy http://localhost:8000/v1 -n {TASKS} -k 8",
            "run with your own model, on any OpenAI-compatible server",
        ),
    ]
    failures = format_next_steps(summary)[:3] if summary.stats.failed else []
    return ["", f"run directory: {run}", *failures, "", *format_commands(rows)]


def _pick_examples(summary: "Summary") -> tuple[Rollout | None, Rollout | None]:
    """Return a rollout with a wrong answer and one with a right answer, or None if there is none.

    Preferred are a wrong answer with tool calls to a task that another rollout solved, and a right answer to a
    task of the hardest level.
    """
    from rookery.journal import RunReader

    wrong: tuple[tuple[bool, bool], Rollout] | None = None
    right: tuple[tuple[float, bool], Rollout] | None = None
    try:
        with RunReader(summary.path) as reader:
            for _, members in groupby(reader.iter_rollouts(), key=lambda record: record.group):
                group = [record for record in members if record.valid]
                solved = any(record.reward == 1.0 for record in group)
                for record in group:
                    tools = record.usage.tool_calls > 0
                    if record.reward == 1.0:
                        hard = (record.metrics.get("level", 0.0), tools)
                        right = max(right or (hard, record), (hard, record), key=lambda pair: pair[0])
                    elif record.reward == 0.0:
                        interest = (tools, solved)
                        wrong = max(wrong or (interest, record), (interest, record), key=lambda pair: pair[0])
    except JournalError:
        return None, None  # the summary is printed already; examples are optional
    return wrong and wrong[1], right and right[1]


def _describe_level(record: Rollout) -> str:
    level = record.metrics.get("level")
    return f", level {level:g}" if level is not None else ""
