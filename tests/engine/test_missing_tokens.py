"""A server that returns no token IDs is reported early, counted, and refused if a trainer needs tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Environment
from rookery.core import Group, UsageError
from rookery.core.errors import BatchError
from rookery.journal import RunReader
from rookery.journal.export import export_jsonl
from rookery.training import make_batch
from tests.cli.helpers import CommandResult
from tests.cli.sandbox_kit import run_cli
from tests.servers import Answer, ModelServer

TOLD = Answer("ok", prompt_ids=[1, 2], ids=[3, 4], logprobs=[-1.0, -2.0])
ROWS = [{"prompt": str(n)} for n in range(3)]


class TwoTurns(Environment):
    async def run(self, ctx: Context) -> None:
        reply = await ctx.policy.chat(ctx.task.prompt)
        await ctx.policy.chat([*ctx.task.prompt, reply.message, {"role": "user", "content": "go on"}])

    async def score(self, ctx: Context) -> float:
        return float(int(ctx.task.text) % 2)


async def collect_groups(
    server: ModelServer, out: Path, **options: Any
) -> tuple[Path, list[Group], list[tuple[str, dict[str, Any]]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    settings: dict[str, Any] = {"runners": 0, "record": "messages", **options}
    async with Engine(TwoTurns(), policy=server.url, out=out / "runs", **settings) as engine:
        engine.on_event = lambda kind, payload: events.append((kind, payload))
        engine.on_record = lambda record: events.append(("record", {"id": record.id}))
        groups = [group async for group in engine.groups(ROWS, k=2)]
        assert engine.folder is not None
        return engine.folder, groups, events


async def test_missing_token_ids_are_reported_once_before_the_first_record(tmp_path: Path) -> None:
    async with ModelServer("ok") as server:
        _, groups, events = await collect_groups(server, tmp_path)
    kinds = [kind for kind, _ in events]
    assert kinds.count("upstream.no_tokens") == 1
    assert kinds.index("upstream.no_tokens") < kinds.index("record")
    assert all(rollout.valid for group in groups for rollout in group.rollouts), (
        "the rollouts are scored nevertheless"
    )
    assert [rollout.usage.without_tokens for group in groups for rollout in group.rollouts] == [2] * 6


@pytest.mark.long
async def test_missing_token_ids_are_reported_once_by_several_runners(tmp_path: Path) -> None:
    async with ModelServer("ok") as server:
        _, _, events = await collect_groups(server, tmp_path, runners=2)
    assert [kind for kind, _ in events].count("upstream.no_tokens") == 1


@pytest.mark.parametrize("record", ["messages", "plain"])
async def test_server_that_returns_token_ids_and_plain_recording_are_not_reported(
    record: Any, tmp_path: Path
) -> None:
    async with ModelServer(TOLD) as server:
        _, groups, events = await collect_groups(server, tmp_path, record=record)
    assert "upstream.no_tokens" not in [kind for kind, _ in events]
    missing = {rollout.usage.without_tokens for group in groups for rollout in group.rollouts}
    assert missing == ({0} if record == "messages" else {2})


async def test_make_batch_refuses_groups_without_token_ids(tmp_path: Path) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
    without_usage = Answer(body={"choices": [choice]})
    for answer in (Answer("ok"), without_usage):
        async with ModelServer(answer) as server:
            _, groups, _ = await collect_groups(server, tmp_path)
        with pytest.raises(BatchError):
            make_batch(groups)


async def test_export_of_tokens_is_refused_without_token_ids(tmp_path: Path) -> None:
    async with ModelServer("ok") as server:
        folder, _, _ = await collect_groups(server, tmp_path)
    with RunReader(folder) as reader:
        with pytest.raises(UsageError):
            export_jsonl(reader, tmp_path / "out.jsonl", tokens=True)
        assert export_jsonl(reader, tmp_path / "out.jsonl").rollouts == 6
    for target in ("x.jsonl", "x.parquet"):
        done = run_cli("export", str(folder), "--tokens", "-o", target, cwd=tmp_path)
        assert done.code == 2, done
        assert not (tmp_path / target).exists()


async def test_export_marks_rollouts_with_missing_token_ids(tmp_path: Path) -> None:
    async with ModelServer(TOLD) as server:
        server.then(Answer("ok"))
        folder, _, _ = await collect_groups(server, tmp_path, concurrency=1)
    with RunReader(folder) as reader:
        done = export_jsonl(reader, tmp_path / "out.jsonl", tokens=True)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (done.rollouts, done.damaged) == (6, 1)
    assert sum(bool(row["segments"]) for row in rows) >= 5


async def test_steps_are_refused_if_the_server_returns_no_token_ids(tmp_path: Path) -> None:
    async with (
        ModelServer("ok") as server,
        Engine(TwoTurns(), policy=server.url, record="messages", runners=0, out=tmp_path / "runs") as engine,
    ):
        with pytest.raises(UsageError):
            await anext(engine.steps(ROWS, k=2, groups=1))
        with pytest.raises(UsageError):
            engine.steps(ROWS, k=2, groups=1, name="again")


async def test_steps_are_refused_at_once_if_the_run_records_no_tokens(tmp_path: Path) -> None:
    async with (
        ModelServer(TOLD) as server,
        Engine(TwoTurns(), policy=server.url, record="plain", runners=0, out=tmp_path / "runs") as engine,
    ):
        with pytest.raises(UsageError):
            engine.steps(ROWS, k=2, groups=1)


async def test_steps_work_if_the_server_returns_token_ids(tmp_path: Path) -> None:
    async with (
        ModelServer(TOLD) as server,
        Engine(TwoTurns(), policy=server.url, record="messages", runners=0, out=tmp_path / "runs") as engine,
    ):
        steps = [step async for step in engine.steps(ROWS, k=2, groups=3)]
    assert [len(step.groups) for step in steps] == [3]


async def run_command(server: ModelServer, tmp_path: Path, *args: str) -> CommandResult:
    import asyncio

    (tmp_path / "env.py").write_text(
        "from rookery import Context, environment\n\n\n"
        '@environment(tasks=[{"prompt": "x"}] * 2)\n'
        "async def one(ctx: Context) -> float:\n"
        "    await ctx.policy.chat(ctx.task.prompt)\n"
        "    return 1.0\n"
    )
    command = ("run", "env.py", "--policy", server.url, "--runners", "1", *args)
    return await asyncio.to_thread(lambda: run_cli(*command, cwd=tmp_path))


@pytest.mark.long
async def test_run_reports_missing_token_ids_at_the_start_and_in_the_summary(tmp_path: Path) -> None:
    async with ModelServer("ok") as server:
        plain = await run_command(server, tmp_path)
        events = await run_command(server, tmp_path, "--json")
        quiet = await run_command(server, tmp_path, "--record", "plain")
    assert plain.code == 0, plain
    assert "upstream.no_tokens" in plain.err
    kinds = [event.get("kind") or event["event"] for event in events.events]
    assert kinds.index("upstream.no_tokens") < kinds.index("rollout")
    assert events.events[-1]["without_tokens"] == 2
    assert "upstream.no_tokens" not in quiet.out + quiet.err
