"""`rookery run` and `resume`: output, records, exit codes, signals."""

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rookery.journal import RunReader
from tests.cli.conftest import tasks
from tests.cli.helpers import COMMAND, KEY, environ, rookery, runs, start_command, wait_for_end
from tests.servers import Answer, ModelServer
from tests.waiting import wait_until

RUN = ("run", "sums.py", "--tasks", "tasks.jsonl")

NOISY = """
import os
import rookery

print("an import prints")
os.write(1, b"past Python's buffers\\n")


@rookery.environment(tasks=["a", "b"])
async def noisy(ctx):
    print("a rollout prints")
    ctx.log.info("a log line", number=7)
    await ctx.policy.chat(ctx.task.prompt)
    return 1.0
"""


@pytest.mark.long
async def test_successful_run_exits_with_0_and_prints_a_summary(here: Path, server: ModelServer) -> None:
    done = await rookery(*RUN, "--policy", server.url, "-k", "3", "--runners", "1", cwd=here)
    assert done.code == 0, done.err
    folder = runs(here)[0]
    assert folder.name.endswith(f"-sums-test-model-{folder.name[-4:]}")
    assert (here / "runs" / "latest").resolve() == folder
    assert "12 valid" in done.out
    assert "100.0%" in done.out
    assert re.search(r"95% .*\b51\.0% .*\b100\.0%.*\b12\b", done.out)
    assert re.search(r"mean reward +1\.000", done.out)
    assert "12  completed" in done.out
    assert f"rookery export runs/{folder.name}" in done.out
    assert "4 tasks x 3" in done.err
    assert "\x1b" not in done.out + done.err
    with RunReader(folder) as reader:
        assert reader.status == "finished"
        assert [record.id for record in reader.iter_rollouts()] == [
            f"{group}.{member}" for group in range(4) for member in range(3)
        ]


@pytest.mark.long
async def test_failed_rollouts_are_exit_code_3_and_in_no_denominator(here: Path, server: ModelServer) -> None:
    tasks(here, 8, boom=(2, 5))
    done = await rookery(*RUN, "--policy", server.url, "--runners", "0", cwd=here)
    assert done.code == 3
    assert re.search(r"\b2\.0  bug\.scoring  ValueError: boom in scoring", done.err)
    assert "6 valid, 2 failed" in done.out
    assert "bug.scoring" in done.out
    assert f"rookery show runs/{runs(here)[0].name} 2.0" in done.out


@pytest.mark.long
async def test_repeated_cause_is_printed_a_few_times_then_counted(here: Path, server: ModelServer) -> None:
    tasks(here, 30, boom=tuple(range(30)))
    done = await rookery(*RUN, "--policy", server.url, "--runners", "0", "--breaker", "off", cwd=here)
    assert done.code == 3
    assert done.err.count("boom in scoring") == 5
    assert (
        len(re.findall(r"\bbug\.scoring\b", done.err)) == 6
    )  # five failures, and one line that says the rest is counted
    assert "30  bug.scoring" in done.out


@pytest.mark.long
async def test_breaker_stops_the_run_with_exit_code_4(here: Path, server: ModelServer) -> None:
    tasks(here, 200, boom=tuple(range(200)))
    done = await rookery(*RUN, "--policy", server.url, "--runners", "0", "-c", "4", cwd=here)
    assert done.code == 4
    assert "bug.scoring" in done.err
    assert "rookery resume" in done.out


@pytest.mark.long
async def test_json_is_one_object_per_line_even_if_the_environment_prints(here: Path, server: ModelServer) -> None:
    (here / "noisy.py").write_text(NOISY)
    done = await rookery(
        "run", "noisy.py", "--policy", server.url, "-k", "2", "--runners", "0", "--json", cwd=here
    )
    assert done.code == 0, done.err
    events = done.events
    assert [event["event"] for event in events][:1] == ["started"]
    last = events[-1]
    assert (last["event"], last["exit_code"], last["rollouts"], last["status"]) == ("finished", 0, 4, "finished")
    assert last["reward"]["pass_rate"] == 1.0
    assert Path(events[0]["run"]) == runs(here)[0]
    kinds = [event["event"] for event in events]
    assert kinds.count("rollout") == 4
    assert kinds.count("group") == 2
    assert {event["data"]["number"] for event in events if event["event"] == "log"} == {7}
    assert "an import prints" in done.err
    assert "past Python's buffers" in done.err
    assert "a rollout prints" in done.err


@pytest.mark.long
async def test_json_ends_with_the_error_if_the_run_did_not_start(here: Path) -> None:
    done = await rookery(*RUN, "--json", cwd=here)
    assert done.code == 2
    assert done.events[-1]["event"] == "error"
    assert done.events[-1]["exit_code"] == 2
    assert "--policy" in done.events[-1]["detail"]
    assert done.err.startswith("error: ")


