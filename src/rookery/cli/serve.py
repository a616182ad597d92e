"""`rookery serve`: run rollouts for another trainer, in the protocol that the trainer speaks.

Guarantees:
- a port in use, a missing package or an invalid setting is reported in one sentence, with exit code 2;
- the URL is printed when the server accepts connections;
- Ctrl-C and SIGTERM cancel running rollouts and remove their sandboxes; the exit code is 0.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.options import Number, PluginName, option, parse_variables, run_options

if TYPE_CHECKING:
    from rookery.adapters.rollout_service import RolloutServer, RolloutService
    from rookery.engine import Engine

_HELP = """Run rollouts of ENV for another trainer, which sends one task per request.

\b
  rookery serve ENV --protocol verifiers --package DIR    write what prime-rl needs: a taskset package
  rookery serve ENV --protocol verifiers                  serve prime-rl
  rookery serve ENV --protocol nemo-gym --policy URL      serve NeMo Gym and NeMo RL
  rookery serve ENV --protocol openenv                    serve clients of OpenEnv, which are the policy

The protocols have no keys: let the server listen only where nobody else can connect. Other options are those of
`rookery run`. Sampling parameters of a request override the options.
"""


@click.command("serve", help=_HELP, short_help="Run rollouts for another trainer.")
@run_options
@option(
    "--protocol",
    "--speak",
    "protocol",
    type=PluginName("servers"),
    required=True,
    help="Protocol of the trainer.",
)
@option("--host", metavar="HOST", default="127.0.0.1", help="Address to listen on.")
@option(
    "--port",
    metavar="PORT",
    type=Number(int, 0, 65535),
    help="Port to listen on; 0 picks a free one.  [default: the usual one of the protocol]",
)
@option("--queue", type=Number(int, 1), default=4096, help="Maximum number of running and waiting requests.")
@option(
    "--trainer-tokenizer",
    metavar="PATH",
    default="",
    help="Tokenizer of the trainer, a directory or a hub name: a policy with another one is refused.",
)
@option(
    "--trainer-context",
    metavar="TOKENS",
    type=Number(int, 1),
    help="Length of the longest sequence that the trainer takes. Rollouts end as truncated at this length.",
)
@option(
    "--package",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the tasks and the configuration that the trainer needs into DIR, and exit.",
)
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    protocol: str,
    host: str,
    port: int | None,
    queue: int,
    trainer_tokenizer: str,
    trainer_context: int | None,
    package: Path | None,
    **values: Any,
) -> int:
    import asyncio
    from importlib.metadata import entry_points

    from rookery.adapters.rollout_service import RolloutService
    from rookery.cli.config import build_engine_config, get_table
    from rookery.cli.run import pin_blas_threads, select_tasks
    from rookery.engine.config import refuse_cached_training
    from rookery.engine.processes import new_event_loop
    from rookery.environments import load_environment
    from rookery.gateway.chat_renderers.tokenizer import open_tokenizer

    values["variables"] = parse_variables(values["variable"], get_table(ctx, "variables"))
    values["per_task"] = 1
    config = build_engine_config(ctx, values)
    refuse_cached_training(config.cache)
    server: RolloutServer = entry_points(group="rookery.servers")[protocol].load()()
    port = server.default_port if port is None else port
    if package is not None:
        environment = load_environment(config.environment, **config.arguments)
        tasks = list(select_tasks(environment, values))
        url = f"{server.scheme}://{host}:{port}"
        for path in server.write_package(tasks, package, environment.title, url):
            click.echo(path)
        return 0
    pin_blas_threads(config.runners)
    tokenizer = open_tokenizer(trainer_tokenizer) if trainer_tokenizer else None
    service = RolloutService(
        config,
        out=values["out"],
        queue=queue,
        tokenizer=tokenizer,
        context=trainer_context,
        on_engine=_MetricsAddresses().show,
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(server, service, host, port))
    return 0


serve.params = [one for one in serve.params if one.name not in ("json", "dry_run", "per_task")]  # of `run` alone


class _MetricsAddresses:
    """Prints the address of each engine's metrics once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, engine: "Engine") -> None:
        from rookery.cli.terminal import write_line

        if engine.metrics_url and engine.metrics_url not in self._shown:
            self._shown.add(engine.metrics_url)
            write_line(f"metrics at {engine.metrics_url}", err=False)


async def _serve(server: "RolloutServer", service: "RolloutService", host: str, port: int) -> None:
    import asyncio
    import logging
    import signal

    from rookery.cli.terminal import write_line

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with service:

        def ready(url: str) -> None:
            write_line(f"serving {service.environment.title} to {server.name} at {url}", err=False)

        await server.serve(service, host, port, ready, stop)
