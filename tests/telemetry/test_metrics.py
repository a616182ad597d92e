"""Metrics: what processes count is added up, a run serves it, and Prometheus reads it."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rookery import Engine
from rookery.core import UsageError
from rookery.engine.run_metrics import RunMetrics
from rookery.journal import RunReader
from rookery.telemetry import REGISTRY, Registry, parse_address, render
from rookery.telemetry.metrics import Counter, Gauge, Histogram, decode_snapshot, encode_snapshot
from tests.conftest import PROMETHEUS
from tests.servers import ModelServer, free_port
from tests.telemetry.conftest import ENV
from tests.waiting import wait_until

SECONDS = 60.0
TASKS = [{"prompt": "question"}] * 3
K = 2
ROLLOUTS = len(TASKS) * K


def make_registry() -> tuple[Registry, Counter, Gauge, Histogram]:
    registry = Registry()
    calls = Counter("calls_total", "Calls.", "role")
    up = Gauge("up", "Health.", merge="min")
    seconds = Histogram("call_seconds", "Seconds.", bounds=(0.1, 1.0))
    registry.add([calls, up, seconds])
    return registry, calls, up, seconds


def values(page: bytes | str) -> dict[tuple[str, ...], float]:
    """Return the samples of a page by name and sorted labels, read by prometheus_client's own parser."""
    text = page.decode() if isinstance(page, bytes) else page
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_of_a_dead_process_stay_and_its_gauges_go() -> None:
    total, calls, up, _ = make_registry()
    calls.add("policy")
    total.collectors.append(lambda: up.set(1))
    for source, health, count in (("a", 0, 3), ("b", 1, 4)):
        other, other_calls, other_up, other_seconds = make_registry()
        other.collectors.append(lambda up=other_up, health=health: up.set(health))
        other_calls.add("policy", by=count)
        other_seconds.observe(0.5)
        total.absorb(source, decode_snapshot(encode_snapshot(other.drain())))
        assert other.drain() == {"up": {(): [float(health)]}}, "a second drain reports nothing twice"
    assert total.read()["calls_total"] == {("policy",): [8.0]}
    assert total.read()["up"] == {(): [0.0]}
    total.forget("a")
    read = total.read()
    assert (read["calls_total"], read["up"]) == ({("policy",): [8.0]}, {(): [1.0]})
    assert values(render(total, read)) == {
        ("calls_total", "role=policy"): 8.0,
        ("up",): 1.0,
        ("call_seconds_bucket", "le=0.1"): 0.0,
        ("call_seconds_bucket", "le=1"): 2.0,
        ("call_seconds_bucket", "le=+Inf"): 2.0,
        ("call_seconds_count",): 2.0,
        ("call_seconds_sum",): 1.0,
    }


def test_difference_of_two_readings_counts_a_restarted_process_anew() -> None:
    total, calls, up, seconds = make_registry()
    total.collectors.append(lambda: up.set(1))
    calls.add("policy", by=5)
    seconds.observe(0.5)
    earlier = total.read()
    calls.add("policy", by=2)
    seconds.observe(2.0)
    difference = total.subtract(total.read(), earlier)
    assert difference == {
        "calls_total": {("policy",): [2.0]},
        "up": {(): [1.0]},
        "call_seconds": {(): [0, 0, 1, 2.0]},
    }
    restarted = {"calls_total": {("policy",): [1.0]}, "call_seconds": {(): [1.0, 0, 0, 0.05]}}
    assert total.subtract(restarted, earlier) == restarted


def test_two_metrics_with_one_name_are_refused() -> None:
    registry, calls, _, _ = make_registry()
    with pytest.raises(ValueError, match="calls_total"):
        registry.add([Counter(calls.name, "Again.")])


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, metric in REGISTRY.metrics.items():
        assert re.fullmatch(r"rookery_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb)(_|$)", name)
        assert metric.help.endswith(".")


@pytest.mark.parametrize("text", ["", "9464", "host:", ":9464", "host:port", "host:65536", "host:-1"])
def test_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


