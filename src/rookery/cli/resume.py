"""`rookery resume`: continue a run.

Guarantees:
- finished rollouts are kept, unfinished ones run again, nothing counts twice;
- a run that another process is writing, or that has a newer format, is refused at once;
- for a finished run, a message says how to run failed rollouts again; its records decide the exit code;
- `--failed` runs failed rollouts again: each counts once, with its newest record, and the earlier ones are kept.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.config import find_runs_folder, runs_option
from rookery.cli.errors import Exit
from rookery.cli.options import METRICS, TRACES, Number, option
from rookery.core import UsageError

if TYPE_CHECKING:
    from rookery.cli.progress import JsonLines
    from rookery.journal import RunReader
    from rookery.view.summary import Summary

_HELP = """Continue RUN: finished rollouts are kept, the others run.

RUN is a directory, its name, the start or end of its name, or `latest`. The settings of the run apply unless
options here change them.

With --failed, rollouts that failed run again too, in fresh attempts. Each rollout counts once, with its newest
record; earlier records stay in the journal (`rookery show RUN ROLLOUT`).
"""


@click.command(help=_HELP, short_help="Continue a stopped run.")
@click.argument("name", metavar="RUN")
@option("--failed", is_flag=True, help="Also run failed rollouts again.")
@option(
    "--cause",
    "causes",
    metavar="CAUSE",
    multiple=True,
    help="With --failed: only rollouts that failed with this cause, or with causes that begin with it (upstream). "
    "Repeatable.",
)
@option("--policy", metavar="URL", multiple=True, help="New URL of the inference engine.")
@option("-c", "--concurrency", type=Number(int, 1), help="Concurrent rollouts.")
@option("--runners", type=Number(int, 0), help="Number of runner processes; 0 executes rollouts in this process.")
@option(
    "--cluster",
    metavar="NAME[:ADDRESS]",
    help="Cluster on whose nodes the runners are started: ray, ray:ADDRESS, local:N, or none for this machine.",
)
@METRICS
@TRACES
@option("--json", is_flag=True, help="Write events to stdout as JSON lines.")
@runs_option
def resume(
    name: str,
    failed: bool,
    causes: tuple[str, ...],
    policy: tuple[str, ...],
    concurrency: int | None,
    runners: int | None,
    cluster: str | None,
    metrics: str | None,
    traces: str | None,
    json: bool,
    root: str | None,
) -> int:
    from rookery.cli.progress import json_events

    with json_events(json) as events:
        if causes and not failed:
            raise UsageError("--cause selects failed rollouts: use it with --failed")
        if cluster == "none":
            cluster = ""
        options = {"concurrency": concurrency, "runners": runners, "cluster": cluster, "metrics": metrics}
        options["traces"] = traces
        changes: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        if failed:
            changes |= {"failed": True, "causes": causes}
        return _resume(name, root, policy, changes, events)


def _resume(
    name: str, root: str | None, policy: tuple[str, ...], changes: dict[str, Any], events: "JsonLines | None"
) -> int:
    import msgspec

    from rookery.cli.foreground_run import ForegroundRun, report_run
    from rookery.cli.progress import RunStart, open_progress
    from rookery.cli.run import pin_blas_threads
    from rookery.engine import Engine, EngineConfig
    from rookery.engine.task_source import find_remaining
    from rookery.journal import RunReader, find_run, open_lock
    from rookery.upstreams import absolute_address
    from rookery.view.summary import read_summary

    folder = find_run(name, find_runs_folder(root))
    with RunReader(folder) as reader:  # refuses a newer format before anything is touched
        open_lock(folder).close()  # refuse a run that is being written before anything else
        summary = read_summary(reader)
        try:
            config = msgspec.convert(reader.config(), EngineConfig)
        except msgspec.ValidationError as error:
            raise UsageError(f"the configuration in {folder.name} cannot be read: {error}") from error
        causes = changes.get("causes", ())
        todo = find_remaining(reader, failed="failed" in changes, causes=causes)
        if causes and not todo.failed and not todo.unfinished.lost:
            raise UsageError(_describe_unknown_cause(reader, causes))
        again = len(reader.failed_rollouts())
        left = bool(todo.unfinished.groups) or summary.left > 0
        if left:
            from rookery.cli.tasks_cache import lock_cached_tasks

            lock_cached_tasks(reader.tasks(), config.stream)
    if not summary.tasks:
        raise UsageError(
            f"{folder.name} was stopped before its tasks were known: start it again with `rookery run`"
        )
    if not left:
        return _report_finished(summary, events, again)
    path = config.stream.get("path")
    if isinstance(path, str) and path not in sys.path:
        sys.path.append(path)
    if policy:
        upstream = config.upstreams.get("policy")
        assert upstream is not None
        urls = tuple(map(absolute_address, policy))
        changes["upstreams"] = {**config.upstreams, "policy": msgspec.structs.replace(upstream, urls=urls)}
    pin_blas_threads(changes.get("runners", config.runners))
    engine = Engine.resume(folder, **changes)

    def about(engine: Engine) -> RunStart:
        return RunStart(
            run=folder,
            environment=engine.environment.title,
            model=engine.config.upstreams["policy"].model,
            tasks=summary.tasks,
            invalid=0,
            k=int(engine.config.stream.get("k", 1)),
            concurrency=engine.config.concurrency,
            runners=engine.config.runners,
            done=summary.stats.rollouts - len(todo.failed) - len(todo.unfinished.lost),
            resumed=True,
        )

    k = int(config.stream.get("k", 1))
    run = ForegroundRun(engine, open_progress(events), tasks=None, k=k, about=about)
    run.run()
    return report_run(run, events)


def _describe_unknown_cause(reader: "RunReader", causes: tuple[str, ...]) -> str:
    known = Counter(one.cause for one in reader.failed_rollouts())
    found = ", ".join(f"{cause} ({count})" for cause, count in known.most_common())
    return f"no rollout of {reader.folder.name} that can run again failed with {' or '.join(causes)}; " + (
        f"its causes are {found}" if found else "none failed"
    )


def _report_finished(summary: "Summary", events: "JsonLines | None", again: int) -> int:
    """Report that nothing is left to run, print the summary and return the exit code.

    `again` is the number of failed rollouts that `--failed` would run again.
    """
    from rookery.cli.summary import print_summary
    from rookery.cli.terminal import plural

    code = Exit.FAILED if summary.stats.failed else Exit.OK
    if events is not None:
        events.write("finished", **summary.plain(), failed_can_run_again=again, exit_code=int(code))
        return code
    name, stats = Path(summary.path).name, summary.stats
    text = f"{name} is finished: nothing is left to run"
    if again:
        text += f", but {plural(again, 'rollout')} failed: `rookery resume {name} --failed` runs failed ones again"
    elif stats.failed:
        text += f"; {plural(stats.failed, 'rollout')} failed on rows that are not valid tasks and would fail again"
    click.echo(f"{text}\n", err=True)
    print_summary(summary)
    return code
