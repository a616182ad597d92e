"""Tests of the viewer's server: the API against the journal, and what it refuses."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest

import rookery
from rookery import Engine
from rookery.core import Message, ToolCall, Turn, UsageError, floats, ints
from rookery.journal import Journal, RunReader, load_segments
from rookery.training import compute_advantages
from rookery.view import server as server_module
from rookery.view.catalogue import Catalogue
from rookery.view.data import RunData
from rookery.view.server import ViewServer
from rookery.view.summary import read_summary
from tests.servers import ModelServer
from tests.view.test_comparison import make_training_run
from tests.view.view_kit import decode_columns, make_run, simple_turns

KEY = "the-key"


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator["Client"]:
    async with ViewServer(Catalogue(root, []), key=KEY) as server, aiohttp.ClientSession() as session:
        yield Client(session, server.url)


class Client:
    """A client of the server's API."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url
        self.base = f"http://{urlsplit(url).netloc}"

    async def get(self, path: str, *, expect: int = 200, **headers: str) -> Any:
        own = {"Authorization": f"Bearer {KEY}", **headers}
        async with self.session.get(self.base + path, headers=own) as response:
            assert response.status == expect, await response.text()
            assert response.headers["Content-Security-Policy"] == server_module.POLICY
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "no-referrer"
            if response.content_type == "application/octet-stream":
                return decode_columns(await response.read())
            return await response.json()


def branching_turns(rollout_id: str) -> list[Turn]:
    """Return a turn with a tool call, two turns that both continue it, and one turn of a judge."""
    call = ToolCall("c1", "python", json.dumps({"code": "print(6 * 7)"}))
    first = Turn(
        attempt=f"{rollout_id}.1",
        index=0,
        messages=(Message("system", "Be brief."), Message("user", "What is 6 * 7?")),
        response=Message("assistant", None, (call,), reasoning="I should compute it."),
        prompt=ints([256, 65, 66]),
        sampled=ints([67, 68]),
        logprobs=floats([-0.1, -2.0]),
        version=1,
        prompt_tokens=3,
        sampled_tokens=2,
        finish="tool_calls",
    )

    def after(index: int, text: str, version: int) -> Turn:
        return Turn(
            attempt=f"{rollout_id}.1",
            index=index,
            parent=0,
            messages=(Message("tool", "42", tool_call_id="c1"),),
            response=Message("assistant", text),
            prefix=5,
            prompt=ints([69]),
            sampled=ints(list(text.encode())),
            logprobs=floats([-0.5] * len(text)),
            version=version,
            prompt_tokens=6,
            sampled_tokens=len(text),
        )

    judge = Turn(
        attempt=f"{rollout_id}.1", index=3, role="judge", response=Message("assistant", "good"), sampled_tokens=1
    )
    return [first, after(1, "forty", 1), after(2, "It is 42.", 2), judge]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_run(
        tmp_path / "one",
        {"t0": [1, 0, None, 1], "t1": [0, 0], "t2": [0.5]},
        turns={"0.0": branching_turns("0.0"), "1.1": simple_turns("1.1", "a needle in a haystack")},
        truncated=["1.0"],
    )
    make_run(tmp_path / "two", {"t0": [1, 1], "t1": [1, 0], "t3": [1]}, config={"seed": 5})
    return tmp_path


async def test_table_and_summary_agree_with_the_journal(root: Path) -> None:
    async with serving(root) as client:
        runs = (await client.get("/api/runs"))["runs"]
        assert {run["id"]: run["rollouts"] for run in runs} == {"one": 7, "two": 5}
        table = await client.get("/api/rollouts?run=one")
        summary = await client.get("/api/summary?run=one")
    with RunReader(root / "one") as reader:
        records = list(reader.iter_rollouts())
        expected = read_summary(reader).plain()
    assert (table["count"], table["complete"], table["first_task"]) == (len(records), True, 0)
    assert table["numbers"]["reward"] == [record.reward for record in records]
    assert [table["tasks"][task] for task in table["task"]] == [record.task for record in records]
    assert table["failed"] == ["sandbox.lost"]
    assert table["metrics"]["level"] == [record.metrics["level"] for record in records]
    assert summary["reward"] == expected["reward"]
    assert {one["cause"]: one["count"] for one in summary["failures"]} == {"sandbox.lost": 1}


