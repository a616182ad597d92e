"""`rookery gateway`: serve the gateway, which records model calls, for programs with their own agent loop.

Guarantees:
- a port in use or an invalid upstream is reported in one sentence, with exit code 2;
- the URL is printed when every shard (server process) accepts connections;
- without an admin key in an environment variable, one is generated and printed once; it is in no argument and no
  log;
- Ctrl-C and SIGTERM stop the server within seconds, even during calls, with exit code 0.
"""

from typing import TYPE_CHECKING

import click

from rookery.cli.options import (
    ALLOW_NO_TOOLS,
    LOG_FORMAT,
    METRICS,
    TOOL_PROMPT,
    TRACE_CONTENT,
    TRACES,
    Number,
    PluginName,
    listen_options,
    option,
)

if TYPE_CHECKING:
    from pathlib import Path

    from rookery.gateway.config import GatewayConfig
    from rookery.telemetry.logs import LogFormat
    from rookery.upstreams.protocol import Upstream

KEY_ENV = "ROOKERY_GATEWAY_KEY"

_HELP = f"""Serve model calls over HTTP and record every token.

Create a session with POST /rollouts, pass its base URL and key to any OpenAI client, and read the trajectory
from GET /rollouts/ID/trajectory. The admin key is read from {KEY_ENV}, else generated. Keys of
upstreams are read from ROOKERY_API_KEY or OPENAI_API_KEY.
"""


@click.command("gateway", help=_HELP, short_help="Serve the gateway, which records model calls.")
@option(
    "--upstream",
    "upstreams",
    metavar="URL",
    multiple=True,
    required=True,
    help="URL of an inference engine, or `embedded`. Repeat for replicas.",
)
@option("--kind", type=PluginName("upstreams"), help="Kind of the inference engine.  [default: detected]")
@option("--model", metavar="M", default="", help="Model name.  [default: the model of the session]")
@listen_options(8500)
@option("--shards", type=Number(int, 1, 256), default=1, help="Number of server processes.")
@option(
    "--record",
    type=click.Choice(("tokens", "messages", "plain")),
    default="messages",
    help="tokens: Rookery renders prompts; messages: the server does and returns token IDs; plain: no token IDs.",
)
@option("--tokenizer", metavar="PATH", help="For --record tokens: directory or hub name of the tokenizer.")
@option("--renderer", metavar="NAME", help="For --record tokens: chat renderer.  [default: auto]")
@option("--tool-parser", metavar="NAME", help="Parser for tool calls, if the chat format does not define it.")
@option("--tool-prompt", metavar="FILE", help=TOOL_PROMPT)
@option("--allow-no-tools", is_flag=True, help=ALLOW_NO_TOOLS)
@option("--reasoning-parser", metavar="NAME", help="Parser for reasoning, if the chat format does not define it.")
@option(
    "--role",
    "roles",
    metavar="NAME=URL",
    multiple=True,
    help="Model for a role other than the policy, for example judge=http://HOST:PORT. Repeatable.",
)
@option(
    "--concurrency",
    type=Number(int, 1),
    help="Concurrent calls per replica and shard.  [default: what the inference engine reports]",
)
@option(
    "--folder",
    metavar="DIR",
    help="Directory in which sessions and recorded model calls survive restarts.  [default: none]",
)
@METRICS
@LOG_FORMAT
@TRACES
@TRACE_CONTENT
@option(
    "--public-url",
    metavar="URL",
    default="",
    help="URL at which clients reach the gateway; base URLs of sessions start with it.  "
    "[default: the address to which the registration of a session was sent]",
)
def gateway(
    upstreams: tuple[str, ...],
    kind: str | None,
    model: str,
    host: str,
    port: int,
    shards: int,
    record: str,
    tokenizer: str | None,
    renderer: str | None,
    tool_parser: str | None,
    tool_prompt: str | None,
    allow_no_tools: bool,
    reasoning_parser: str | None,
    roles: tuple[str, ...],
    concurrency: int | None,
    folder: str | None,
    metrics: str | None,
    log_format: "LogFormat",
    traces: str | None,
    trace_content: bool,
    public_url: str,
) -> int:
    import asyncio
    from pathlib import Path

    import msgspec

    from rookery.core import UsageError
    from rookery.engine.processes import new_event_loop
    from rookery.gateway.config import GatewayConfig
    from rookery.telemetry.tracing import TraceSettings
    from rookery.upstreams import AUTO, UpstreamConfig, absolute_address

    rendering = {
        "name": renderer,
        "tokenizer": tokenizer,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "tool_prompt": tool_prompt,
        "allow_no_tools": allow_no_tools or None,
    }
    rendering_options = {name: value for name, value in rendering.items() if value is not None}
    if rendering_options and record != "tokens":
        option = next(iter(rendering_options)).replace("_", "-").replace("name", "renderer")
        raise UsageError(f"--{option} requires --record tokens")
    policy = UpstreamConfig(kind=kind or AUTO, urls=tuple(map(absolute_address, upstreams)), model=model)
    if concurrency is not None:
        policy = msgspec.structs.replace(policy, concurrency=concurrency)
    configs = {"policy": policy}
    for role in roles:
        name, mark, url = role.partition("=")
        if not mark or not name or not url or name in configs:
            raise UsageError(f"--role {role!r} must be NAME=URL with a name that is used once")
        configs[name] = UpstreamConfig(urls=(absolute_address(url),))
    config = GatewayConfig(
        upstreams=configs,
        record=record,  # type: ignore[arg-type]
        rendering=rendering_options or None,
        shards=shards,
        public=public_url,
        log_format=log_format,
        traces=TraceSettings(endpoint=traces, content=trace_content) if traces else None,
    )
    if config.traces is not None:
        config.traces.check()
    kept = Path(folder).expanduser() if folder else None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(config, kept, host, port, metrics, log_format))
    return 0


async def _check(role: str, upstream: "Upstream") -> None:
    """Raise `UpstreamError` if the inference engine of `role` cannot be reached. Its models are not checked."""
    from rookery.core import UpstreamError
    from rookery.engine.preflight import build_start_error

    try:
        await upstream.check()
    except UpstreamError as error:
        if error.fault == "infra":
            raise build_start_error(role, error) from error
    finally:
        await upstream.close()


async def _serve(
    config: "GatewayConfig",
    folder: "Path | None",
    host: str,
    port: int,
    metrics: str | None,
    log_format: "LogFormat",
) -> None:
    import asyncio
    import logging
    import os
    import signal

    from rookery.cli.metrics import serve_metrics
    from rookery.cli.terminal import write_line
    from rookery.gateway.shards import Gateway
    from rookery.telemetry import REGISTRY, render
    from rookery.telemetry.logs import set_log_format
    from rookery.upstreams import open_upstream

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    set_log_format(log_format, process="gateway")
    for upstream in config.upstreams.values():  # report errors once, not from every shard
        await open_upstream(upstream).close()
    key = os.environ.get(KEY_ENV, "").strip()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Gateway(config, folder, host=host, port=port, key=key or None) as gateway:
        for role, upstream in gateway.config.upstreams.items():
            await _check(role, open_upstream(upstream))

        async def read() -> bytes:
            return render(REGISTRY, await gateway.read_metrics())

        plural = "" if config.shards == 1 else f" with {config.shards} shards"
        write_line(f"serving at {gateway.url}{plural}, recording {config.record}", err=False)
        if gateway.no_tools:
            write_line(f"warning: {gateway.no_tools}")
        if not key:
            write_line(f"admin key: {gateway.key} (set {KEY_ENV} to choose it)", err=False)
        async with serve_metrics(metrics, read):
            await stop.wait()
