"""Distinguish a server that hangs from one that is busy with a long reply."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Message, UpstreamError, UsageError
from rookery.upstreams import ModelRequest, UpstreamConfig, open_upstream
from rookery.upstreams import hang_detector as module
from rookery.upstreams.hang_detector import (
    EngineLoad,
    HangDetector,
    ReplicaReport,
    UpstreamEvidence,
    judge,
    parse_engine_load,
)
from rookery.upstreams.http_upstream import HttpUpstream
from rookery.upstreams.protocol import Delta
from rookery.upstreams.registry import list_load_metrics, load_kind
from tests.engine_standins import EngineName, standin
from tests.servers import Answer, ModelServer, raw_server
from tests.upstreams.engines import DONE, Engine, Play, event
from tests.waiting import wait_until

REQUEST = ModelRequest(model="m", messages=(Message("user", "Hello"),), affinity="a")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give servers a long time to answer, because the machine may be busy, and examine silent calls soon."""
    for name, seconds in {"HEALTH": 60.0, "SAMPLE": 60.0, "STALL": 1.0, "METRICS_GAP": 0.2, "RECENT": 0.1}.items():
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)


@pytest.fixture
def quick(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits for servers that never answer: they have one second."""
    monkeypatch.setattr(module, "HEALTH_SECONDS", 1.0)


@pytest.fixture
def unsampled(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits for servers that answer checks and never sample."""
    monkeypatch.setattr(module, "SAMPLE_SECONDS", 1.0)


@asynccontextmanager
async def opened(*urls: str, kind: str = "openai") -> AsyncIterator[HttpUpstream]:
    upstream = open_upstream(UpstreamConfig(kind=kind, urls=urls, model="m"))
    assert isinstance(upstream, HttpUpstream)
    try:
        yield upstream
    finally:
        await upstream.close()


@asynccontextmanager
async def calling(upstream: HttpUpstream, *, streamed: bool = False) -> AsyncIterator["asyncio.Task[Any]"]:
    async def on_delta(delta: Delta) -> None: ...

    call = upstream.complete(REQUEST, timeout=120, on_delta=on_delta if streamed else None)
    task = asyncio.create_task(call)
    try:
        await wait_until(lambda: any(replica.calls for replica in upstream.replicas))
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def evidence(upstream: HttpUpstream) -> UpstreamEvidence:
    async with asyncio.timeout(60):
        (found,) = await upstream.examine("a")
    return found


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that accepts connections and never sends anything."""
    await reader.read()


def chunk(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


# ---- the rule


@pytest.mark.parametrize(
    ("report", "begun", "moved", "expected"),
    [
        (ReplicaReport(health="failed"), False, True, ("hung", "health_failed")),
        (ReplicaReport(health="ok", load=EngineLoad(0), known_calls=1), False, True, ("hung", "request_lost")),
        (ReplicaReport(health="ok", new_tokens=5), True, False, ("working", "tokens_generated")),
        (ReplicaReport(health="ok", sample="answered"), True, True, ("hung", "answer_stalled")),
        (ReplicaReport(health="ok", sample="failed"), False, True, ("working", "other_calls_progress")),
        (ReplicaReport(health="ok", sample="answered"), False, False, ("working", "sample_answered")),
        (ReplicaReport(health="ok", sample="refused"), False, False, ("working", "sample_refused")),
        (ReplicaReport(health="ok", sample="failed"), False, False, ("hung", "sample_failed")),
        (ReplicaReport(health="ok", sample="failed", new_tokens=1), False, False, ("working", "tokens_generated")),
        (ReplicaReport(health="ok", paused=True), False, False, ("hung", "engine_paused")),
    ],
)
def test_verdict_follows_the_evidence(
    report: ReplicaReport, begun: bool, moved: bool, expected: tuple[str, str]
) -> None:
    assert judge(report, begun=begun, others_moved=moved) == expected


def test_paused_server_is_not_judged_hung_before_a_deadline() -> None:
    paused = ReplicaReport(health="ok", load=EngineLoad(0), known_calls=1, paused=True)
    assert judge(paused, begun=False, others_moved=False, patient=True) == ("working", "engine_paused")


def test_metrics_are_summed_over_ranks() -> None:
    text = (
        b"# TYPE vllm:num_requests_running gauge\n"
        b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        b'vllm:num_requests_waiting{engine="0"} 4.0\nvllm:generation_tokens_total{engine="0"} 10.0\n'
    )
    known = list_load_metrics()
    assert parse_engine_load(text, known) == EngineLoad(3.0, 4.0, 10.0)
    assert parse_engine_load(b"<html>not metrics</html>\n\xff", known) is None


@pytest.mark.parametrize("error", ["OSError('no such library')", "RuntimeError('no device')"])
def test_plugin_that_cannot_be_imported_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    info = tmp_path / "broken_upstream-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-upstream\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rookery.upstreams]\nbroken = broken_upstream_module:Upstream\n")
    (tmp_path / "broken_upstream_module.py").write_text(f"raise {error}\n")
    known = list_load_metrics()
    monkeypatch.syspath_prepend(tmp_path)
    list_load_metrics.cache_clear()
    try:
        assert list_load_metrics() == known
    finally:
        list_load_metrics.cache_clear()
    assert any("broken" in record.getMessage() for record in caplog.records)
    with pytest.raises(UsageError, match="broken"):
        load_kind("broken")


@pytest.mark.parametrize(("kind", "reads"), [("openai", True), ("vllm", True), ("llamacpp", False)])
async def test_only_servers_of_kinds_with_load_metrics_are_asked_for_them(kind: str, reads: bool) -> None:
    async with Engine() as engine, opened(engine.url, kind=kind) as upstream:
        text = b"vllm:num_requests_running 2.0\nvllm:num_requests_waiting 1.0\nvllm:generation_tokens_total 5.0\n"
        engine.on("/metrics", Play(text))
        engine.on("/v1/models", Play({"data": []}))
        engine.on("/health", Play({}))
        report = await upstream.hangs.report(upstream.replicas[0])
        assert bool(engine.requests_to("/metrics")) == reads
    assert report.load == (EngineLoad(2.0, 1.0, 5.0) if reads else None)


def test_server_without_metrics_may_serve_one_request_at_a_time() -> None:
    unanswered = ReplicaReport(health="ok", sample="failed")
    assert judge(unanswered, begun=False, others_moved=False, usual=True) == ("working", "answers_take_long")
    batching = ReplicaReport(health="ok", sample="failed", load=EngineLoad(1.0), known_calls=1)
    assert judge(batching, begun=False, others_moved=False, usual=True) == ("hung", "sample_failed")


# ---- real servers


@pytest.mark.long
@pytest.mark.parametrize("streamed", [False, True])
async def test_server_that_accepts_and_never_answers_hangs(quick: None, streamed: bool) -> None:
    async with raw_server(silent) as url, opened(url) as upstream, calling(upstream, streamed=streamed):
        found = await evidence(upstream)
    assert (found.verdict, found.reason, found.bytes) == ("hung", "health_failed", 0)
    assert upstream.replicas[0].hung


@pytest.mark.long
@pytest.mark.parametrize("streamed", [False, True])
async def test_server_that_answers_health_checks_only_hangs(unsampled: None, streamed: bool) -> None:
    async with Engine() as engine, opened(engine.url) as upstream:
        engine.on("/v1/models", Play(body={"data": []}))
        engine.on("/v1/chat/completions", Play(body={}, hold=asyncio.Event()))
        async with calling(upstream, streamed=streamed):
            found = await evidence(upstream)
    assert (found.verdict, found.reason) == ("hung", "sample_failed")
    assert found.report is not None
    assert found.report.health == "ok"


@pytest.mark.long
async def test_stream_that_stops_in_the_middle_hangs_and_one_that_continues_does_not(patient: None) -> None:
    async with Engine() as engine, opened(engine.url) as upstream:
        engine.on("/v1/models", Play(body={"data": []}))
        permits = asyncio.Semaphore(0)
        play = Play(events=[chunk("a"), chunk("b"), chunk("c"), DONE], between=permits)
        engine.on("/v1/chat/completions", play, Play(body={"choices": []}))
        async with calling(upstream, streamed=True):
            permits.release()
            (call,) = upstream.replicas[0].calls
            async with asyncio.timeout(60):
                while not call.bytes:
                    await upstream.replicas[0].next_progress()
            examining = asyncio.create_task(evidence(upstream))
            await wait_until(lambda: upstream.hangs._reports.get(upstream.replicas[0].name) or examining.done())
            permits.release()
            assert (await examining).verdict == "working"

            async def stalled() -> Any:
                found = await evidence(upstream)
                return found if found.reason != "bytes_received" else None  # the progress is still recent

            found = await wait_until(stalled)
    assert (found.verdict, found.reason, found.streamed) == ("hung", "answer_stalled", True)
    assert found.bytes > 0


async def test_long_reply_of_a_server_that_gives_others_tokens_is_not_a_hang(patient: None) -> None:
    async with Engine() as engine, opened(engine.url) as upstream:
        engine.on("/v1/models", Play(body={"data": []}))
        held_reply = Play(body={}, hold=asyncio.Event())
        engine.on("/v1/chat/completions", held_reply, Play(body={"choices": []}))
        async with calling(upstream):
            await engine.until(lambda: engine.requests_to("/v1/chat/completions"))
            found = await evidence(upstream)
    assert (found.verdict, found.reason) == ("working", "sample_answered")


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
async def test_request_that_the_engine_no_longer_has_is_lost(patient: None, speaks: EngineName) -> None:
    async with standin(speaks) as server, opened(server.url, kind=speaks) as upstream:
        await server.fault(after_bytes=0, then="stall")
        async with calling(upstream):
            await server.until(0)
            async with asyncio.timeout(60):
                while (found := await evidence(upstream)).reason != "request_lost":
                    assert found.verdict == "working"  # the token was sampled during the examination
    assert found.verdict == "hung"
    assert not upstream.replicas[0].hung  # the server answers others


@pytest.mark.long
async def test_server_that_needs_many_seconds_for_a_token_is_not_hung(unsampled: None) -> None:
    loads = [
        f"vllm:num_requests_running 1\nvllm:generation_tokens_total {tokens}\n".encode() for tokens in (7, 7, 8)
    ]
    async with Engine() as engine, opened(engine.url) as upstream:
        engine.on("/v1/models", Play(body={"data": []}))
        engine.on("/metrics", *(Play(body=load) for load in loads))
        engine.on("/v1/chat/completions", Play(body={}, hold=asyncio.Event()))
        async with calling(upstream):
            found = await evidence(upstream)
    assert (found.verdict, found.reason) == ("working", "tokens_generated")


async def test_reply_that_arrives_during_an_examination_is_not_a_hang(patient: None) -> None:
    hold = asyncio.Event()
    async with Engine() as engine, opened(engine.url) as upstream:
        answer = {"choices": [{"index": 0, "message": {"content": "late"}, "finish_reason": "stop"}]}
        engine.on("/v1/models", Play(body={"data": []}, hold=hold))
        engine.on("/v1/chat/completions", Play(body=answer, hold=hold))
        async with calling(upstream) as task:
            examining = asyncio.create_task(evidence(upstream))
            await engine.until(lambda: engine.requests_to("/v1/models"))
            hold.set()
            assert (await examining).verdict == "working"
            assert (await task).message.text == "late"


@pytest.mark.long
async def test_server_that_serves_one_request_at_a_time_is_not_hung_while_it_works(unsampled: None) -> None:
    async with Engine() as engine, opened(engine.url) as upstream:
        engine.on("/v1/models", Play(body={"data": []}))
        engine.on("/v1/chat/completions", Play(body={}, hold=asyncio.Event()))
        (replica,) = upstream.replicas
        async with calling(upstream):
            (call,) = replica.calls
            assert (await upstream.hangs.examine(call, patient=True)).reason == "answers_take_long"
            replica.longest_call = 600.0
            assert (await evidence(upstream)).reason == "answers_take_long"
            assert not replica.hung


@pytest.mark.long
async def test_call_that_waits_for_a_retry_is_an_upstream_failure(patient: None) -> None:
    busy = Answer(status=503, headers={"Retry-After": "30"})
    async with ModelServer(busy) as server, opened(server.url) as upstream:
        task = asyncio.create_task(upstream.complete(REQUEST, timeout=120))

        async def failed() -> Any:
            found = await upstream.examine("a")
            return found if found and found[0].reason == "call_failed" else None

        found = await wait_until(failed)
        task.cancel()
        await asyncio.wait({task})
        assert await upstream.examine("a") == ()
    assert (found[0].verdict, found[0].cause) == ("hung", "upstream.overloaded")


# ---- calls in flight


@pytest.mark.long
async def test_silent_call_is_retried_at_a_replica_that_works(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.1)
    async with raw_server(silent) as bad, ModelServer("good") as good, opened(bad, good.url) as upstream:
        hung, _ = upstream.replicas
        upstream.replicas[1].health.failed("gone", "for the test", now=float("inf"))
        async with calling(upstream) as task:
            assert [call.replica for call in hung.calls]
            async with asyncio.timeout(60):
                reply = await task
        assert reply.replica == good.url.removeprefix("http://") or "good" in reply.message.text
        assert hung.hung
        assert (await upstream.complete(REQUEST, timeout=60)).message.text == "good"


@pytest.mark.long
async def test_call_whose_only_server_hangs_fails_with_the_evidence(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.1)
    async with raw_server(silent) as url, opened(url) as upstream, calling(upstream) as task:
        with pytest.raises(UpstreamError) as raised:
            async with asyncio.timeout(60):
                await task
    assert (raised.value.code, raised.value.fault) == ("upstream.hung", "infra")
    assert isinstance(raised.value.evidence, UpstreamEvidence)


async def test_hung_replica_gets_calls_again_once_it_samples_tokens(patient: None) -> None:
    async with ModelServer("ok") as server, opened(server.url) as upstream:
        (replica,) = upstream.replicas
        assert await HangDetector("models", lambda: "m").has_recovered(replica)
        replica.mark_hung(0.0, "test")
        assert replica.hung
        await upstream.complete(REQUEST, timeout=60)
        assert not replica.hung


async def test_earlier_attempts_hung_replica_is_avoided() -> None:
    async with ModelServer("one") as one, ModelServer("two") as two, opened(one.url, two.url) as upstream:
        avoid = (upstream.replicas[0].name,)
        for n in range(8):
            request = ModelRequest(model="m", messages=REQUEST.messages, affinity=str(n), avoid=avoid)
            assert (await upstream.complete(request, timeout=60)).message.text == "two"
