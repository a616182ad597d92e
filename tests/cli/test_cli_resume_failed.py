"""`rookery resume RUN --failed`: failed rollouts run again, count once, and their earlier records stay."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Failed
from rookery.journal import RunReader
from tests.cli.conftest import ENVIRONMENT, tasks
from tests.cli.helpers import rookery, runs, start_command, wait_for_end
from tests.servers import Answer, ModelServer, Request

RUN = ("run", "sums.py", "--tasks", "tasks.jsonl", "--runners", "0")


def summary(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


async def failed_run(here: Path, server: ModelServer, *, boom: tuple[int, ...] = ()) -> Path:
    """A run whose inference engine fails for task t1, and whose scoring fails for the tasks in `boom`."""

    def play(request: Request) -> Answer:
        down = "sum 1" in str(request.body["messages"])
        return Answer("down", status=500) if down else Answer("42")

    server.default = play
    tasks(here, 4, boom=boom)
    done = await rookery(*RUN, "--policy", server.url, "-k", "2", cwd=here)
    assert done.code == 3, done.err
    assert "--failed" in done.out
    server.default = Answer("42")
    return runs(here)[0]


@pytest.mark.long
async def test_failed_rollouts_run_again_and_count_once(here: Path, server: ModelServer) -> None:
    run = await failed_run(here, server)
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 6, "upstream.error": 2}
        before = {one.id: one for one in reader.iter_rollouts()}
    plain = await rookery("resume", run, cwd=here)
    assert plain.code == 3
    assert "--failed" in plain.err
    again = await rookery("resume", run, "--failed", "--json", cwd=here)
    assert again.code == 0, again.err
    started_event, last = again.events[0], again.events[-1]
    assert (started_event["done"], started_event["rollouts"]) == (6, 8)
    assert (last["rollouts"], last["valid"], last["failed"], last["planned"]) == (8, 8, 0, 8)
    assert [event["event"] for event in again.events].count("rollout") == 2
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 8}
        assert reader.mean_reward() == 1.0
        for one in reader.iter_rollouts():
            earlier = reader.earlier(one.id)
            if isinstance(before[one.id].outcome, Failed):
                assert [old.record for old in earlier] == [before[one.id]]
                assert one.seed == before[one.id].seed
                numbers = [attempt.number for attempt in reader.attempts(one.id)]
                assert numbers == list(range(1, len(numbers) + 1))
                assert len(numbers) > len(one.attempts)
            else:
                assert (earlier, one) == ([], before[one.id])
    shown = json.loads((await rookery("show", run, "--json", cwd=here)).out)
    assert (shown["rollouts"], shown["failed"], shown["outcomes"]) == (8, 0, {"completed": 8})
    one = await rookery("show", run, "1.0", cwd=here)
    assert "upstream.error" in one.out
    listed = [json.loads(text) for text in (await rookery("export", run, cwd=here)).out.splitlines()]
    assert [row["label"] for row in listed] == ["completed"] * 8
    nothing = await rookery("resume", run, "--failed", cwd=here)
    assert nothing.code == 0


@pytest.mark.long
async def test_cause_selects_the_failed_rollouts_to_run_again(here: Path, server: ModelServer) -> None:
    run = await failed_run(here, server, boom=(2,))
    again = await rookery("resume", run, "--failed", "--cause", "upstream", "--json", cwd=here)
    assert again.code == 3, again.err
    assert again.events[-1]["causes"] == {"bug.scoring": 2}
    for wrong in ("upstream.error", "nonsense", "bug.scor"):
        (await rookery("resume", run, "--failed", "--cause", wrong, cwd=here)).assert_refused("bug.scoring (2)")
    (await rookery("resume", run, "--cause", "bug.scoring", cwd=here)).assert_refused("--failed")
    (here / "sums.py").write_text(ENVIRONMENT.replace('ctx.task.data.get("boom")', "False"))
    fixed = await rookery(
        "resume", run, "--failed", "--cause", "bug.scoring", "--cause", "upstream.error", cwd=here
    )
    assert fixed.code == 0, fixed.err
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 8}


@pytest.mark.long
async def test_rollouts_that_fail_again_keep_every_record(here: Path, server: ModelServer) -> None:
    run = await failed_run(here, server, boom=(2,))
    for tries in (1, 2):
        again = await rookery("resume", run, "--failed", "--cause", "bug.scoring", cwd=here)
        assert again.code == 3
        with RunReader(run) as reader:
            assert reader.counts() == {"completed": 4, "upstream.error": 2, "bug.scoring": 2}
            assert [len(reader.earlier(one)) for one in ("2.0", "2.1", "1.0")] == [tries, tries, 0]


@pytest.mark.long
async def test_interrupted_resume_of_failed_rollouts_is_finished_by_a_plain_resume(
    here: Path, server: ModelServer
) -> None:
    run = await failed_run(here, server)
    asked = len(server.requests)
    server.default = Answer("42", hold=asyncio.Event())
    async with start_command("resume", run, "--failed", cwd=here) as process:
        await server.wait_for_requests(asked + 2)
        process.send_signal(signal.SIGKILL)
        await wait_for_end(process)
    server.default = Answer("42")
    done = await rookery("resume", run, cwd=here)
    assert done.code == 0, done.err
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 8}
        assert [len(reader.earlier(name)) for name in ("1.0", "1.1")] == [1, 1]


@pytest.mark.long
async def test_invalid_rows_are_not_run_again(here: Path, server: ModelServer) -> None:
    (here / "tasks.jsonl").write_text(
        '{"id": "good", "prompt": "sum", "answer": 42}\n{"id": "bad", "prompt": 7}\n'
    )
    assert (await rookery(*RUN, "--policy", server.url, cwd=here)).code == 3
    done = await rookery("resume", "latest", "--failed", "--json", cwd=here)
    assert done.code == 3
    assert summary(done.out)["failed_can_run_again"] == 0
    with RunReader(runs(here)[0]) as reader:
        assert reader.counts() == {"completed": 1, "task.invalid": 1}


@pytest.mark.long
async def test_resume_failed_runs_a_quarantined_task_again(here: Path, server: ModelServer) -> None:
    code = ENVIRONMENT.replace('raise ValueError("boom in scoring")', 'raise rookery.TaskError("broken tests")')
    (here / "sums.py").write_text(code)
    tasks(here, 2, boom=(1,))
    assert (await rookery(*RUN, "--policy", server.url, "-k", "2", "-c", "1", cwd=here)).code == 3
    (here / "sums.py").write_text(ENVIRONMENT.replace('ctx.task.data.get("boom")', "False"))
    done = await rookery("resume", "latest", "--failed", cwd=here)
    assert done.code == 0, done.err
    with RunReader(runs(here)[0]) as reader:
        assert reader.counts() == {"completed": 4}
        assert [row.status for row in reader.task_rows()] == ["ok", "ok"]


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--cause", "engine.tokens")])
async def test_rollouts_with_corrupt_tokens_run_again(
    here: Path, server: ModelServer, options: tuple[str, ...]
) -> None:
    assert (await rookery(*RUN, "--policy", server.url, cwd=here)).code == 0
    run = runs(here)[0]
    with RunReader(run) as reader:
        record = reader.rollout("2.0")
        assert record is not None
        extent = record.tokens[0]
    data = bytearray((run / "tokens" / extent.file).read_bytes())
    data[extent.offset + 30] ^= 1
    (run / "tokens" / extent.file).write_bytes(data)
    done = await rookery("resume", run, "--failed", *options, cwd=here)
    assert done.code == 0, done.err
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 4}
        assert [bool(reader.earlier(one.id)) for one in reader.iter_rollouts()] == [False, False, True, False]
        for one in reader.iter_rollouts():
            assert reader.turns(one)
