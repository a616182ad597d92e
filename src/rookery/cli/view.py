"""`rookery view`: serve a web page that shows runs, or write it to a file."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rookery.cli.config import find_runs_folder, runs_option
from rookery.cli.options import Number, option
from rookery.core import UsageError

if TYPE_CHECKING:
    from rookery.view.export import Selection
    from rookery.view.runs import ViewedRun

_HELP = """Serve a web page on this machine that shows runs: curves, rollouts, groups, transcripts and tokens.

Without RUN, it shows all runs and training runs in the directory of runs, and updates while they run. Nothing is
written to a run. The page is served on the loopback interface and needs the key in the printed URL; from another
machine, forward the port: `ssh -L 7788:127.0.0.1:7788 HOST`.

With --export, write one HTML file instead, which needs no server. -n, --failed, --label, --task and --rollout
choose the rollouts in it.
"""


@click.command(help=_HELP, short_help="Look at runs in the browser.")
@click.argument("names", metavar="[RUN...]", nargs=-1)
@option("--port", metavar="PORT", type=Number(int, 0, 65535), default=7788, help="Port; 0 picks a free one.")
@option("--open", "open_browser", is_flag=True, help="Open the page in the default browser.")
@option("--tokenizer", metavar="PATH", default="", help="Tokenizer for the texts of tokens.  [default: the run's]")
@option("--export", "export", metavar="FILE", help="Write one HTML file instead of serving the page.")
@option("--rollout", "rollouts", metavar="ID", multiple=True, help="With --export: this rollout. Repeatable.")
@option("--failed", is_flag=True, help="With --export: only rollouts that failed.")
@option("--label", metavar="L", help="With --export: only rollouts with this outcome.")
@option("--task", metavar="ID", help="With --export: only rollouts of this task.")
@option("-n", "count", type=Number(int, 1), default=100, help="With --export: maximum number of rollouts.")
@runs_option
def view(
    names: tuple[str, ...],
    port: int,
    open_browser: bool,
    tokenizer: str,
    export: str | None,
    rollouts: tuple[str, ...],
    failed: bool,
    label: str | None,
    task: str | None,
    count: int,
    root: str | None,
) -> int:
    import asyncio

    from rookery.view.export import Selection
    from rookery.view.runs import find_viewed_run

    folder = find_runs_folder(root)
    runs = [find_viewed_run(name, folder) for name in names]
    if export is None:
        if rollouts or failed or label is not None or task is not None:
            raise UsageError(
                "--rollout, --failed, --label and --task choose what --export writes: add --export FILE"
            )
        return asyncio.run(_serve(folder, runs, port, tokenizer, open_browser))
    if len(runs) != 1:
        raise UsageError("--export writes one run: name it, for example `rookery view latest --export run.html`")
    selection = Selection(
        rollouts=tuple(one.removeprefix("r") for one in rollouts),
        failed=failed,
        label=label,
        task=task,
        count=count,
    )
    return _export(runs[0], Path(export), selection, tokenizer)


def _export(run: "ViewedRun", target: Path, selection: "Selection", tokenizer: str) -> int:
    from rookery.cli.terminal import format_bytes, plural
    from rookery.view.data import RunData
    from rookery.view.export import export_html

    with RunData(run, run.journals[0] if run.journals else None, tokenizer=tokenizer) as data:
        written = export_html(data, target, selection)
    click.echo(f"{target}  {plural(written, 'rollout')}, {format_bytes(target.stat().st_size)}")
    return 0


async def _serve(root: Path, runs: "list[ViewedRun]", port: int, tokenizer: str, open_browser: bool) -> int:
    import asyncio
    import signal

    from rookery.view.catalogue import Catalogue
    from rookery.view.server import ViewServer

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with ViewServer(Catalogue(root, runs, tokenizer=tokenizer), port=port) as server:
        click.echo(server.url)
        click.echo("press Ctrl-C to stop", err=True)
        if open_browser:
            await asyncio.to_thread(click.launch, server.url)
        await stop.wait()
    return 0
