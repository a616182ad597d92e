"""`rookery serve-code`: runs programs for whoever asks over HTTP.

Promises:
- what cannot be served (a port in use, a machine that cannot isolate) is one sentence and exit code 2;
- the line that says where it serves comes when it does;
- the key is read from an environment variable and is in no argument and no log; without one, it serves this
  machine only;
- Ctrl-C and SIGTERM let what is under way end, for a bounded time, and leave nothing, with exit code 0.
"""

from typing import TYPE_CHECKING

import click

from rookery.cli.options import UNSAFE, Number, Size

if TYPE_CHECKING:
    from rookery.core import SandboxSpec
    from rookery.scoring.programs import ProgramLimits

KEY_ENV = "ROOKERY_CODE_KEY"
HELD_BYTES = 8 << 30
"""Limit on the bytes of all unfinished requests together."""

_HELP = f"""Runs programs for whoever asks: POST /run_code, each in a sandbox of its own, results in order.

\b
  curl -s localhost:8700/run_code -d '{{"programs": [{{"source": "print(6 * 7)"}}]}}'

Clients send the key of {KEY_ENV} as `Authorization: Bearer KEY`. Without a key only this machine is served.
"""


@click.command("serve-code", help=_HELP, short_help="Run programs for others, over HTTP.")
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="The address to serve at.")
@click.option(
    "--port",
    metavar="PORT",
    type=Number(int, 0, 65535),
    default=8700,
    show_default=True,
    help="The port; 0 picks one that is free.",
)
@click.option(
    "--concurrency",
    metavar="N",
    type=Number(int, 1, 4096),
    help="Sandboxes at once.  [default: four for each core]",
)
@click.option(
    "--queue",
    metavar="N",
    type=Number(int, 1),
    default=10_000,
    show_default=True,
    help="Programs under way and waiting; more are answered 429.",
)
@click.option("--sandbox", metavar="PROVIDER", envvar="ROOKERY_SANDBOX", default="", help="Where programs run.")
@click.option("--image", metavar="I", envvar="ROOKERY_IMAGE", help="What a sandbox's files are made from.")
@click.option("--key-env", metavar="NAME", default=KEY_ENV, show_default=True, help="The variable with the key.")
@click.option(
    "--max-wall",
    metavar="S",
    type=Number(float, 0, above=True),
    default=300,
    show_default=True,
    help="The most seconds that a request may ask for.",
)
@click.option(
    "--max-memory",
    metavar="SIZE",
    type=Size(1 << 20),
    default="4G",
    show_default=True,
    help="The most memory that a request may ask for.",
)
@click.option(
    "--drain",
    metavar="S",
    type=Number(float, 0),
    default=30,
    show_default=True,
    help="Seconds for what is under way at the end.",
)
@click.option("--unsafe", is_flag=True, envvar="ROOKERY_UNSAFE", help=UNSAFE)
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
    unsafe: bool,
) -> int:
    import asyncio
    import os

    from rookery.core import SandboxSpec, UsageError
    from rookery.engine.processes import new_event_loop
    from rookery.scoring.programs import ProgramLimits
    from rookery.upstreams.listening import is_loopback

    key = os.environ.pop(key_env, "").strip()
    if not key and not is_loopback(host):
        raise UsageError(
            f"--host {host} can be reached by others, who could then run programs here: set a key in {key_env}"
        )
    spec = SandboxSpec(provider=sandbox, image=image, untrusted_ok=unsafe)
    ceiling = ProgramLimits(wall=max_wall, cpu=max_wall, memory=max_memory)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(spec, ceiling, host, port, concurrency, queue, key, drain))
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
) -> None:
    import asyncio
    import logging
    import signal

    from rookery.cli.text import tell
    from rookery.gateway.quotas import Quota
    from rookery.gateway.server import Server
    from rookery.sandboxes import is_isolated
    from rookery.scoring.running import Programs
    from rookery.scoring.serving import CodeService
    from rookery.upstreams.listening import bound

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Programs(spec, concurrency=concurrency) as programs:
        service = CodeService(programs, key=key, queue=queue, ceiling=ceiling)
        sock = bound(host, port)
        try:
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{sock.getsockname()[1]}"
            server = Server(
                service.handle,
                service.admit,
                worded=service.worded,
                failure=service.failure,
                quota=Quota(bytes=HELD_BYTES),
            )
            await server.listen(sock)
        except BaseException:
            sock.close()
            raise
        try:
            provider = programs.spec.provider
            walls = "" if is_isolated(provider) else ", WITHOUT isolation: programs run as you, on your files"
            tell(f"serving at {url} ({provider} sandboxes, {programs.concurrency} at once{walls})", err=False)
            await stop.wait()
        finally:
            service.stopping = True
            await server.close(grace=drain)
