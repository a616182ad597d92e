"""`rookery resume`: goes on with a run.

Promises:
- finished rollouts are kept, unfinished ones run again, nothing counts twice;
- a run that another process is writing is refused at once; so is one of a newer format;
- a run with nothing left to do says so, and its exit code is that of its records.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.config import runs_folder, runs_option
from rookery.cli.errors import Exit
from rookery.cli.options import Number
from rookery.core import RookeryError, UsageError

if TYPE_CHECKING:
    from rookery.cli.progress import JsonLines
    from rookery.cli.summary import Summary

_HELP = """Goes on with RUN: finished rollouts are kept, the others run.

RUN is a folder, its name, a beginning or an end of its name, or `latest`. The run's own settings apply; the
options here change them for the rest of it.
"""


@click.command(help=_HELP, short_help="Go on with a run that was stopped.")
@click.argument("name", metavar="RUN")
@click.option("--policy", metavar="URL", multiple=True, help="The model server, if it has moved.")
@click.option("-c", "--concurrency", metavar="N", type=Number(int, 1), help="Rollouts under way at once.")
@click.option("--runners", metavar="N", type=Number(int, 0), help="Runner processes; 0: in this process.")
@click.option("--json", is_flag=True, help="Events as JSON, one a line, on stdout.")
@runs_option
def resume(
    name: str,
    policy: tuple[str, ...],
    concurrency: int | None,
    runners: int | None,
    json: bool,
    root: str | None,
) -> int:
    from rookery.cli.progress import JsonLines

    events = JsonLines() if json else None
    try:
        changes = {"concurrency": concurrency, "runners": runners}
        return _resume(
            name, root, policy, {key: value for key, value in changes.items() if value is not None}, events
        )
    except RookeryError as error:
        if events is not None:
            events.write("error", detail=str(error), exit_code=2)
        raise


def _resume(
    name: str, root: str | None, policy: tuple[str, ...], changes: dict[str, Any], events: "JsonLines | None"
) -> int:
    import msgspec

    from rookery.cli.drive import Drive, finish
    from rookery.cli.progress import Start, open_progress
    from rookery.cli.run import pin_blas_threads
    from rookery.cli.summary import read_summary
    from rookery.engine import Engine, EngineConfig
    from rookery.journal import RunReader, find_run, open_lock
    from rookery.upstreams import settled

    folder = find_run(name, runs_folder(root))
    with RunReader(folder) as reader:  # refuses a newer format before anything is touched
        open_lock(folder).close()  # a run that is being written is refused before anything else is asked
        summary = read_summary(reader)
        try:
            config = msgspec.convert(reader.config(), EngineConfig)
        except msgspec.ValidationError as error:
            raise UsageError(f"the configuration in {folder.name} cannot be read: {error}") from error
        left = bool(reader.unfinished().groups) or summary.left > 0
        if left:
            from rookery.cli.tasks_cache import hold_tasks

            hold_tasks(reader.tasks(), config.stream)
    if not summary.tasks:
        raise UsageError(
            f"{folder.name} was stopped before its tasks were known: start it again with `rookery run`"
        )
    if not left:
        return _nothing_left(summary, events)
    path = config.stream.get("path")
    if isinstance(path, str) and path not in sys.path:
        sys.path.append(path)
    if policy:
        upstream = config.upstreams.get("policy")
        assert upstream is not None
        urls = tuple(map(settled, policy))
        changes["upstreams"] = {**config.upstreams, "policy": msgspec.structs.replace(upstream, urls=urls)}
    pin_blas_threads(changes.get("runners", config.runners))
    engine = Engine.resume(folder, **changes)

    def about(engine: Engine) -> Start:
        return Start(
            run=folder,
            environment=engine.environment.title,
            model=engine.config.upstreams["policy"].model,
            tasks=summary.tasks,
            invalid=0,
            k=int(engine.config.stream.get("k", 1)),
            concurrency=engine.config.concurrency,
            runners=engine.config.runners,
            done=summary.stats.rollouts,
            resumed=True,
        )

    k = int(config.stream.get("k", 1))
    drive = Drive(engine, open_progress(events), tasks=None, k=k, about=about)
    drive.run()
    return finish(drive, events)


def _nothing_left(summary: "Summary", events: "JsonLines | None") -> int:
    from rookery.cli.summary import print_summary

    code = Exit.FAILED if summary.stats.failed else Exit.OK
    if events is not None:
        events.write("finished", **summary.plain(), exit_code=int(code))
    else:
        click.echo(f"{Path(summary.path).name} is finished: nothing is left to run\n", err=True)
        print_summary(summary)
    return code