async def test_environments_of_a_mixture_have_their_own_statistics_and_cost(tmp_path: Path) -> None:
    config = {"prices": {"m": {"sampled": 1e6}}, "upstreams": {"policy": {"model": "m"}}}
    make_run(tmp_path / "mix", {"words/a": [1, 0], "sums/b": [0.5, None]}, config=config)
    async with serving(tmp_path) as client:
        table = await client.get("/api/rollouts?run=mix")
        summary = await client.get("/api/summary?run=mix")
        found = await client.get("/api/rollout?run=mix&id=1.0")
    assert table["environments"] == ["sums", "words"]
    words, sums = summary["environments"]["words"], summary["environments"]["sums"]
    assert (words["reward"]["mean"], sums["reward"]["mean"], sums["failed"]) == (0.5, 0.5, 1)
    assert summary["cost"] == words["cost"] + sums["cost"] == summary["sampled_tokens"]
    assert (found["environment"], found["cost"]) == ("sums", found["usage"]["sampled_tokens"])


async def test_rollout_has_its_turns_attempts_and_failure(root: Path) -> None:
    async with serving(root) as client:
        found = await client.get("/api/rollout?run=one&id=0.0")
        failed = await client.get("/api/rollout?run=one&id=0.2")
        await client.get("/api/rollout?run=one&id=9.9", expect=404)
        await client.get("/api/rollout?run=nothing&id=0.0", expect=404)
    assert [(turn["index"], turn["parent"], turn["role"]) for turn in found["turns"]] == [
        (0, None, "policy"),
        (1, 0, "policy"),
        (2, 0, "policy"),
        (3, None, "judge"),
    ]
    assert found["turns"][0]["response"]["tool_calls"][0]["name"] == "python"
    assert found["turns"][0]["response"]["reasoning"] == "I should compute it."
    assert found["info"]["grade"]["stdout"] == "checked 0.0"
    assert sum(one["trained"] for one in found["segments"]) == 2 + 5 + 9
    assert [attempt["label"] for attempt in failed["attempts"]] == ["sandbox.lost"] * 2
    assert "boom" in failed["attempts"][0]["outcome"]["traceback"]


async def test_tokens_are_those_of_the_segments(root: Path) -> None:
    async with serving(root) as client:
        parts = [await client.get(f"/api/tokens?run=one&id=0.0&segment={one}") for one in (0, 1)]
        await client.get("/api/tokens?run=one&id=0.0&segment=2", expect=404)
        await client.get("/api/tokens?run=one&id=0.2", expect=404)
    with RunReader(root / "one") as reader:
        record = reader.rollout("0.0")
        assert record is not None
        segments = load_segments(record, reader.tokens).segments
    for part, segment in zip(parts, segments, strict=True):
        assert part["tokens"] == np.frombuffer(segment.tokens, "<i4").tolist()
        assert part["mask"] == list(segment.mask)
        assert part["logprobs"] == pytest.approx(np.frombuffer(segment.logprobs, "<f4").tolist())
        assert part["versions"] == [[span.start, span.end, span.version] for span in segment.versions]
        for turn, start, end in part["turns"]:
            assert turn in segment.turns
            assert segment.mask[start:end] == b"\x01" * (end - start)


async def test_group_explains_advantages_of_the_training_code(root: Path) -> None:
    async with serving(root) as client:
        found = await client.get("/api/group?run=one&group=0")
        uniform = await client.get("/api/group?run=one&group=1")
        await client.get("/api/group?run=one&group=77", expect=404)
    expected = compute_advantages([1, 0, None, 1])
    assert [one["advantage"] for one in found["members"]] == pytest.approx(expected.tolist())
    assert [one["use"] for one in found["members"]] == ["train", "train", "missing", "train"]
    assert found["members"][0]["against"] == ["0.1", "0.3"]
    assert found["members"][0]["against_mean"] == pytest.approx(0.5)
    assert found["members"][2]["against"] is None
    assert (found["kind"], uniform["kind"]) == ("informative", "uniform")
    assert found["first_difference"] == 0  # one rollout has a system message


