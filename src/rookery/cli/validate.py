"""`rookery validate`: whether tasks can be trained on.

Promises:
- of each task, its own solution must score full, doing nothing and every known cheat must score nothing;
- it is a run like any other: parallel, journaled, and gone on with by `--resume`;
- it says which tasks' tests cannot be run the strong way, and which that ask for their own box need not;
- a task that could not be judged has not passed; exit code 3 when one has not.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from rookery.cli.config import find_runs_folder
from rookery.cli.errors import Exit
from rookery.cli.options import Number, parse_variables, source_options
from rookery.core import Failed, RookeryError, Task, UsageError

if TYPE_CHECKING:
    from rookery.cli.progress import JsonLines
    from rookery.cli.summary import Summary
    from rookery.core import Rollout
    from rookery.engine import EngineConfig

BUILT_IN_TASKS: Final = "repairs"
FULL_REWARD: Final = 1.0
MAX_NAMES: Final = 5
_HELP = """Tries TASKS: the solution of each must score full, doing nothing and known cheats must score nothing.

TASKS is what `rookery run --tasks` takes, or `repairs`, the tasks that come along. Exit code 3: one did not pass.
"""


@click.command(help=_HELP, short_help="Try whether tasks can be solved, and not be cheated.")
@click.argument("source", metavar="TASKS", required=False)
@source_options
@click.option("--only", metavar="TASK", multiple=True, help="This task alone; repeat it.")
@click.option("--no-cheats", is_flag=True, help="Only the solution and doing nothing.")
@click.option(
    "--provider", "--sandbox", metavar="P", help="Where boxes run.  [default: the best that isolates here]"
)
@click.option("--image", metavar="I", help="For tasks that name none.  [default: this system]")
@click.option(
    "-c", "--concurrency", metavar="N", type=Number(int, 1), help="Tries at once.  [default: one a core]"
)
@click.option(
    "--runners", metavar="N", type=Number(int, 0), default=0, show_default=True, help="Runner processes."
)
@click.option(
    "--resume", "name", metavar="RUN", help="Go on with a validation that was stopped, or show it again."
)
@click.option(
    "-o", "--out", metavar="DIR", envvar="ROOKERY_OUT", help="Where the run's folder goes.  [default: runs]"
)
@click.option("--json", is_flag=True, help="Events as JSON, one a line, on stdout; the last is the report.")
def validate(**values: Any) -> int:
    from rookery.cli.progress import JsonLines

    events = JsonLines() if values["json"] else None
    try:
        return _run_validation(values, events)
    except RookeryError as error:
        if events is not None:
            events.write("error", detail=str(error), exit_code=2)
        raise


def _run_validation(values: dict[str, Any], events: "JsonLines | None") -> int:
    from rookery.cli.foreground_run import ForegroundRun, report_run
    from rookery.cli.progress import RunStart, open_progress
    from rookery.engine import Engine

    if bool(values["source"]) == bool(values["name"]):
        raise UsageError("name the tasks to validate, or with --resume the run to go on with; not both")
    tasks: list[Task] | None = None
    done = 0
    if values["name"]:
        folder, left, count, done = _open_earlier(values)
        if not left:
            return _report(folder, events)
        changes = {"concurrency": values["concurrency"]} if values["concurrency"] else {}
        engine = Engine.resume(folder, **changes)
    else:
        tasks = _load_tasks(values)
        count = len(tasks)
        config = _build_config(values)
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

    drive = ForegroundRun(engine, open_progress(events), tasks=tasks, k=1, about=about)
    drive.run()
    if drive.signal is not None or drive.error is not None or engine.folder is None:
        return report_run(drive, events, ending=_suggest_resume)
    return _report(engine.folder, events)


def _suggest_resume(summary: "Summary") -> list[str]:
    return ["", "  # run the rest, and have the report", f"  rookery validate --resume {summary.path}"]


def _load_tasks(values: dict[str, Any]) -> list[Task]:
    from rookery.environments.swe.validation import expand_variants
    from rookery.tasks import load_tasks, tasks_from

    if values["source"] == BUILT_IN_TASKS and not Path(BUILT_IN_TASKS).exists():
        from rookery.environments.swe.repairs import repairs

        found: Iterable[Task] = tasks_from(repairs(), BUILT_IN_TASKS)
    else:
        found = load_tasks(
            values["source"], task_data=values["task_data"], variables=parse_variables(values["variable"])
        )
    chosen = list(found)
    if values["only"]:
        known = {task.id for task in chosen}
        if missing := [name for name in values["only"] if name not in known]:
            raise UsageError(
                f"there is no task {missing[0]!r} in {values['source']}; there are {_join_names(known)}"
            )
        chosen = [task for task in chosen if task.id in values["only"]]
    return expand_variants(chosen, cheats=not values["no_cheats"])


def _join_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:MAX_NAMES]) + (
        f" and {len(ordered) - MAX_NAMES} more" if len(ordered) > MAX_NAMES else ""
    )


def _build_config(values: dict[str, Any]) -> "EngineConfig":
    import os

    from rookery.core import SandboxSpec
    from rookery.engine import EngineConfig
    from rookery.environments.swe.validation import ENVIRONMENT
    from rookery.upstreams import UpstreamConfig

    cores = len(os.sched_getaffinity(0))
    return EngineConfig(
        environment=ENVIRONMENT,
        # Nobody asks it anything.
        upstreams={"policy": UpstreamConfig(urls=("embedded",))},
        sandbox=SandboxSpec(provider=values["provider"] or "", image=values["image"]),
        runners=values["runners"],
        concurrency=values["concurrency"] or max(2, cores),
        breaker=None,  # every task has its say, however many are broken
        stream={"k": 1, "tasks": values["source"], "task_data": values["task_data"] or ""},
    )


def _open_earlier(values: dict[str, Any]) -> tuple[Path, bool, int, int]:
    """Its folder, whether something is left to do, how many tasks it has and how many rollouts are done."""
    from rookery.cli.summary import read_summary
    from rookery.environments.swe.validation import ENVIRONMENT
    from rookery.journal import RunReader, find_run, open_lock

    folder = find_run(values["name"], find_runs_folder(values["out"]))
    with RunReader(folder) as reader:
        if reader.config().get("environment") != ENVIRONMENT:
            raise UsageError(f"{folder.name} is no validation: go on with it by `rookery resume`")
        open_lock(folder).close()
        summary = read_summary(reader, k=1)
        left = bool(reader.unfinished().groups) or summary.left > 0
        if left:
            from rookery.cli.tasks_cache import lock_cached_tasks

            lock_cached_tasks(reader.tasks(), reader.config().get("stream", {}))
    return folder, left, summary.tasks, summary.stats.rollouts


# ---- the report


class VariantResult(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of a task."""

    variant: str
    reward: float | None = None
    problem: str = ""
    """Why it is not as it should be; empty where it is."""


