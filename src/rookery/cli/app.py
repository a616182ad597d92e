"""The group of commands. Knows their names and one line about each; imports a command when it is called."""

import os
import sys
from importlib import import_module
from typing import Any, Final

import click

import rookery
from rookery.cli.errors import guarded

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "demo": ("rookery.cli.demo:demo", "Run real rollouts here and now, offline."),
    "run": ("rookery.cli.run:run", "Run an environment over tasks."),
    "resume": ("rookery.cli.resume:resume", "Go on with a run that was stopped."),
    "ls": ("rookery.cli.ls:ls", "List the runs."),
    "show": ("rookery.cli.show:show", "Show a run, or one of its rollouts."),
    "export": ("rookery.cli.export:export", "Write a run as JSONL, CSV or Parquet."),
    "init": ("rookery.cli.init:init", "Make a first environment that runs."),
    "tasks": ("rookery.cli.tasks:tasks", "List, show and convert tasks."),
    "validate": ("rookery.cli.validate:validate", "Try whether tasks can be solved, and not be cheated."),
    "exec": ("rookery.cli.exec:exec_", "Run one command in a sandbox."),
    "images": ("rookery.cli.images:images", "List, fetch, import and prune images for sandboxes."),
    "doctor": ("rookery.cli.doctor:doctor", "Say what this machine can isolate, and what is missing."),
    "reap": ("rookery.cli.reap:reap", "End sandboxes whose owner is gone."),
    "gateway": ("rookery.cli.gateway:gateway", "Serve a door that records model calls."),
    "serve-code": ("rookery.cli.serve_code:serve_code", "Run programs for others, over HTTP."),
    "serve-embedded": ("rookery.cli.serve_embedded:serve_embedded", "Serve the embedded policy over HTTP."),
}

COMPLETE: Final = "_ROOKERY_COMPLETE"

HELP: Final = """Runs LLM agents through tasks, thousands of times, and keeps what happened.

\b
  rookery demo                                             see it run, offline
  rookery init mine                                        make an environment
  rookery run mine/mine.py --policy URL                    run it
  rookery show latest                                      look at what it did
"""

EPILOG: Final = """\b
Exit codes: 0 fine, 1 a bug of ours, 2 something was wrong before the start,
3 some rollouts failed, 4 stopped under way (disk, breaker), 130 interrupted
(143 by SIGTERM). Keys are read from ROOKERY_API_KEY or OPENAI_API_KEY.
"""


class Lazy(click.Group):
    """Imports the command that is asked for, and no other."""

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
    cls=Lazy,
    help=HELP,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(rookery.__version__, prog_name="rookery", message="%(prog)s %(version)s")
@click.pass_context
def app(ctx: click.Context) -> None:
    from rookery.cli.text import colours_wanted

    ctx.color = colours_wanted()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run_app(args: list[str] | None = None) -> int:
    """Runs the command line to its exit code."""

    def call() -> int:
        if COMPLETE in os.environ:
            app.main(args, prog_name="rookery")
        # Not `app.main`: it answers a closed pipe by itself, with an exit code that says a bug of ours.
        with app.make_context("rookery", sys.argv[1:] if args is None else list(args)) as ctx:
            code = app.invoke(ctx)
        return code if isinstance(code, int) else 0

    return guarded(call)