async def test_search_finds_text_in_transcripts_in_any_case(root: Path) -> None:
    async with serving(root) as client:
        assert (await client.get("/api/search?run=one&q=NEEDLE"))["matches"] == [[1, 1]]
        assert (await client.get("/api/search?run=one&q=print(6"))["matches"] == [[0, 0]]
        nothing = await client.get("/api/search?run=one&q=absent")
        assert (nothing["matches"], nothing["next"], nothing["searched"]) == ([], None, 7)
        await client.get("/api/search?run=one", expect=422)
        await client.get("/api/search?run=one&q=x&after=-1", expect=422)


async def test_comparison_of_two_runs(root: Path) -> None:
    async with serving(root) as client:
        found = await client.get("/api/compare?a=one&b=two")
        same = await client.get("/api/compare?a=one&b=one")
    assert (found["tasks"], found["only_a"], found["only_b"]) == (2, 1, 1)
    assert found["settings"]["seed"] == [None, "5"]
    assert same["difference"] == 0


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/runs", {"Authorization": "Bearer wrong"}, 401),
        ("/api/runs", {"Authorization": ""}, 401),
        ("/api/runs", {"Authorization": "Bearer \u00e9"}, 401),
        ("/", {}, 401),
        ("/?key=wrong", {}, 401),
        ("/api/runs", {"Host": "evil.example"}, 421),
        ("/api/runs", {"Host": "127.0.0.1.evil.example:80"}, 421),
        ("/api/runs", {"Host": "[::1"}, 421),
        ("/api/runs", {"Host": "127.0.0.1@evil.example"}, 421),
        ("/api/runs", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("/../../etc/passwd", {}, 404),
        ("/api/nothing", {}, 404),
        ("/api/rollouts?run=one&start=x", {}, 422),
    ],
)
async def test_requests_are_refused(root: Path, path: str, headers: dict[str, str], status: int) -> None:
    async with serving(root) as client:
        await client.get(path, expect=status, **headers)


async def test_only_get_is_answered_and_nothing_is_written(root: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and "sqlite-" not in path.name
    }
    async with serving(root) as client:
        for method in ("POST", "PUT", "DELETE"):
            async with client.session.request(
                method, f"{client.base}/api/runs", headers={"Authorization": f"Bearer {KEY}"}
            ) as response:
                assert response.status == 405
        await client.get("/api/rollouts?run=one")
    after = {
        path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and "sqlite-" not in path.name
    }
    assert after == before


async def test_events_announce_new_records(root: Path) -> None:
    async with serving(root) as client, asyncio.timeout(60):
        headers = {"Authorization": f"Bearer {KEY}"}
        async with client.session.get(f"{client.base}/api/events?run=two", headers=headers) as response:
            assert response.content_type == "text/event-stream"
            assert await response.content.readline() == b"event: change\n"
            with RunReader(root / "one") as reader:
                record = reader.rollout("2.0")
            assert record is not None
            with Journal.open(root / "two") as journal:
                journal.add_rollout(
                    record.__class__(id="7.0", group=7, member=0, task="t9", outcome=record.outcome)
                )
            while await response.content.readline() != b"event: change\n":
                pass
            added = await client.get("/api/rollouts?run=two&start=5")
            assert (added["task"], added["first_task"], added["tasks"]) == ([3], 3, ["t9"])


async def test_cancelled_request_keeps_the_run_locked_until_its_thread_has_ended(root: Path) -> None:
    catalogue = Catalogue(root, [])
    started, proceed, ended = threading.Event(), threading.Event(), threading.Event()

    def read(_: RunData) -> None:
        started.set()
        proceed.wait(60)
        ended.set()

    (run,) = [one["id"] for one in await catalogue.describe_runs()][:1]
    reading = asyncio.create_task(catalogue.read(run, read))
    await asyncio.to_thread(started.wait, 60)
    reading.cancel()
    closing = asyncio.create_task(catalogue.close())
    await asyncio.sleep(0)
    proceed.set()
    await asyncio.wait_for(closing, 60)
    assert ended.is_set()
    assert reading.cancelled()


