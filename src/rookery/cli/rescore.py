"""`rookery rescore`: grade the stored rollouts of a run again, without sampling.

Guarantees:
- no model is called, except those that the scorer itself calls;
- the run changes only when every rollout was graded; an interrupted command changes nothing;
- earlier scores stay readable: `rookery show RUN ROLLOUT` lists them;
- a rollout whose grading fails has no reward, and is not counted as a zero;
- a rollout that cannot be graded again keeps its score, the reason is printed, and the exit code is 3.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.config import add_roles, find_runs_folder, parse_pairs, runs_option
from rookery.cli.options import ROLE, ROLE_MODEL, Number, option
from rookery.core import UsageError

if TYPE_CHECKING:
    from rookery.cli.progress import JsonLines
    from rookery.engine import EngineConfig
    from rookery.engine.rescoring import Rescored, RescoringPlan

_HELP = """Grade the stored rollouts of RUN again, with the same or another scorer. Nothing is sampled.

RUN is a directory, its name, the start or end of its name, or `latest`. Without --scorer, the environment of the
run grades again, for example after its code was fixed.

Each rollout counts with its new score; earlier scores stay in the journal (`rookery show RUN ROLLOUT`). A rollout
whose grading fails has no reward. Rollouts that failed before they could be graded stay as they are. The calls of
a judge are recorded in the directory `rescores` of the run. In a mixture, each environment grades its rollouts.
A rollout keeps its score, and the exit code is 3, if its score depends on a sandbox that is gone.
"""


@click.command(help=_HELP, short_help="Grade the rollouts of a run again.")
@click.argument("name", metavar="RUN")
@option("--scorer", metavar="NAME", help="Scorer: a name or module:attribute.  [default: the run's environment]")
@option("--scorer-arg", metavar="KEY=VALUE", multiple=True, help="Argument of the scorer. Repeatable.")
@ROLE
@ROLE_MODEL
@option("-c", "--concurrency", type=Number(int, 1), help="Concurrent gradings.")
@option("--runners", type=Number(int, 0), help="Number of runner processes; 0 grades in this process.")
@option("--json", is_flag=True, help="Write events to stdout as JSON lines.")
@runs_option
def rescore(
    name: str,
    scorer: str | None,
    scorer_arg: tuple[str, ...],
    role: tuple[str, ...],
    role_model: tuple[str, ...],
    concurrency: int | None,
    runners: int | None,
    json: bool,
    root: str | None,
) -> int:
    from rookery.cli.progress import json_events

    with json_events(json) as events:
        if scorer_arg and scorer is None:
            raise UsageError("--scorer-arg needs --scorer NAME")
        options = {"concurrency": concurrency, "runners": runners}
        changes = {key: value for key, value in options.items() if value is not None}
        arguments = parse_pairs("--scorer-arg", scorer_arg, "tolerance=0.01")
        chosen = None if scorer is None else {"name": scorer, **arguments}
        return _rescore(name, root, chosen, (role, role_model), changes, events)


def _rescore(
    name: str,
    root: str | None,
    scorer: dict[str, Any] | None,
    roles: tuple[tuple[str, ...], tuple[str, ...]],
    changes: dict[str, Any],
    events: "JsonLines | None",
) -> int:
    from rookery.cli.foreground_run import ForegroundRun
    from rookery.cli.progress import RunStart, open_progress
    from rookery.cli.run import pin_blas_threads
    from rookery.engine import Engine
    from rookery.engine.rescoring import FOLDER, apply_rescoring, plan_rescoring
    from rookery.journal import find_run, open_lock

    folder = find_run(name, find_runs_folder(root))
    open_lock(folder).close()  # refuse a run that is being written before anything else
    plan = plan_rescoring(folder, scorer=scorer, roles=add_roles({}, *roles), **changes)
    config, tasks = plan.config, plan.tasks
    title = str(scorer["name"]) if scorer is not None else _get_title(config)
    pin_blas_threads(config.runners)
    engine = Engine(config.environment, config=config, out=folder / FOLDER)

    def about(engine: Engine) -> RunStart:
        assert engine.folder is not None
        return RunStart(
            run=engine.folder,
            environment=f"{engine.environment.title} {folder.name}",
            model=title,
            tasks=len(tasks),
            invalid=0,
            k=1,
            concurrency=engine.config.concurrency,
            runners=engine.config.runners,
        )

    run = ForegroundRun(engine, open_progress(events), tasks=tasks, k=1, about=about)
    run.run()
    if run.signal is not None or run.error is not None:
        return _report_stop(run.exit_code(None), run.error, events)
    assert engine.folder is not None
    done = apply_rescoring(folder, engine.folder, title)
    return _report(folder, done, plan, events)


def _get_title(config: "EngineConfig") -> str:
    """Return the names of the environments that grade their rollouts again."""
    entries = config.arguments.get("environments")
    return ", ".join(one["name"] for one in entries) if entries else str(config.arguments["environment"])


def _report_stop(code: int, error: Exception | None, events: "JsonLines | None") -> int:
    from rookery.cli.errors import describe_error, print_error
    from rookery.cli.terminal import write_line

    if error is not None:
        print_error(describe_error(error))
    write_line("not every rollout was graded, so no score was changed")
    if events is not None:
        events.write("finished", exit_code=code)
    return code


def _report(folder: Path, done: "Rescored", plan: "RescoringPlan", events: "JsonLines | None") -> int:
    import msgspec

    from rookery.cli.errors import Exit
    from rookery.cli.summary import print_summary
    from rookery.cli.terminal import plural
    from rookery.journal import RunReader
    from rookery.view.summary import read_summary

    code = Exit.FAILED if done.failed or done.kept or plan.kept else Exit.OK
    with RunReader(folder) as reader:
        summary = read_summary(reader)
    if events is not None:
        kept = [msgspec.structs.asdict(one) for one in plan.kept]
        rescored = msgspec.structs.asdict(done)
        events.write("finished", **summary.plain(), rescored=rescored, kept_scores=kept, exit_code=int(code))
        return code
    missing = f", {done.failed:,} could not be graded and have no reward" if done.failed else ""
    click.echo(
        f"{plural(done.rollouts, 'rollout')} graded again, {done.changed:,} rewards changed{missing}", err=True
    )
    for one in plan.kept:
        click.echo(f"{plural(one.rollouts, 'rollout')} of {one.environment} kept: {one.reason}", err=True)
    if done.kept:
        click.echo(f"{plural(done.kept, 'rollout')} kept: grading used a sandbox, which is gone", err=True)
    click.echo(err=True)
    print_summary(summary)
    return code
