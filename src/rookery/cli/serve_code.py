"""`rookery serve-code`: serve code execution over HTTP.

Guarantees:
- a port in use or a machine without isolation is reported in one sentence, with exit code 2;
- the URL is printed when the server accepts connections;
- the key that clients need is read from an environment variable and is in no argument and no log; without a key,
  only clients on this machine are served;
- Ctrl-C and SIGTERM let running programs finish for a bounded time, then remove everything; the exit code is 0.
"""

from typing import TYPE_CHECKING

import click

from rookery.cli.options import LOG_FORMAT, METRICS, UNSAFE, Number, Size, listen_options, option

if TYPE_CHECKING:
    from rookery.core import SandboxSpec
    from rookery.scoring.programs import ProgramLimits
    from rookery.telemetry.logs import LogFormat

KEY_ENV = "ROOKERY_CODE_KEY"
MAX_UNFINISHED_BYTES = 8 << 30
"""Maximum size in bytes of all unfinished requests together."""

_HELP = f"""Serve code execution: POST /run_code runs each program in its own sandbox.

\b
  curl -s localhost:8700/run_code -d '{{"programs": [{{"source": "print(6 * 7)"}}]}}'

Clients send the key in {KEY_ENV} as `Authorization: Bearer KEY`. Without a key only this machine is served.
"""


@click.command("serve-code", help=_HELP, short_help="Serve code execution over HTTP.")
@listen_options(8700)
@option("--concurrency", type=Number(int, 1, 4096), help="Concurrent sandboxes.  [default: four per core]")
@option(
    "--queue",
    type=Number(int, 1),
    default=10_000,
    help="Maximum number of running and waiting programs; further requests get HTTP 429.",
)
@option("--sandbox", metavar="PROVIDER", envvar="ROOKERY_SANDBOX", default="", help="Sandbox provider.")
@option("--image", metavar="I", envvar="ROOKERY_IMAGE", help="Image of the sandboxes.")
@option("--key-env", metavar="NAME", default=KEY_ENV, help="Environment variable that holds the key.")
@option(
    "--max-wall",
    metavar="S",
    type=Number(float, 0, above=True),
    default=300,
    help="Maximum time limit of a request, in seconds.",
)
@option("--max-memory", type=Size(1 << 20), default="4G", help="Maximum memory limit of a request.")
@option(
    "--drain",
    metavar="S",
    type=Number(float, 0),
    default=30,
    help="Seconds that running programs get to finish at shutdown.",
)
@METRICS
@LOG_FORMAT
@option("--unsafe", is_flag=True, envvar="ROOKERY_UNSAFE", help=UNSAFE)
def serve_code(
    host: str,
    port: int,
    concurrency: int | None,
    queue: int,
    sandbox: str,
    image: str | None,
    key_env: str,
    max_wall: float,
    max_memory: int,
    drain: float,
    metrics: str | None,
    log_format: "LogFormat",
    unsafe: bool,
) -> int:
    import asyncio
    import os

    from rookery.core import SandboxSpec, UsageError
    from rookery.engine.processes import new_event_loop
    from rookery.scoring.programs import ProgramLimits
    from rookery.upstreams.listeners import is_loopback

    key = os.environ.pop(key_env, "").strip()
    if not key and not is_loopback(host):
        raise UsageError(f"--host {host} is reachable from other machines: set a key in {key_env}")
    spec = SandboxSpec(provider=sandbox, image=image, untrusted_ok=unsafe)
    ceiling = ProgramLimits(wall=max_wall, cpu=max_wall, memory=max_memory)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(spec, ceiling, host, port, concurrency, queue, key, drain, metrics, log_format))
    return 0


async def _serve(
    spec: "SandboxSpec",
    ceiling: "ProgramLimits",
    host: str,
    port: int,
    concurrency: int | None,
    queue: int,
    key: str,
    drain: float,
    metrics: str | None,
    log_format: "LogFormat",
) -> None:
    import asyncio
    import logging
    import signal

    from rookery.cli.metrics import serve_metrics
    from rookery.cli.terminal import write_line
    from rookery.gateway.quotas import Quota
    from rookery.gateway.server import Server
    from rookery.sandboxes import is_isolated
    from rookery.scoring.code_service import CodeService
    from rookery.scoring.program_runner import ProgramRunner
    from rookery.telemetry import REGISTRY
    from rookery.telemetry.logs import set_log_format
    from rookery.upstreams.listeners import bind_listener

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    set_log_format(log_format, process="serve-code")
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with ProgramRunner(spec, concurrency=concurrency) as programs:
        service = CodeService(programs, key=key, queue=queue, ceiling=ceiling)
        REGISTRY.collectors.append(service.collect_metrics)
        sock = bind_listener(host, port)
        try:
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{sock.getsockname()[1]}"
            server = Server(
                service.handle,
                service.admit,
                format_error=service.encode_error,
                internal_error=service.failure,
                quota=Quota(bytes=MAX_UNFINISHED_BYTES),
            )
            await server.listen(sock)
        except BaseException:
            sock.close()
            raise
        try:
            provider = programs.spec.provider
            isolation = "" if is_isolated(provider) else ", WITHOUT isolation: programs run as your user"
            write_line(
                f"serving at {url} ({provider} sandboxes, {programs.concurrency} at once{isolation})", err=False
            )
            async with serve_metrics(metrics, service.metrics_page):
                await stop.wait()
        finally:
            service.stopping = True
            await server.close(grace=drain)
