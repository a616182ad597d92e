"""`rookery validate`: check that tasks can be solved and cannot be cheated.

Guarantees:
- a task passes if its own solution gets the full reward, and if neither doing nothing nor a known cheat gets a
  reward;
- rows with tests or cases are code tasks: their solution must pass, and an empty program must not;
- a validation is an ordinary run with a journal, and `--resume` continues it;
- the report names tasks that can only be graded with weaker isolation, and tasks that are graded in the agent's
  sandbox although a fresh one would do;
- a task that could not be judged has not passed; the exit code is 3 unless all tasks passed.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from rookery.cli.config import find_runs_folder
from rookery.cli.errors import Exit
from rookery.cli.options import Number, option, parse_source_options, source_options
from rookery.core import Failed, Task, UsageError

if TYPE_CHECKING:
    from rookery.cli.progress import JsonLines
    from rookery.core import Rollout
    from rookery.engine import EngineConfig
    from rookery.view.summary import Summary

BUILT_IN_TASKS: Final = "repairs"
FULL_REWARD: Final = 1.0
MAX_NAMES: Final = 5
_HELP = """Check that each task rewards its solution fully, and does not reward doing nothing or known cheats.

TASKS is a source as for `rookery run --tasks`, or `repairs` for the built-in tasks: SWE tasks, or code tasks with
tests or cases. The exit code is 3 if a task did not pass.
"""


@click.command(help=_HELP, short_help="Check that tasks can be solved and not cheated.")
@click.argument("source", metavar="TASKS", required=False)
@source_options
@option("--only", metavar="TASK", multiple=True, help="Check only this task. Repeatable.")
@option("--no-cheats", is_flag=True, help="Try only the solution and doing nothing.")
@option("--provider", "--sandbox", metavar="P", help="Sandbox provider.  [default: the best that isolates]")
@option("--image", metavar="I", help="Image for tasks without one.  [default: this system's files]")
@option("-c", "--concurrency", type=Number(int, 1), help="Concurrent rollouts.  [default: the number of cores]")
@option("--runners", type=Number(int, 0), default=0, help="Runner processes.")
@option("--resume", "name", metavar="RUN", help="Continue a stopped validation, or print its report again.")
@option("-o", "--out", metavar="DIR", envvar="ROOKERY_OUT", help="Directory of runs.  [default: runs]")
@option("--json", is_flag=True, help="Write events to stdout as JSON lines; the last one is the report.")
def validate(**values: Any) -> int:
    from rookery.cli.progress import json_events

    with json_events(values["json"]) as events:
        return _run_validation(values, events)


def _run_validation(values: dict[str, Any], events: "JsonLines | None") -> int:
    from rookery.cli.foreground_run import ForegroundRun, report_run
    from rookery.cli.progress import RunStart, open_progress
    from rookery.engine import Engine

    if bool(values["source"]) == bool(values["name"]):
        raise UsageError(
            "pass either the tasks to validate, or --resume with the name of the validation to continue"
        )
    tasks: list[Task] | None = None
    done = 0
    if values["name"]:
        folder, left, count, done = _open_earlier(values)
        if not left:
            return _report(folder, events)
        changes = {"concurrency": values["concurrency"]} if values["concurrency"] else {}
        engine = Engine.resume(folder, **changes)
    else:
        environment, tasks = _load_tasks(values)
        count = len(tasks)
        config = _build_config(values, environment)
        engine = Engine(config.environment, config=config, out=find_runs_folder(values["out"]))

    def about(engine: Engine) -> RunStart:
        assert engine.folder is not None
        return RunStart(
            run=engine.folder,
            environment=engine.environment.title,
            model="none",
            tasks=count,
            invalid=sum(bool(task.invalid) for task in tasks or ()),
            k=1,
            concurrency=engine.config.concurrency,
            runners=engine.config.runners,
            done=done,
            resumed=tasks is None,
        )

    run = ForegroundRun(engine, open_progress(events), tasks=tasks, k=1, about=about)
    run.run()
    if run.signal is not None or run.error is not None or engine.folder is None:
        return report_run(run, events, ending=_suggest_resume)
    return _report(engine.folder, events)


def _suggest_resume(summary: "Summary") -> list[str]:
    return ["", "  # run the rest and print the report", f"  rookery validate --resume {summary.path}"]


def _load_tasks(values: dict[str, Any]) -> tuple[str, list[Task]]:
    """Return the location of the environment that validates the tasks, and a task for each variant of each task.

    Tasks without files are code tasks.
    """
    from rookery.environments.code_environment import validation as code
    from rookery.environments.swe import validation as swe
    from rookery.tasks import load_tasks, tasks_from
    from rookery.tasks.swe import DATA_KEY

    if values["source"] == BUILT_IN_TASKS and not Path(BUILT_IN_TASKS).exists():
        from rookery.environments.swe.repairs import repairs

        found: Sequence[Task] = tasks_from(repairs(), BUILT_IN_TASKS)
    else:
        found = load_tasks(values["source"], **parse_source_options(values))
    is_code = not any(DATA_KEY in task.data for task in found)
    if is_code:
        own = code.CodeValidationEnvironment.own_limits  # limits of a program, not of the rollout
        found = load_tasks(values["source"], own_limits=own, **parse_source_options(values))
    chosen = list(found)
    if values["only"]:
        known = {task.id for task in chosen}
        if missing := [name for name in values["only"] if name not in known]:
            raise UsageError(f"{values['source']} has no task {missing[0]!r}; its tasks are {_join_names(known)}")
        chosen = [task for task in chosen if task.id in values["only"]]
    cheats = not values["no_cheats"]
    if is_code:
        return code.ENVIRONMENT, code.expand_code_variants(chosen, cheats=cheats)
    return swe.ENVIRONMENT, swe.expand_variants(chosen, cheats=cheats)


def _join_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:MAX_NAMES]) + (
        f" and {len(ordered) - MAX_NAMES} more" if len(ordered) > MAX_NAMES else ""
    )


def _build_config(values: dict[str, Any], environment: str) -> "EngineConfig":
    import os

    from rookery.core import SandboxSpec
    from rookery.engine import EngineConfig
    from rookery.upstreams import UpstreamConfig

    cores = len(os.sched_getaffinity(0))
    return EngineConfig(
        environment=environment,
        upstreams={"policy": UpstreamConfig(urls=("embedded",))},  # required, but never called
        sandbox=SandboxSpec(provider=values["provider"] or "", image=values["image"]),
        runners=values["runners"],
        concurrency=values["concurrency"] or max(2, cores),
        breaker=None,  # check every task, however many are broken
        stream={"k": 1, "tasks": values["source"], "task_data": values["task_data"] or ""},
    )


def _open_earlier(values: dict[str, Any]) -> tuple[Path, bool, int, int]:
    """Return the directory of the validation to resume, whether rollouts are left to run, and two counts.

    The counts are the number of tasks and the number of finished rollouts.
    """
    from rookery.environments.code_environment import validation as code
    from rookery.environments.swe import validation as swe
    from rookery.journal import RunReader, find_run, open_lock
    from rookery.view.summary import read_summary

    folder = find_run(values["name"], find_runs_folder(values["out"]))
    with RunReader(folder) as reader:
        if reader.config().get("environment") not in (code.ENVIRONMENT, swe.ENVIRONMENT):
            raise UsageError(f"{folder.name} is not a validation: continue it with `rookery resume {folder.name}`")
        open_lock(folder).close()
        summary = read_summary(reader, k=1)
        left = bool(reader.unfinished().groups) or summary.left > 0
        if left:
            from rookery.cli.tasks_cache import lock_cached_tasks

            lock_cached_tasks(reader.tasks(), reader.config().get("stream", {}))
    return folder, left, summary.tasks, summary.stats.rollouts


# ---- the report


class VariantResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one variant of a task: applying its solution, doing nothing, or a cheat."""

    variant: str
    reward: float | None = None
    problem: str = ""
    """The reason why the variant did not get the expected reward; empty if it did."""


