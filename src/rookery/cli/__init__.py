"""The command line.

Promises:
- a usage error is one clear sentence that says what to do next, and exit code 2; a traceback never reaches a user
  for it;
- exit codes: 0 fine, 1 our own bug, 2 anything wrong before the first admission, 3 some rollouts failed, 4 stopped
  under way (disk, breaker), 130 interrupted (143 by SIGTERM);
- what a run is told on the command line goes over environment variables, these over `rookery.toml`, that over
  defaults; `--dry-run` shows each value with its origin and starts nothing;
- with `--json` every line of stdout is one JSON object, whatever the environment's own code prints;
- `rookery --help` imports click and nothing heavier; each command imports what it needs when it is called;
- keys come from the environment alone: never an option, never printed, never journaled.
"""

__all__ = ["main"]


def main() -> int:
    """The console script."""
    from rookery.cli.app import run_app

    return run_app()