class TaskValidation(msgspec.Struct, kw_only=True):
    """One task."""

    task: str
    passed: bool = True
    mode: str = ""
    weaker: str = ""
    could_be_fresh: bool | None = None
    """Of tasks that ask for their own box."""
    notes: list[str] = []
    tried: list[VariantResult] = []


def summarize_validation(
    records: "Iterable[Rollout]", quarantined: Iterable[tuple[str, str]] = ()
) -> list[TaskValidation]:
    """Tasks in the order in which they came, each with what was tried. Pure."""
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
            one.notes.append("it has no solution: nobody knows whether it can be solved")
        one.passed = not any(tried.problem for tried in one.tried)
    return list(found.values())


def _find_problem(record: "Rollout", variant: str) -> str:
    from rookery.environments.swe.validation import NOTHING, SOLUTION

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
        return f"scores {record.reward:g}" + (" for nothing" if variant == NOTHING else "")
    return ""


def _describe_output(record: "Rollout") -> str:
    grades = record.info.get("grades") or [{}]
    said = " ".join(str(grades[-1].get("stderr") or grades[-1].get("stdout") or "").split())
    return f": {said[-300:]}" if said else ""


def _report(folder: Path, events: "JsonLines | None") -> int:
    from rookery.journal import RunReader

    with RunReader(folder) as reader:
        rows = [(row.id, row.detail) for row in reader.task_rows() if row.status == "quarantined"]
        report = summarize_validation(reader.each(), rows)
    failed = sum(not one.passed for one in report)
    code = Exit.FAILED if failed else Exit.OK
    if events is not None:
        events.write(
            "validated", run=str(folder), tasks=msgspec.to_builtins(report), failed=failed, exit_code=code
        )
    else:
        click.echo("\n".join(format_report(report)))
        click.echo(
            f"\n{len(report) - failed} of {len(report)} tasks passed; `rookery show {folder.name}` has the rest"
        )
    return code


def format_report(report: list[TaskValidation]) -> list[str]:
    """The table and what is to be said about it."""
    from rookery.cli.terminal import format_table
    from rookery.environments.swe.validation import NOTHING, SOLUTION

    rows = [["task", "solution", "nothing", "cheats", "graded", ""]]
    said: list[str] = []
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
        said += [f"{one.task}: {each.variant} {each.problem}" for each in one.tried if each.problem][:MAX_NAMES]
        if one.weaker:
            said.append(f"{one.task}: weaker: {one.weaker}")
        if one.could_be_fresh:
            said.append(f"{one.task}: asks for its own box, and could be graded in a fresh one")
        said += [f"{one.task}: {note}" for note in one.notes]
    return [*format_table(rows), *([""] if said else []), *said]


def _format_reward(tried: VariantResult | None) -> str:
    if tried is None:
        return "-"
    return "?" if tried.reward is None else f"{tried.reward:g}"