class TaskValidation(msgspec.Struct, kw_only=True):
    """Result of the validation of one task, over all its variants."""

    task: str
    passed: bool = True
    mode: str = ""
    weaker: str = ""
    could_be_fresh: bool | None = None
    """True if the solution of a task that is graded in the agent's sandbox also passes in a fresh sandbox. None
    for tasks that are graded elsewhere."""
    notes: list[str] = []
    tried: list[VariantResult] = []


def summarize_validation(
    records: "Iterable[Rollout]", quarantined: Iterable[tuple[str, str]] = ()
) -> list[TaskValidation]:
    """Return the result of each task, in the order of the records. Does no I/O.

    `quarantined` are IDs of tasks that could not be attempted, each with the reason.
    """
    from rookery.environments.swe.validation import FRESH, NOTHING, SOLUTION, split_variant

    found: dict[str, TaskValidation] = {}
    for record in records:
        name, variant = split_variant(record.task)
        one = found.setdefault(name, TaskValidation(task=name, notes=[], tried=[]))
        grades = record.info.get("grades") or [{}]
        one.mode = one.mode or str(grades[-1].get("mode", "fresh" if record.valid else ""))
        one.weaker = one.weaker or next((grade["weaker"] for grade in grades if grade.get("weaker")), "")
        for note in record.info.get("notes") or ():
            if note not in one.notes:
                one.notes.append(note)
        if variant == FRESH:
            one.could_be_fresh = record.valid and record.reward == FULL_REWARD
            continue
        one.tried.append(
            VariantResult(variant=variant, reward=record.reward, problem=_find_problem(record, variant))
        )
    for name, why in quarantined:
        base, variant = split_variant(name)
        one = found.setdefault(base, TaskValidation(task=base, notes=[], tried=[]))
        if not any(tried.variant == variant for tried in one.tried):
            one.tried.append(VariantResult(variant=variant or "loading", problem=why))
    for one in found.values():
        names = {tried.variant for tried in one.tried}
        if SOLUTION not in names and NOTHING in names:
            one.notes.append("the task has no solution, so it is unknown whether it can be solved")
        one.passed = not any(tried.problem for tried in one.tried)
    return list(found.values())


