"""The command line interface.

Guarantees:
- a usage error is one sentence that says what to do next, with exit code 2 and without a traceback;
- exit codes: 0 success, 1 internal error, 2 error before the first rollout, 3 some rollouts failed, 4 run stopped
  (disk full, circuit breaker), 130 interrupted (143 by SIGTERM);
- the command line overrides environment variables, which override `rookery.toml`, which overrides defaults;
  `--dry-run` shows each value with its origin and starts nothing;
- with `--json` every line of stdout is one JSON object, even if the environment prints something;
- `rookery --help` imports click and nothing heavier; each command imports what it needs when it is called;
- API keys come from environment variables only: they are never an option, never printed, never journaled.
"""

__all__ = ["main"]


def main() -> int:
    """Run the console script `rookery`."""
    from rookery.cli.app import run_app

    return run_app()
