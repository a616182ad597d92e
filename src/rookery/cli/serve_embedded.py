"""`rookery serve-embedded`: serve the embedded policy (a small built-in model) over HTTP.

Guarantees:
- a port in use or invalid weights are reported in one sentence, with exit code 2;
- the URL is printed when the server accepts connections;
- Ctrl-C and SIGTERM stop the server within seconds, even during replies, with exit code 0.
"""

from typing import TYPE_CHECKING

import click

from rookery.cli.options import LOG_FORMAT, METRICS, Number, listen_options, option

if TYPE_CHECKING:
    from rookery.telemetry.logs import LogFormat
    from rookery.upstreams.embedded.server import EmbeddedServer

_HELP = """Serve the embedded policy with the OpenAI API: chat completions and completions, also streamed.

A request can ask for token IDs (`return_token_ids`) and log probabilities. Every reply contains the version of the
weights that sampled it. The server has no API key and no encryption: use it on this machine only.
"""


@click.command("serve-embedded", help=_HELP, short_help="Serve the embedded policy over HTTP.")
@listen_options(8000)
@option(
    "--weights",
    metavar="PATH",
    help="File or directory with weights, loaded again when it is replaced.  [default: built in]",
)
@option(
    "--concurrency",
    type=Number(int, 1, 64),
    default=64,
    help="Concurrent replies; further requests wait in order.",
)
@option(
    "--allow-updates",
    is_flag=True,
    help="Accept POST /update_weights from other machines. Everyone who reaches the port can then replace the "
    "weights, and make the server read files of this machine as weights.",
)
@METRICS
@LOG_FORMAT
@option("--verbose", is_flag=True, help="Log every request to stderr.")
def serve_embedded(
    host: str,
    port: int,
    weights: str | None,
    concurrency: int,
    allow_updates: bool,
    metrics: str | None,
    log_format: "LogFormat",
    verbose: bool,
) -> int:
    import asyncio
    import os

    from rookery.core.child_processes import one_blas_thread

    os.environ.update(one_blas_thread(os.environ))  # clients share the cores, and its matrix products are small
    from rookery.engine.processes import new_event_loop
    from rookery.upstreams import UpstreamConfig
    from rookery.upstreams.embedded import EmbeddedUpstream
    from rookery.upstreams.embedded.server import EmbeddedServer

    url = f"embedded:{weights}" if weights else "embedded"

    async def main() -> None:
        upstream = EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=(url,), concurrency=concurrency))
        try:
            server = EmbeddedServer(upstream, allow_updates=allow_updates)
            await _serve(server, host, port, metrics, log_format, verbose)
        finally:
            await upstream.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
    return 0


async def _serve(
    server: "EmbeddedServer", host: str, port: int, metrics: str | None, log_format: "LogFormat", verbose: bool
) -> None:
    import asyncio
    import logging
    import signal

    from rookery.cli.metrics import serve_metrics
    from rookery.cli.terminal import write_line
    from rookery.telemetry import REGISTRY, render
    from rookery.telemetry.logs import set_log_format
    from rookery.upstreams.embedded.http_server import run_server
    from rookery.upstreams.listeners import is_loopback

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    set_log_format(log_format, process="serve-embedded")
    access = logging.getLogger("rookery.access") if verbose else None
    if access is not None:
        access.setLevel(logging.INFO)
    REGISTRY.collectors.append(server.collect_metrics)

    async def read() -> bytes:
        return render(REGISTRY, REGISTRY.read())

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):  # a second signal kills the process
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    async with run_server(server, host, port, access_log=access, refuse_foreign_pages=is_loopback(host)) as url:
        llama = server.upstream.service.llama
        size = f"{llama.shape.parameters / 1e6:.2f} M parameters, context {llama.context}"
        write_line(f"serving {server.upstream.model} ({size}) at {url}", err=False)
        local_url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        write_line(f"try: rookery run arithmetic --policy {local_url} -n 20 -k 4", err=False)
        async with serve_metrics(metrics, read):
            await stop.wait()