def _find_problem(record: "Rollout", variant: str) -> str:
    from rookery.environments.swe.validation import SOLUTION

    if not record.valid or record.reward is None:
        outcome = record.outcome
        why = f"{outcome.cause}: {outcome.detail}" if isinstance(outcome, Failed) else type(outcome).__name__
        return f"could not be judged ({why})"
    if variant == SOLUTION:
        return (
            ""
            if record.reward >= FULL_REWARD
            else f"scores {record.reward:g}, not {FULL_REWARD:g}{_describe_output(record)}"
        )
    if record.reward > 0.0:
        return f"scores {record.reward:g}, not 0"
    return ""


def _describe_output(record: "Rollout") -> str:
    grade = (record.info.get("grades") or [{}])[-1]
    details = [str(test.get("detail") or "") for test in grade.get("tests", ()) if test.get("verdict") != "passed"]
    texts = [*(str(grade.get(key) or "") for key in ("stderr", "stdout", "detail")), *details]
    output = " ".join(next(filter(None, texts), "").split())
    return f": {output[-300:]}" if output else ""


def _report(folder: Path, events: "JsonLines | None") -> int:
    from rookery.journal import RunReader

    with RunReader(folder) as reader:
        rows = [(row.id, row.detail) for row in reader.task_rows() if row.status == "quarantined"]
        report = summarize_validation(reader.iter_rollouts(), rows)
    failed = sum(not one.passed for one in report)
    code = Exit.FAILED if failed else Exit.OK
    if events is not None:
        events.write(
            "validated", run=str(folder), tasks=msgspec.to_builtins(report), failed=failed, exit_code=code
        )
    else:
        click.echo("\n".join(format_report(report)))
        click.echo(
            f"\n{len(report) - failed} of {len(report)} tasks passed; see `rookery show {folder.name}` for details"
        )
    return code


def format_report(report: list[TaskValidation]) -> list[str]:
    """Return the lines of the report: a table of the tasks, then problems and notes."""
    from rookery.cli.terminal import format_table
    from rookery.environments.swe.validation import NOTHING, SOLUTION

    rows = [["task", "solution", "nothing", "cheats", "graded", ""]]
    notes: list[str] = []
    for one in report:
        tried = {each.variant: each for each in one.tried}
        cheats = [each for each in one.tried if each.variant.startswith("cheat:")]
        refused = sum(not each.problem for each in cheats)
        rows.append(
            [
                one.task,
                _format_reward(tried.get(SOLUTION)),
                _format_reward(tried.get(NOTHING)),
                f"{refused}/{len(cheats)} refused" if cheats else "-",
                f"{one.mode}{', weaker' if one.weaker else ''}" or "-",
                "passed" if one.passed else "FAILED",
            ]
        )
        for each in [each for each in one.tried if each.problem][:MAX_NAMES]:
            variant = "doing nothing" if each.variant == NOTHING else each.variant
            notes.append(f"{one.task}: {variant} {each.problem}")
        if one.weaker:
            notes.append(f"{one.task}: weaker: {one.weaker}")
        if one.could_be_fresh:
            notes.append(f"{one.task}: is graded in the agent's sandbox, but could be graded in a fresh one")
        notes += [f"{one.task}: {note}" for note in one.notes]
    return [*format_table(rows), *([""] if notes else []), *notes]


def _format_reward(tried: VariantResult | None) -> str:
    if tried is None:
        return "-"
    return "?" if tried.reward is None else f"{tried.reward:g}"
