"""The command group `rookery`: names and summaries of its commands. Each is imported only when it is called."""

import os
import sys
from importlib import import_module
from typing import Any, Final

import click

import rookery
from rookery.cli.errors import run_with_exit_code

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "demo": ("rookery.cli.demo:demo", "Run a short demonstration, offline."),
    "run": ("rookery.cli.run:run", "Run an environment over tasks."),
    "resume": ("rookery.cli.resume:resume", "Continue a stopped run."),
    "rescore": ("rookery.cli.rescore:rescore", "Grade the rollouts of a run again."),
    "train": ("rookery.cli.train:train", "Train a policy on an environment."),
    "ls": ("rookery.cli.ls:ls", "List the runs."),
    "show": ("rookery.cli.show:show", "Show a run, or one of its rollouts."),
    "view": ("rookery.cli.view:view", "Look at runs in the browser."),
    "compare": ("rookery.cli.compare:compare", "Compare two runs, paired by task."),
    "plot": ("rookery.cli.plot:plot", "Draw the curves of runs as PNG and SVG, or in the terminal."),
    "export": ("rookery.cli.export:export", "Write a run as JSONL, CSV or Parquet."),
    "import": ("rookery.cli.export:import_", "Write trajectories of other programs as a run."),
    "init": ("rookery.cli.init:init", "Create a first environment."),
    "tasks": ("rookery.cli.tasks:tasks", "List, show and convert tasks."),
    "validate": ("rookery.cli.validate:validate", "Check that tasks can be solved and cannot be cheated."),
    "exec": ("rookery.cli.exec:exec_", "Run one command in a sandbox."),
    "images": ("rookery.cli.images:images", "List, pull, import and prune sandbox images."),
    "doctor": ("rookery.cli.doctor:doctor", "Check which sandboxes work on this machine."),
    "plugins": ("rookery.cli.plugins:plugins", "List the installed plug-ins."),
    "reap": ("rookery.cli.reap:reap", "Remove sandboxes of dead processes."),
    "gateway": ("rookery.cli.gateway:gateway", "Serve the gateway, which records model calls."),
    "metrics": ("rookery.cli.metrics:metrics", "List the metrics for Prometheus, or print a Grafana dashboard."),
    "serve": ("rookery.cli.serve:serve", "Run rollouts for another trainer."),
    "serve-code": ("rookery.cli.serve_code:serve_code", "Serve code execution over HTTP."),
    "serve-embedded": ("rookery.cli.serve_embedded:serve_embedded", "Serve the embedded policy over HTTP."),
}

COMPLETE: Final = "_ROOKERY_COMPLETE"

HELP: Final = """Run LLM agents through tasks in sandboxes and record token-exact, scored trajectories.

\b
  rookery demo                                             run a demonstration, offline
  rookery init mine                                        create an environment
  rookery run mine/mine.py --policy URL                    run it
  rookery show latest                                      show the results
  rookery view                                             look at the runs in the browser
"""

EPILOG: Final = """\b
Exit codes: 0 success, 1 internal error, 2 usage error before the start,
3 some rollouts failed, 4 run stopped early (disk full, too many failed attempts),
130 interrupted (143 by SIGTERM). API keys are read from ROOKERY_API_KEY or
OPENAI_API_KEY.
"""


class LazyGroup(click.Group):
    """A click group that imports only the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, _, attr = COMMANDS[cmd_name][0].partition(":")
        found: click.Command = getattr(import_module(module), attr)
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1, 0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"there is no command {args[0]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    help=HELP,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(rookery.__version__, prog_name="rookery", message="%(prog)s %(version)s")
@click.pass_context
def app(ctx: click.Context) -> None:
    from rookery.cli.terminal import color_setting

    ctx.color = color_setting()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run_app(args: list[str] | None = None) -> int:
    """Run the command line with `args`, by default those of this process, and return the exit code."""

    def call() -> int:
        if COMPLETE in os.environ:
            app.main(args, prog_name="rookery")
        # Not `app.main`: on a closed pipe it exits with 1, which is our code for an internal error.
        with app.make_context("rookery", sys.argv[1:] if args is None else list(args)) as ctx:
            code = app.invoke(ctx)
        return code if isinstance(code, int) else 0

    return run_with_exit_code(call)
