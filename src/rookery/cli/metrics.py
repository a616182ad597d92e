"""`rookery metrics`: list the metrics, or print the dashboard for Grafana. Other commands use `serve_metrics`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import click

from rookery.cli.options import option

_HELP = """List the metrics that --metrics serves, with their types, labels and meanings.

\b
  rookery run ENV --metrics 127.0.0.1:9464     # scrape http://127.0.0.1:9464/metrics
  rookery metrics --grafana > rookery.json     # import this dashboard into Grafana
"""


@click.command("metrics", help=_HELP, short_help="List the metrics for Prometheus, or print a Grafana dashboard.")
@option("--grafana", is_flag=True, help="Print a dashboard for Grafana (JSON).")
@option("--json", "as_json", is_flag=True, help="Write one JSON object per metric.")
def metrics(grafana: bool, as_json: bool) -> int:
    from importlib.resources import files

    import msgspec

    from rookery.cli.terminal import write_line
    from rookery.telemetry import REGISTRY

    if grafana:
        text = files("rookery.telemetry").joinpath("grafana.json").read_text(encoding="utf-8")
        write_line(text.rstrip("\n"), err=False)
        return 0
    for metric in REGISTRY.metrics.values():
        row = {"name": metric.name, "type": metric.kind, "labels": list(metric.labels), "help": metric.help}
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        text = f"{metric.name}{labels}  ({metric.kind})\n    {metric.help}"
        write_line(msgspec.json.encode(row).decode() if as_json else text, err=False)
    return 0


@asynccontextmanager
async def serve_metrics(address: str | None, page: Callable[[], Awaitable[bytes]]) -> AsyncIterator[None]:
    """Serve the metrics that `page` returns at `address`, inside the block. Does nothing if it is None."""
    if not address:
        yield
        return
    from rookery.cli.terminal import write_line
    from rookery.telemetry import MetricsServer, parse_address
    from rookery.upstreams.listeners import bind_listener

    async with MetricsServer(bind_listener(*parse_address(address)), page) as server:
        write_line(f"metrics at {server.url}", err=False)
        yield