@pytest.mark.long
async def test_closed_event_pipe_does_not_stop_the_run(here: Path, server: ModelServer) -> None:
    hold = asyncio.Event()
    server.default = Answer("42", hold=hold)
    async with start_command(*RUN, "--policy", server.url, "--runners", "0", "--json", cwd=here) as process:
        assert process.stdout is not None
        while (event := json.loads(await process.stdout.readline())["event"]) == "note":
            pass  # the start was slow
        assert event == "started"
        process.stdout._transport.close()  # type: ignore[attr-defined]
        hold.set()
        done = await wait_for_end(process)
    assert done.code == 0, done.err
    assert done.err
    with RunReader(runs(here)[0]) as reader:
        assert reader.counts() == {"completed": 4}


@pytest.mark.long
async def test_api_key_reaches_only_the_server(here: Path, server: ModelServer) -> None:
    run = (*RUN, "--policy", server.url.replace("http://", f"http://user:{KEY}@"), "--runners", "1")
    done = await rookery(*run, cwd=here)
    assert done.code == 0, done.err
    keyed = await rookery(*RUN, "--policy", server.url, "--runners", "1", cwd=here, OPENAI_API_KEY=KEY)
    assert keyed.code == 0, keyed.err
    assert KEY in server.requests[-1].headers["Authorization"]
    dry = await rookery(*run, "--dry-run", cwd=here, ROOKERY_API_KEY=KEY)
    assert "from $ROOKERY_API_KEY" in dry.out
    for result in (done, keyed, dry):
        assert KEY not in result.out + result.err
    kept = b"".join(path.read_bytes() for path in (here / "runs").rglob("*") if path.is_file())
    assert KEY.encode() not in kept


@pytest.mark.long
async def test_options_reach_the_server_and_the_environment(here: Path, server: ModelServer) -> None:
    run = (
        *RUN,
        "--policy",
        server.url,
        "--runners",
        "0",
        "-n",
        "1",
        "--temperature",
        "0.25",
        "--max-tokens",
        "77",
    )
    done = await rookery(*run, "--top-p", "0.5", "--arg", 'system_prompt="be brief"', "--seed", "5", cwd=here)
    assert done.code == 0, done.err
    body = server.requests[-1].body
    assert (body["temperature"], body["max_tokens"], body["top_p"]) == (0.25, 77, 0.5)
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert len(server.requests) == 1


@pytest.mark.long
async def test_limit_of_turns_truncates(here: Path, server: ModelServer) -> None:
    server.default = Answer(None, calls=[("add", '{"a": 1, "b": 2}')], finish="tool_calls")
    done = await rookery(*RUN, "--policy", server.url, "--runners", "0", "--limit-turns", "3", cwd=here)
    assert done.code == 0, done.err
    assert "4  truncated.turns" in done.out
    assert len(server.requests) == 12


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("runners", ["0", "1"])
async def test_interrupted_run_ends_cleanly_and_resume_finishes_it(
    here: Path, server: ModelServer, number: signal.Signals, code: int, runners: str
) -> None:
    hold = asyncio.Event()
    server.then(Answer("42"), Answer("42"))
    server.default = Answer("42", hold=hold)
    async with start_command(*RUN, "--policy", server.url, "--runners", runners, cwd=here) as process:
        async with asyncio.timeout(60):
            await server.wait_for_requests(4)
            await wait_for_records(here, 2)
        process.send_signal(number)
        done = await wait_for_end(process)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert re.search(rf"{number.name}\b.*\b2\b.*\b2\b", done.err), done.err
    assert f"rookery resume runs/{runs(here)[0].name}" in done.out
    with RunReader(runs(here)[0]) as reader:
        assert reader.status == "stopped"
        assert reader.counts() == {"completed": 2}
    hold.set()
    again = await rookery("resume", "latest", cwd=here)
    assert again.code == 0, again.err
    assert "2 of 4 " in again.err
    with RunReader(runs(here)[0]) as reader:
        assert reader.counts() == {"completed": 4}
        assert reader.status == "finished"


async def wait_for_records(here: Path, count: int) -> None:
    """Wait until this many rollouts are in the journal."""

    def recorded() -> bool:
        with RunReader(runs(here)[0]) as reader:
            return sum(reader.counts().values()) >= count

    await wait_until(recorded)