async def test_live_state_comes_from_the_running_engine(tmp_path: Path) -> None:
    async with (
        ModelServer("42") as model,
        Engine(rookery.ToolEnvironment(), policy=model.url, runners=0, out=tmp_path) as engine,
        serving(tmp_path) as client,
    ):
        assert engine.folder is not None
        live = await client.get(f"/api/live?run={engine.folder.name}")
        summary = await client.get(f"/api/summary?run={engine.folder.name}")
    assert (live["in_flight"], live["paused"], summary["status"]) == (0, False, "running")
    assert [(one["role"], one["healthy"], one["calls"]) for one in live["replicas"]] == [("policy", True, 0)]
    assert live["sandboxes"] == {}
    async with serving(tmp_path) as client:
        assert await client.get(f"/api/live?run={engine.folder.name}") is None


async def test_recorded_alternatives_are_shown_with_their_tokens(tmp_path: Path) -> None:
    options = {"policy": "embedded", "runners": 0, "out": tmp_path, "top_logprobs": 3}
    async with Engine("arithmetic", **options) as engine:
        groups = [group async for group in engine.groups(engine.environment.tasks()[:1], k=2)]
    assert engine.folder is not None
    rollout = groups[0].rollouts[0]
    async with serving(tmp_path) as client:
        page = await client.get(f"/api/tokens?run={engine.folder.name}&id={rollout.id}")
    assert [found is not None for found in page["alternatives"]] == [mask == 1 for mask in page["mask"]]
    for token, logprob, found in zip(page["tokens"], page["logprobs"], page["alternatives"], strict=True):
        if found is None:
            continue
        assert len(found) == 3
        assert found == sorted(found, key=lambda pair: -pair[1])
        assert logprob <= found[0][1] + 1e-4
        if token in dict(found):
            assert dict(found)[token] == pytest.approx(logprob, abs=1e-3)
    assert {str(found[0][0]) for found in page["alternatives"] if found} <= page["texts"].keys()
    with pytest.raises(UsageError):
        Engine("arithmetic", **{**options, "top_logprobs": 21})


async def test_resumed_training_run_shows_its_newest_journal_and_lists_the_older_one(tmp_path: Path) -> None:
    folder = make_training_run(tmp_path, "training")
    first = next((folder / "rollouts").iterdir()).name
    async with serving(tmp_path) as client:
        assert (await client.get("/api/summary?run=training"))["rollouts"] == 2
        make_run(folder / "rollouts" / "20260103T000000Z-sums-scripted-0002", {"t0": [1, 0, 1]})
        summary = await client.get("/api/summary?run=training")
        assert (summary["rollouts"], summary["kind"], len(summary["learning"])) == (3, "training", 2)
        assert (await client.get(f"/api/summary?run=training:{first}"))["rollouts"] == 2
        assert {run["id"] for run in (await client.get("/api/runs"))["runs"]} == {"training", f"training:{first}"}


async def test_damaged_tokens_fail_one_rollout_only(root: Path) -> None:
    token_file = next((root / "one" / "tokens").iterdir())
    content = bytearray(token_file.read_bytes())
    content[-3] ^= 0xFF  # in the last turn, which belongs to rollout 2.0
    token_file.write_bytes(bytes(content))
    async with serving(root) as client:
        damaged = await client.get("/api/rollout?run=one&id=2.0")
        assert (damaged["label"], damaged["reward"]) == ("engine.tokens", None)
        assert damaged["damage"]
        assert (await client.get("/api/rollout?run=one&id=0.0"))["damage"] == ""
        assert (await client.get("/api/search?run=one&q=needle"))["matches"] == [[1, 1]]
        assert (await client.get("/api/group?run=one&group=2"))["members"][0]["use"] == "missing"
