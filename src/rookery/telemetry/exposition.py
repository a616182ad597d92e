"""Format metrics in Prometheus text format, and serve them over HTTP."""

import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final

from rookery.core import UsageError
from rookery.telemetry.metrics import Counter, Histogram, Registry, Snapshot

if TYPE_CHECKING:
    from aiohttp import web
    from prometheus_client.metrics_core import Metric as Family

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SNAPSHOT_TYPE: Final = "application/vnd.rookery.metrics"
"""Value of the header `Accept` with which one Rookery process asks another for a `Snapshot` instead of text."""


class _Page:
    """Converts a snapshot to the families of prometheus_client."""

    def __init__(self, registry: Registry, snapshot: Snapshot) -> None:
        self._registry = registry
        self._snapshot = snapshot

    def collect(self) -> "Iterator[Family]":
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, metric in self._registry.metrics.items():
            samples = sorted(self._snapshot.get(name, {}).items())
            if isinstance(metric, Histogram):
                histogram = HistogramMetricFamily(name, metric.help, labels=metric.labels)
                for labels, values in samples:
                    histogram.add_metric(labels, _cumulate(metric.bounds, values), values[-1])
                yield histogram
                continue
            if isinstance(metric, Counter) and not metric.labels and not samples:
                samples = [((), [0.0])]
            kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
            family = kind(name, metric.help, labels=metric.labels)
            for labels, values in samples:
                family.add_metric(labels, values[0])
            yield family


def _cumulate(bounds: tuple[float, ...], values: list[float]) -> list[tuple[str, float]]:
    """Return the buckets of a histogram as Prometheus wants them: each counts all observations up to its bound."""
    total = 0.0
    buckets = []
    for bound, count in zip((*(f"{one:g}" for one in bounds), "+Inf"), values[:-1], strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def render(registry: Registry, snapshot: Snapshot) -> bytes:
    """Return the values of a snapshot in Prometheus text format."""
    from prometheus_client import generate_latest

    page: bytes = generate_latest(_Page(registry, snapshot))
    return page


def parse_address(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`, the address that Prometheus scrapes. Port 0 picks a free port. Raises `UsageError`."""
    host, mark, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not mark or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--metrics must be HOST:PORT, for example 127.0.0.1:9464, not {text!r:.100}")
    return host, int(port)


class MetricsServer:
    """Serves `GET /metrics` on a listening socket, without a key. Start it with `async with`."""

    def __init__(self, listener: socket.socket, page: Callable[[], Awaitable[bytes]]) -> None:
        """Serve what `page` returns. The server closes `listener`."""
        self._listener = listener
        self._page = page
        self._runner: web.AppRunner | None = None
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"

    async def __aenter__(self) -> "MetricsServer":
        from aiohttp import web

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=await self._page(), headers={"Content-Type": CONTENT_TYPE})

        app = web.Application()
        app.add_routes([web.get("/metrics", metrics)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