@pytest.mark.long
async def test_second_interrupt_exits_at_once_and_leaves_no_process(here: Path, server: ModelServer) -> None:
    (here / "stubborn.py").write_text(
        "import asyncio, rookery\n\n\n@rookery.environment(tasks=['a'])\nasync def stubborn(ctx):\n"
        "    await ctx.policy.chat(ctx.task.prompt)\n    while True:\n        try:\n"
        "            await asyncio.sleep(1000)\n        except asyncio.CancelledError:\n            pass\n"
    )
    async with start_command("run", "stubborn.py", "--policy", server.url, "--runners", "1", cwd=here) as process:
        async with asyncio.timeout(60):
            await server.wait_for_requests(1)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)  # another signal: the kernel would merge two equal ones
        done = await wait_for_end(process)
    assert done.code == 128 + signal.SIGTERM
    assert "`rookery resume`" in done.err
    await wait_until(lambda: not find_runners(process.pid))


def find_runners(supervisor: int) -> list[int]:
    """Return the runner processes of this supervisor."""
    found = []
    for name in os.listdir("/proc"):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes() if name.isdigit() else b""
        except OSError:
            continue
        if b"rookery.engine.runner" in command and command.endswith(f"\0{supervisor}\0".encode()):
            found.append(int(name))
    return found


@pytest.mark.long
async def test_sigkill_loses_no_recorded_rollout(here: Path, server: ModelServer) -> None:
    tasks(here, 12)
    hold = asyncio.Event()
    server.then(*[Answer("42")] * 5)
    server.default = Answer("42", hold=hold)
    async with start_command(*RUN, "--policy", server.url, "--runners", "2", "-c", "8", cwd=here) as process:
        async with asyncio.timeout(60):
            await server.wait_for_requests(9)
            await wait_for_records(here, 5)
        process.kill()
        assert (await wait_for_end(process)).code == -signal.SIGKILL
    assert "interrupted" in (await rookery("ls", cwd=here)).out
    hold.set()
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    again = await rookery("resume", runs(here)[0], "--json", cwd=elsewhere)
    assert again.code == 0, again.err
    assert again.events[0]["done"] == 5
    assert again.events[-1]["rollouts"] == 12
    assert sum(event["event"] == "rollout" for event in again.events) == 7
    with RunReader(runs(here)[0]) as reader:
        assert reader.counts() == {"completed": 12}


@pytest.mark.long
async def test_resume_of_a_finished_run_exits_by_its_records(here: Path, server: ModelServer) -> None:
    run = (*RUN, "--policy", server.url, "--runners", "0")
    assert (await rookery(*run, cwd=here)).code == 0
    asked = len(server.requests)
    done = await rookery("resume", "latest", cwd=here)
    assert done.code == 0
    assert done.err
    assert len(server.requests) == asked
    tasks(here, 3, boom=(1,))
    assert (await rookery(*run, cwd=here)).code == 3
    again = await rookery("resume", "latest", "--json", cwd=here)
    assert again.code == 3
    assert again.events[-1]["exit_code"] == 3


@pytest.mark.long
async def test_resume_finds_the_module_from_another_directory(here: Path, server: ModelServer) -> None:
    package = here / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "games.py").write_text((here / "sums.py").read_text())
    hold = asyncio.Event()
    server.default = Answer("42", hold=hold)
    run = ("run", "mine.games:Sums", "--tasks", "tasks.jsonl", "--policy", server.url, "--runners", "1")
    async with start_command(*run, cwd=here) as process:
        async with asyncio.timeout(60):
            await server.wait_for_requests(4)
        process.send_signal(signal.SIGINT)
        assert (await wait_for_end(process)).code == 130
    hold.set()
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    again = await rookery("resume", runs(here)[0], "--runners", "0", "-c", "2", cwd=elsewhere)
    assert again.code == 0, again.err


@pytest.mark.long
async def test_resume_accepts_a_new_server_url(here: Path) -> None:
    async with (
        ModelServer(Answer("42", hold=asyncio.Event())) as first,
        start_command(*RUN, "--policy", first.url, "--runners", "0", cwd=here) as process,
    ):
        async with asyncio.timeout(60):
            await first.wait_for_requests(4)
        process.send_signal(signal.SIGINT)
        assert (await wait_for_end(process)).code == 130
    (await rookery("resume", "latest", cwd=here)).assert_refused(first.url)
    async with ModelServer("42") as second:
        done = await rookery("resume", "latest", "--policy", second.url, cwd=here)
        assert done.code == 0, done.err


def plain(values: list[dict[str, Any]]) -> dict[str, tuple[Any, str]]:
    return {value["name"]: (value["value"], value["origin"]) for value in values}


