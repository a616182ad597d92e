"""The command line interface `rookery`.

Guarantees:
- a usage error is one sentence that says what to do next, with exit code 2 and without a traceback;
- exit codes: 0 success, 1 internal error, 2 error before the first rollout, 3 some rollouts failed, 4 run stopped
  early (for example by a full disk, or because too many attempts failed), 130 interrupted (143 by SIGTERM);
- the command line overrides environment variables, which override `rookery.toml`, which overrides defaults;
  `--dry-run` shows each value with its origin and starts nothing;
- with `--json` every line of stdout is one JSON object, even if the environment prints something;
- `rookery --help` imports click and nothing heavier; each command imports what it needs when it is called;
- API keys come from environment variables only: no option takes one, and they are never printed or written to a
  run's journal.
"""

__all__ = ["main"]


def main() -> int:
    """Run the command line `rookery` with the arguments of this process and return the exit code."""
    from rookery.cli.app import run_app

    return run_app()
