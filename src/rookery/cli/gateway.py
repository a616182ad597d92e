"""`rookery gateway`: the door for model calls, for people who bring their own loop.

Promises:
- what cannot be served (a port in use, an upstream that cannot be) is one sentence and exit code 2;
- the line that says where it serves comes when every shard does;
- an admin key that was not given is made up and told once; it is in no argument and no log;
- Ctrl-C and SIGTERM end it within seconds, calls under way or not, with exit code 0.
"""

from typing import TYPE_CHECKING

import click

from rookery.cli.options import ALLOW_NO_TOOLS, TOOL_PROMPT, Number

if TYPE_CHECKING:
    from pathlib import Path

    from rookery.gateway.config import GatewayConfig
    from rookery.upstreams.protocol import Upstream

KEY_ENV = "ROOKERY_GATEWAY_KEY"

_HELP = f"""Serves one door for model calls, that records every token which passes it.

Register a session with POST /rollouts, give its base URL and secret to any OpenAI client, and read what it did
from GET /rollouts/ID/trajectory. The admin key is read from {KEY_ENV}; without it one is made up. Keys of
upstreams are read from ROOKERY_API_KEY or OPENAI_API_KEY.
"""


@click.command("gateway", help=_HELP, short_help="Serve a door that records model calls.")
@click.option(
    "--upstream",
    "upstreams",
    metavar="URL",
    multiple=True,
    required=True,
    help="A model server; repeat for its replicas. Or `embedded`.",
)
@click.option(
    "--kind",
    type=click.Choice(("vllm", "sglang", "openai", "embedded")),
    default="openai",
    show_default=True,
    help="What the servers are.",
)
@click.option("--model", metavar="M", default="", help="The model's name.  [default: the session's]")
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="The address to serve at.")
@click.option(
    "--port",
    metavar="PORT",
    type=Number(int, 0, 65535),
    default=8500,
    show_default=True,
    help="The port; 0 picks one that is free.",
)
@click.option(
    "--shards", metavar="N", type=Number(int, 1, 256), default=1, show_default=True, help="Processes that serve."
)
@click.option(
    "--record",
    type=click.Choice(("tokens", "messages", "plain")),
    default="messages",
    show_default=True,
    help="We render and sample ids; the server renders and tells them; no ids at all.",
)
@click.option("--tokenizer", metavar="PATH", help="For --record tokens: the tokenizer, a folder or a hub name.")
@click.option("--renderer", metavar="NAME", help="For --record tokens: the chat format.  [default: auto]")
@click.option(
    "--tool-parser", metavar="NAME", help="How the model writes tool calls, where the format leaves it open."
)
@click.option("--tool-prompt", metavar="FILE", help=TOOL_PROMPT)
@click.option("--allow-no-tools", is_flag=True, help=ALLOW_NO_TOOLS)
@click.option("--reasoning-parser", metavar="NAME", help="How it writes its reasoning, likewise.")
@click.option(
    "--role", "roles", metavar="NAME=URL", multiple=True, help="Another model, by role, such as judge=http://…"
)
@click.option(
    "--concurrency",
    metavar="N",
    type=Number(int, 1),
    help="Calls under way at once, for each replica and shard.  [default: what the engine reports]",
)
@click.option("--folder", metavar="DIR", help="Keep sessions and turns here, over restarts too.  [default: none]")
@click.option(
    "--public-url", metavar="URL", default="", help="What sessions are told to call.  [default: as called]"
)
def gateway(
    upstreams: tuple[str, ...],
    kind: str,
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
    public_url: str,
) -> int:
    import asyncio
    from pathlib import Path

    import msgspec

    from rookery.core import UsageError
    from rookery.engine.processes import new_event_loop
    from rookery.gateway.config import GatewayConfig
    from rookery.upstreams import UpstreamConfig, settled

    rendering = {
        "name": renderer,
        "tokenizer": tokenizer,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "tool_prompt": tool_prompt,
        "allow_no_tools": allow_no_tools or None,
    }
    said = {name: value for name, value in rendering.items() if value is not None}
    if said and record != "tokens":
        option = next(iter(said)).replace("_", "-").replace("name", "renderer")
        raise UsageError(f"--{option} is for --record tokens")
    policy = UpstreamConfig(kind=kind, urls=tuple(map(settled, upstreams)), model=model)
    if concurrency is not None:
        policy = msgspec.structs.replace(policy, concurrency=concurrency)
    configs = {"policy": policy}
    for role in roles:
        name, mark, url = role.partition("=")
        if not mark or not name or not url or name in configs:
            raise UsageError(f"--role {role!r} is not NAME=URL with a name of its own")
        configs[name] = UpstreamConfig(urls=(settled(url),))
    config = GatewayConfig(
        upstreams=configs,
        record=record,  # type: ignore[arg-type]
        rendering=said or None,
        shards=shards,
        public=public_url,
    )
    kept = Path(folder).expanduser() if folder else None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(config, kept, host, port))
    return 0


async def _check(role: str, upstream: "Upstream") -> None:
    """Raise if a model server does not answer, before clients call it. Which models it serves is not checked."""
    from rookery.core import UpstreamError
    from rookery.engine.checks import not_usable

    try:
        await upstream.check()
    except UpstreamError as error:
        if error.fault == "infra":
            raise not_usable(role, error) from error
    finally:
        await upstream.close()


async def _serve(config: "GatewayConfig", folder: "Path | None", host: str, port: int) -> None:
    import asyncio
    import logging
    import os
    import signal

    from rookery.cli.text import tell
    from rookery.gateway.shards import Gateway
    from rookery.upstreams import open_upstream

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    for upstream in config.upstreams.values():  # what is wrong with it is said here, and not by every shard
        await open_upstream(upstream).close()
    key = os.environ.get(KEY_ENV, "").strip()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Gateway(config, folder, host=host, port=port, key=key or None) as served:
        for role, upstream in config.upstreams.items():
            await _check(role, open_upstream(upstream))
        plural = "" if config.shards == 1 else f" with {config.shards} shards"
        tell(f"serving at {served.url}{plural}, recording {config.record}", err=False)
        if served.no_tools:
            tell(f"warning: {served.no_tools}")
        if not key:
            tell(f"admin key: {served.key} (give one in {KEY_ENV} to choose it)", err=False)
        await stop.wait()