@pytest.mark.long
async def test_dry_run_shows_each_value_with_its_origin(here: Path, server: ModelServer) -> None:
    (here / "rookery.toml").write_text(
        f"[run]\npolicy = '{server.url}'\nconcurrency = 7\nk = 5\nseed = 9\ntasks = 'tasks.jsonl'\n"
        "[run.limits]\nrun = 20\n[run.arguments]\nmax_result = 99\n[run.sampling]\ntop_k = 4\n"
    )
    run = ("run", "sums.py", "-k", "2", "--arg", "max_turns=8", "--dry-run")
    done = await rookery(*run, "--json", cwd=here, ROOKERY_CONCURRENCY="5", ROOKERY_PER_TASK="3")
    assert done.code == 0, done.err
    (event,) = done.events
    values = plain(event["values"])
    assert values["per-task"] == (2, "command line")  # overrides the variable, which overrides the file
    assert values["concurrency"] == (5, "$ROOKERY_CONCURRENCY")
    assert values["seed"] == (9, "rookery.toml")
    assert values["policy"] == ([server.url], "rookery.toml")
    assert values["attempts"] == (3, "default")
    assert values["runners"] == (os.cpu_count(), "default")
    assert values["arg.max_turns"] == (8, "command line")
    assert values["arg.max_result"] == (99, "rookery.toml")
    assert values["limits.run"] == (20.0, "rookery.toml")
    assert values["limits.turns"] == (8, "environment's code")
    assert values["top-k"] == (4, "rookery.toml")
    assert (event["tasks"], event["rollouts"]) == (4, 8)
    assert event["tools"][0]["name"] == "add"
    assert event["tools"][0]["parameters"]["required"] == ["a", "b"]
    text = await rookery(*run, cwd=here)
    assert "Adds two numbers." in text.out
    other = await rookery(*run, "--config", "rookery.toml", "--json", cwd=here)
    assert other.code == 0


@pytest.mark.long
async def test_dry_run_starts_nothing(here: Path, server: ModelServer) -> None:
    (here / "tasks.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": 7}\n')
    done = await rookery("run", "tools", "--tasks", "tasks.jsonl", "--policy", server.url, "--dry-run", cwd=here)
    assert done.code == 0, done.err
    assert re.search(r"\b2 tasks, 1 ", done.out)
    assert re.search(r"tasks\.jsonl\W.*\b2\b", done.out)
    assert "python" in done.out
    assert server.connections == 0
    assert sorted(path.name for path in here.iterdir() if path.name != "__pycache__") == ["sums.py", "tasks.jsonl"]


@pytest.mark.long
async def test_dry_run_reports_what_would_prevent_the_start(here: Path) -> None:
    done = await rookery(*RUN, "--dry-run", cwd=here)
    assert done.code == 2
    assert "4 tasks" in done.out
    assert "--policy" in done.err
    done = await rookery(*RUN, "--dry-run", "--policy", "nowhere", "-o", "sums.py", cwd=here)
    assert done.code == 2
    assert "http://" in done.err
    assert "sums.py" in done.err


async def test_closed_stderr_does_not_change_the_exit_code() -> None:
    script = (
        "import sys\n"
        "from rookery.cli.errors import run_with_exit_code\n"
        "from rookery.cli.terminal import write_line\n"
        "sys.exit(run_with_exit_code(lambda: 3 if not write_line(1) and not write_line(2, err=False) else 0))\n"
    )
    read, write = os.pipe()
    os.close(read)
    try:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=write, stderr=write)
    finally:
        os.close(write)
    async with asyncio.timeout(60):
        assert await process.wait() == 3


@pytest.mark.long
async def test_closed_output_does_not_change_the_result_of_a_run(here: Path, server: ModelServer) -> None:
    tasks(here, 3, boom=(1,))
    read, write = os.pipe()
    os.close(read)
    try:
        command = (*COMMAND, *RUN, "--policy", server.url, "--runners", "0")
        process = await asyncio.create_subprocess_exec(
            *command, cwd=here, env=environ(), stdout=write, stderr=write
        )
    finally:
        os.close(write)
    async with asyncio.timeout(60):
        assert await process.wait() == 3
    with RunReader(runs(here)[0]) as reader:
        assert reader.counts() == {"completed": 2, "bug.scoring": 1}
        assert reader.status == "finished"


@pytest.mark.long
async def test_upstream_options_come_from_command_line_and_file(here: Path, server: ModelServer) -> None:
    (here / "rookery.toml").write_text("[run]\nwait-for-upstream = 7\nreplica-concurrency = 3\n")
    run = ("run", "arithmetic", "--policy", server.url)
    shown = await rookery(*run, "--dry-run", "--json", "--replica-concurrency", "5", cwd=here)
    (event,) = shown.events
    values = plain(event["values"])
    assert values["wait-for-upstream"] == (7.0, "rookery.toml")
    assert values["replica-concurrency"] == (5, "command line")
    refused = await rookery(*run, "--tool-parser", "qwen3", cwd=here)
    assert (refused.code, "--tokenizer" in refused.err) == (2, True)
    wrong = await rookery(*run, "--tool-parser", "x", "--record", "messages", cwd=here)
    assert wrong.code == 2
