"""`rookery serve-embedded`: the embedded policy over HTTP.

Promises:
- what cannot be served (a port in use, broken weights) is one sentence and exit code 2;
- the line that says where it serves comes when it does;
- Ctrl-C and SIGTERM end it within seconds, answers under way or not, with exit code 0.
"""

from typing import TYPE_CHECKING

import click

from rookery.cli.options import Number

if TYPE_CHECKING:
    from rookery.upstreams.embedded.server import EmbeddedServer

_HELP = """Serves the embedded policy as OpenAI-compatible chat completions and completions, streaming too.

Any OpenAI client can be tried against it. A request may ask for token ids (`return_token_ids`) and logprobs; every
answer carries the version of the weights that drew it. There is no key and no encryption: it is meant for this
machine.
"""


@click.command("serve-embedded", help=_HELP, short_help="Serve the embedded policy over HTTP.")
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="The address to serve at.")
@click.option(
    "--port",
    metavar="PORT",
    type=Number(int, 0, 65535),
    default=8000,
    show_default=True,
    help="The port; 0 picks one that is free.",
)
@click.option(
    "--weights",
    metavar="PATH",
    help="A file or folder of weights; when it is replaced, the new ones answer from then on.  [default: its own]",
)
@click.option(
    "--places",
    metavar="N",
    type=Number(int, 1, 64),
    default=64,
    show_default=True,
    help="Answers sampled at once; others wait in order.",
)
@click.option(
    "--allow-updates",
    is_flag=True,
    help="Let other machines POST /update_weights too: without a key, whoever reaches the port can then swap the "
    "weights and have files of this machine read as weights.",
)
@click.option("--verbose", is_flag=True, help="A line on stderr for every request.")
def serve_embedded(
    host: str,
    port: int,
    weights: str | None,
    places: int,
    allow_updates: bool,
    verbose: bool,
) -> int:
    import asyncio
    import os

    from rookery.core.blas_threads import one_blas_thread

    os.environ.update(one_blas_thread(os.environ))  # its clients run beside it; small products gain nothing
    from rookery.engine.processes import new_event_loop
    from rookery.upstreams import UpstreamConfig
    from rookery.upstreams.embedded import EmbeddedUpstream
    from rookery.upstreams.embedded.server import EmbeddedServer

    where = f"embedded:{weights}" if weights else "embedded"

    async def main() -> None:
        upstream = EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=(where,), concurrency=places))
        try:
            server = EmbeddedServer(upstream, allow_updates=allow_updates)
            await _serve(server, host, port, verbose)
        finally:
            await upstream.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
    return 0


async def _serve(server: "EmbeddedServer", host: str, port: int, verbose: bool) -> None:
    import asyncio
    import logging
    import signal

    from rookery.cli.terminal import write_line
    from rookery.upstreams.embedded.http_server import listening
    from rookery.upstreams.listeners import is_loopback

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    access = logging.getLogger("rookery.access") if verbose else None
    if access is not None:
        access.setLevel(logging.INFO)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def stopped() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one ends it at once
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped)
    async with listening(server, host, port, access_log=access, refuse_foreign_pages=is_loopback(host)) as url:
        llama = server.upstream.service.llama
        size = f"{llama.shape.parameters / 1e6:.2f} M parameters, context {llama.context}"
        write_line(f"serving {server.upstream.model} ({size}) at {url}", err=False)
        near = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        write_line(f"try: rookery run arithmetic --policy {near} -n 20 -k 4", err=False)
        await stop.wait()