def test_documentation_lists_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    listed = dict(re.findall(r"^\| `(rookery_[a-z_]+)` \| (counter|gauge|histogram) \|", page, re.MULTILINE))
    assert listed == {name: metric.kind for name, metric in REGISTRY.metrics.items()}
    for name, metric in REGISTRY.metrics.items():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{name}` | {metric.kind} | {labels} |" in page


def dashboard_queries() -> list[str]:
    dashboard = json.loads(files("rookery.telemetry").joinpath("grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [one.replace("$__rate_interval", "1m").replace("$instance", ".*") for one in queries]


def test_dashboard_uses_only_known_metrics() -> None:
    suffixes = ("", "_bucket", "_sum", "_count")
    known = {
        name + suffix
        for name, one in REGISTRY.metrics.items()
        for suffix in suffixes[: 4 if one.kind == "histogram" else 1]
    }
    used = {name for query in dashboard_queries() for name in re.findall(r"rookery_[a-z_]+", query)}
    assert used <= known
    assert len(used) > 30


def test_dashboard_has_what_the_schema_of_grafana_requires() -> None:
    dashboard = json.loads(files("rookery.telemetry").joinpath("grafana.json").read_text())
    panels = dashboard["panels"]
    assert all(isinstance(one["query"], str) for one in dashboard["templating"]["list"])
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "two panels overlap"
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        if panel["type"] == "timeseries":
            assert {"legend", "tooltip"} <= panel["options"].keys()
            assert all(target["refId"] for target in panel["targets"])


def growth(before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float], *key: str) -> float:
    """Return by how much a metric has grown. Other tests in this process may have counted before."""
    return after.get(key, 0.0) - before.get(key, 0.0)


@asynccontextmanager
async def finished_run(model: ModelServer, tmp_path: Path, **options: Any) -> AsyncIterator[Engine]:
    """Run all rollouts; the engine is still open in the block."""
    engine = Engine(ENV, policy=model.url, out=tmp_path, metrics="127.0.0.1:0", **options)
    async with engine:
        async for _ in engine.groups(TASKS, k=K, load_tokens=False):
            pass
        yield engine


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 1])
async def test_run_serves_metrics_of_all_its_processes(model: ModelServer, tmp_path: Path, runners: int) -> None:
    before = values(render(REGISTRY, REGISTRY.read()))
    async with finished_run(model, tmp_path, runners=runners) as engine, aiohttp.ClientSession() as http:

        async def complete() -> Any:
            async with http.get(engine.metrics_url) as response:
                assert response.status == 200
                after = values(await response.text())
            calls = growth(before, after, "rookery_model_calls_total", "result=ok", "role=policy")
            return after if calls == 3 * ROLLOUTS else None

        after = await wait_until(complete, SECONDS)  # a runner reports once a second
        assert growth(before, after, "rookery_rollouts_total", "cause=", "outcome=completed") == ROLLOUTS
        assert growth(before, after, "rookery_attempts_total", "cause=", "outcome=completed") == ROLLOUTS
        assert growth(before, after, "rookery_rollout_reward_sum") == ROLLOUTS * 0.5
        assert growth(before, after, "rookery_groups_total", "status=kept") == len(TASKS)
        assert growth(before, after, "rookery_attempt_stage_seconds_count", "stage=score") == ROLLOUTS
        assert growth(before, after, "rookery_tool_calls_total", "result=ok", "tool=lookup") == ROLLOUTS
        assert growth(before, after, "rookery_tool_calls_total", "result=error", "tool=lookup") == ROLLOUTS
        assert growth(before, after, "rookery_gradings_total", "grader=function", "result=ok") == ROLLOUTS
        assert growth(before, after, "rookery_sampled_tokens_total", "role=policy") == 3 * ROLLOUTS * 2
        assert growth(before, after, "rookery_gateway_turns_total", "shard=0") == ROLLOUTS
        assert after["rookery_runners", "state=ready"] == 1
        assert (after["rookery_attempts_in_flight",], after["rookery_engine_paused",]) == (0, 0)
        assert [key for key in after if key[0] == "rookery_upstream_replica_up"]
        assert after["rookery_journal_size_bytes",] > 0
        url = engine.metrics_url
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(url)
    assert values(render(REGISTRY, REGISTRY.read())).get(("rookery_runners", "state=ready")) is None


@pytest.mark.long
async def test_address_in_use_is_refused_before_the_first_rollout(model: ModelServer, tmp_path: Path) -> None:
    before = list(REGISTRY.collectors)
    async with finished_run(model, tmp_path, runners=0) as engine:
        address = engine.metrics_url.removeprefix("http://").removesuffix("/metrics")
        with pytest.raises(UsageError):
            async with Engine(ENV, policy=model.url, out=tmp_path / "other", metrics=address):
                pass
    assert before == REGISTRY.collectors


async def test_engines_of_one_process_with_the_same_address_share_a_page(
    model: ModelServer, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"policy": model.url, "runners": 0, "metrics": f"127.0.0.1:{free_port()}"}
    async with Engine(ENV, out=tmp_path / "one", **options) as first:
        async with Engine(ENV, out=tmp_path / "two", **options) as second, aiohttp.ClientSession() as http:
            assert second.metrics_url == first.metrics_url
            async with http.get(second.metrics_url) as response:
                page = values(await response.read())
        runs = {part for key in page if key[0] == "rookery_run_info" for part in key}
        assert {f"run={one.folder.name}" for one in (first, second) if one.folder is not None} <= runs
        async with aiohttp.ClientSession() as http, http.get(first.metrics_url) as response:
            assert response.status == 200


async def test_engine_is_closed_if_its_metrics_server_cannot_be(
    model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(ENV, policy=model.url, out=tmp_path, runners=0, metrics="127.0.0.1:0")
    await engine.__aenter__()
    supervisor, close = engine.supervisor, RunMetrics.close

    async def fail(metrics: RunMetrics) -> None:
        await close(metrics)
        raise asyncio.CancelledError

    monkeypatch.setattr(RunMetrics, "close", fail)
    with pytest.raises(asyncio.CancelledError):
        await engine.__aexit__(None, None, None)
    assert supervisor.closing
    assert engine.folder is not None
    with RunReader(engine.folder) as reader:
        assert reader.status == "finished"


# ---- the real Prometheus


@asynccontextmanager
async def prometheus(target: str, folder: Path) -> AsyncIterator[str]:
    """Run Prometheus, scraping `target` once a second, and yield its URL."""
    config = folder / "prometheus.yml"
    jobs = [{"job_name": "rookery", "static_configs": [{"targets": [target]}]}]
    config.write_text(
        json.dumps({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs})
    )
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while not (found := re.search(rb'msg="Listening on" address=(\S+)', await process.stderr.readline())):
                assert process.returncode is None
        drain = asyncio.create_task(process.stderr.read())
        url = f"http://{found[1].decode()}"
        async with aiohttp.ClientSession() as http:

            async def ready() -> bool:
                async with http.get(f"{url}/-/ready") as response:
                    return response.status == 200

            await wait_until(ready, SECONDS)
        yield url
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGTERM)
        await process.wait()
    await drain


async def query(http: aiohttp.ClientSession, url: str, expression: str) -> list[dict[str, Any]]:
    async with http.get(f"{url}/api/v1/query", params={"query": expression}) as response:
        answer = await response.json()
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


async def wait_for(http: aiohttp.ClientSession, url: str, expression: str) -> float:
    """Return the value of a query as soon as it has one. On a busy machine, single scrapes may be too late."""
    found = await wait_until(lambda: query(http, url, expression), SECONDS)
    return float(found[0]["value"][1])


@pytest.mark.long
@pytest.mark.needs("prometheus")
async def test_prometheus_scrapes_a_run(model: ModelServer, tmp_path: Path) -> None:
    before = values(render(REGISTRY, REGISTRY.read()))
    async with finished_run(model, tmp_path, runners=1) as engine:
        target = engine.metrics_url.removeprefix("http://").removesuffix("/metrics")
        async with prometheus(target, tmp_path) as url, aiohttp.ClientSession() as http:
            counted = sum(value for key, value in before.items() if key[0] == "rookery_rollouts_total")
            await wait_for(http, url, f"sum(rookery_rollouts_total) == {ROLLOUTS + counted}")
            await wait_for(http, url, "rookery_gateway_turns_total > 0")
            await wait_for(http, url, 'up{job="rookery"} == 1')
            mean = await wait_for(http, url, "sum(rookery_rollout_reward_sum) / sum(rookery_rollout_reward_count)")
            rewards = before.get(("rookery_rollout_reward_sum",), 0.0) + 0.5 * ROLLOUTS
            scored = before.get(("rookery_rollout_reward_count",), 0.0) + ROLLOUTS
            assert mean == pytest.approx(rewards / scored)
            median = "histogram_quantile(0.5, sum by (le) (rookery_model_call_seconds_bucket))"
            assert 0 < await wait_for(http, url, median) < 300
            for expression in dashboard_queries():
                await query(http, url, expression)
