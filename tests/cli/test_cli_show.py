"""`ls`, `show`, `export` and `init`."""

import asyncio
import csv
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import tasks
from tests.cli.helpers import COMMAND, environ, rookery, runs, start_command, wait_for_end
from tests.servers import Answer, ModelServer

RUN = ("run", "sums.py", "--tasks", "tasks.jsonl", "--runners", "0")


@pytest.fixture
async def finished_run(here: Path, server: ModelServer) -> Path:
    """A run of six tasks, two rollouts each. The second fails; the first reply contains terminal escapes."""
    tasks(here, 6, boom=(1,))
    server.then(
        Answer("one\x1b[2Jmoment", calls=[("add", '{"a": 20, "b": 22}')], finish="tool_calls", ids=[7, 8, 9])
    )
    server.default = Answer("42", ids=[5], logprobs=[-0.25], prompt_ids=[1, 2, 3])
    done = await rookery(*RUN, "--policy", server.url, "-k", "2", "-c", "1", cwd=here)
    assert done.code == 3, done.err
    return here


@pytest.mark.long
async def test_ls_lists_the_runs(finished_run: Path) -> None:
    done = await rookery("ls", cwd=finished_run)
    assert done.code == 0
    assert runs(finished_run)[0].name in done.out
    assert "finished" in done.out
    line = (await rookery("ls", "--json", cwd=finished_run)).events[0]
    assert line["labels"] == {"completed": 10, "bug.scoring": 2}
    assert line["mean_reward"] == 1.0
    empty = await rookery("ls", "--runs", "nowhere", cwd=finished_run)
    assert empty.code == 0
    assert " nowhere " in empty.err
    (finished_run / "rookery.toml").write_text("[run]\nout = 'elsewhere'\n")
    assert " elsewhere " in (await rookery("ls", cwd=finished_run)).err
    assert runs(finished_run)[0].name in (await rookery("ls", cwd=finished_run, ROOKERY_OUT="runs")).out


@pytest.mark.long
async def test_show_prints_the_summary_and_a_page_of_rollouts(finished_run: Path) -> None:
    done = await rookery("show", "latest", "-n", "5", cwd=finished_run)
    assert done.code == 0
    assert "10 valid, 2 failed" in done.out
    assert "0.0 " in done.out
    assert "2.0 " in done.out
    assert "2.1 " not in done.out
    assert "--page 2" in done.err
    failed = await rookery("show", "latest", "--failed", cwd=finished_run)
    assert [row.split()[0] for row in failed.out.splitlines()] == ["rollout", "1.0", "1.1"]
    labelled = await rookery("show", "latest", "--label", "completed", "--task", "t3", cwd=finished_run)
    assert [row.split()[0] for row in labelled.out.splitlines()] == ["rollout", "3.0", "3.1"]
    group = await rookery("show", "latest", "4", cwd=finished_run)
    assert [row.split()[0] for row in group.out.splitlines()] == ["rollout", "4.0", "4.1"]
    data = json.loads((await rookery("show", "latest", "--json", cwd=finished_run)).out)
    assert (data["failed"], len(data["rollouts_shown"])) == (2, 12)
    (await rookery("show", "latest", "--label", "nothing", cwd=finished_run)).assert_refused("nothing")


@pytest.mark.long
async def test_show_prints_transcript_tokens_and_timings_of_a_rollout(finished_run: Path) -> None:
    done = await rookery("show", "latest", "0.0", cwd=finished_run)
    assert done.code == 0
    for part in (" 0.0  completed  ", "sum 0", "add(", '{"a": 20, "b": 22}'):
        assert part in done.out
    assert "\x1b" not in done.out
    assert "one\\x1b[2Jmoment" in done.out
    tokens = await rookery("show", "latest", "2.0", "--tokens", cwd=finished_run)
    assert "5:-0.250" in tokens.out
    assert "1 2 3" in tokens.out
    data = json.loads((await rookery("show", "latest", "0.0", "--json", "--tokens", cwd=finished_run)).out)
    assert data["messages"][0] == {"role": "user", "content": "sum 0"}
    assert [message["role"] for message in data["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert data["segments"]


@pytest.mark.long
async def test_show_prints_the_original_traceback_of_a_failure(finished_run: Path) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [*COMMAND, "show", "latest", "1.0"],
        cwd=finished_run,
        env=environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert re.search(r"\bscore\b.*\bbug\.scoring\b.*\bbug\b", done.stdout)
    assert "Traceback (most recent call last):" in done.stdout
    assert 'raise ValueError("boom in scoring")' in done.stdout


@pytest.mark.long
async def test_show_refuses_an_unknown_rollout(finished_run: Path) -> None:
    (await rookery("show", "latest", "99.0", cwd=finished_run)).assert_refused("'99.0'")


@pytest.mark.long
async def test_show_follows_a_live_run_to_its_end(here: Path, server: ModelServer) -> None:
    hold = asyncio.Event()
    server.then(Answer("42"))
    server.default = Answer("42", hold=hold)
    async with start_command(*RUN, "--policy", server.url, "-c", "2", cwd=here) as running:
        async with asyncio.timeout(60):
            await server.wait_for_requests(3)
        async with start_command("show", "latest", "--follow", "--json", cwd=here) as following:
            assert following.stdout is not None
            async with asyncio.timeout(60):
                while json.loads(await following.stdout.readline())["event"] != "rollout":
                    pass
            hold.set()
            rest = await wait_for_end(following)
        assert (await wait_for_end(running)).code == 0
    assert rest.code == 0
    seen = [event["id"] for event in rest.events if event["event"] == "rollout"]
    assert len(seen) == 3
    assert "run.ended" in [event.get("kind") for event in rest.events]


@pytest.mark.long
async def test_export_writes_jsonl_and_parquet(finished_run: Path) -> None:
    done = await rookery("export", "latest", "-o", "out.jsonl", "--tokens", cwd=finished_run)
    assert done.code == 0
    assert re.search(r"\b12\b.*\bout\.jsonl\b", done.err)
    rows = [json.loads(line) for line in (finished_run / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert rows[4]["segments"][0]["tokens"] == [1, 2, 3, 5]
    to_stdout = await rookery("export", "latest", cwd=finished_run)
    assert [json.loads(line)["id"] for line in to_stdout.out.splitlines()] == [row["id"] for row in rows]
    assert (await rookery("export", "latest", "-o", "out.parquet", cwd=finished_run)).code == 0
    import pyarrow.parquet as pq

    assert pq.read_table(finished_run / "out.parquet").num_rows == 12
    (await rookery("export", "latest", "--format", "parquet", cwd=finished_run)).assert_refused("-o FILE.parquet")
    (await rookery("export", "latest", "-o", "no/such/out.jsonl", cwd=finished_run)).assert_refused(
        "no/such/out.jsonl", "No such file"
    )


@pytest.mark.long
async def test_closed_pipe_prints_no_error(finished_run: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            "export",
            "latest",
            cwd=finished_run,
            env=environ(),
            stdout=write,
            stderr=asyncio.subprocess.PIPE,
        )
    finally:
        os.close(write)
    _, err = await process.communicate()
    assert process.returncode == 128 + signal.SIGPIPE
    assert err == b""


@pytest.mark.long
async def test_init_creates_a_working_environment_and_never_overwrites(
    tmp_path: Path, server: ModelServer
) -> None:
    done = await rookery("init", "My sums", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "rookery run my_sums/my_sums.py" in done.out
    server.then(Answer(None, calls=[("multiply", '{"a": 24, "b": 17}')], finish="tool_calls"))
    server.default = Answer("408")
    finished_run = await rookery(
        "run", "my_sums/my_sums.py", "--policy", server.url, "--runners", "1", cwd=tmp_path
    )
    assert finished_run.code == 0, finished_run.err
    assert "25.0%" in finished_run.out
    source = (tmp_path / "my_sums" / "my_sums.py").read_text()
    (tmp_path / "my_sums" / "my_sums.py").write_text("mine")
    (await rookery("init", "my-sums", cwd=tmp_path)).assert_refused("my_sums.py")
    assert (tmp_path / "my_sums" / "my_sums.py").read_text() == "mine"
    assert (await rookery("init", "other", "my_sums/deeper", cwd=tmp_path)).code == 0
    assert (tmp_path / "my_sums" / "deeper" / "other.py").read_text() == source.replace("MySums", "Other")
    for name in ("class", "1st", "…"):
        (await rookery("init", name, cwd=tmp_path)).assert_refused(name)
    (await rookery("init", "x", "/proc/nowhere", cwd=tmp_path)).assert_refused("/proc/nowhere")


@pytest.mark.long
async def test_unknown_label_is_refused_with_the_known_ones(finished_run: Path) -> None:
    (await rookery("show", "latest", "--label", "complete", cwd=finished_run)).assert_refused(
        "'complete'", "'completed'"
    )
    (await rookery("show", "latest", "--label", "zzz", cwd=finished_run)).assert_refused(
        "'zzz'", "bug.scoring, completed"
    )


@pytest.mark.long
async def test_page_beyond_the_end_is_refused_with_the_number_of_pages(finished_run: Path) -> None:
    (await rookery("show", "latest", "-n", "5", "--page", "4", cwd=finished_run)).assert_refused(
        " 4", "12 ", " 3 "
    )
    (await rookery("show", "latest", "--failed", "--page", "2", cwd=finished_run)).assert_refused("2 ", " 1 ")
    (await rookery("show", "latest", "--page", "2", "--json", cwd=finished_run)).assert_refused("12 ", " 1 ")
    (await rookery("show", "latest", "99", cwd=finished_run)).assert_refused(" 99")
    (await rookery("show", "latest", "--task", "nobody", cwd=finished_run)).assert_refused("'nobody'")


@pytest.mark.long
async def test_ls_shows_settings_in_which_runs_differ(here: Path, server: ModelServer) -> None:
    for temperature in ("0.25", "0.75"):
        done = await rookery(*RUN, "--policy", server.url, "--temperature", temperature, cwd=here)
        assert done.code == 0, done.err
    listed = (await rookery("ls", cwd=here)).out.splitlines()
    assert ["temperature=0.75" in line for line in listed[1:]] == [True, False]
    assert ["temperature=0.25" in line for line in listed[1:]] == [False, True]
    assert "seed=" not in "".join(listed)  # the same in both
    settings = [line["settings"]["sampling"] for line in (await rookery("ls", "--json", cwd=here)).events]
    assert settings == [{"temperature": 0.75}, {"temperature": 0.25}]
    assert "temperature=0.75" in (await rookery("show", "latest", cwd=here)).out
    shown = (await rookery("show", "latest", "--json", cwd=here)).events[0]
    assert shown["settings"]["sampling"] == {"temperature": 0.75}


@pytest.mark.long
async def test_explicit_default_is_not_a_difference(here: Path, server: ModelServer) -> None:
    for options in ((), ("--breaker", "0.5", "--attempts", "3")):
        done = await rookery(*RUN, "--policy", server.url, *options, cwd=here)
        assert done.code == 0, done.err
    first, second = [line["settings"] for line in (await rookery("ls", "--json", cwd=here)).events]
    assert first == second
    assert not {"breaker", "retry"} & first.keys()


@pytest.mark.long
async def test_show_prints_what_the_environment_logged(here: Path, server: ModelServer) -> None:
    (here / "logs.py").write_text(
        "import rookery\n"
        "@rookery.environment(tasks=['question'])\n"
        "async def logs(ctx):\n"
        "    ctx.log.info('looked up \\x1b[2J', rows=3)\n"
        "    await ctx.policy.chat(ctx.task.prompt)\n"
        "    ctx.log.warning(f'member {ctx.attempt}')\n"
        "    return 1.0\n"
    )
    done = await rookery("run", "logs.py", "--policy", server.url, "-k", "2", "--runners", "0", cwd=here)
    assert done.code == 0, done.err
    shown = (await rookery("show", "latest", "0.1", cwd=here)).out
    assert "log.info" in shown
    assert '{"rows":3}' in shown
    assert "member 0.1.1" in shown
    assert "member 0.0.1" not in shown
    assert "\x1b" not in shown
    plain = (await rookery("show", "latest", "r0.1", "--json", cwd=here)).events[0]
    assert [(one["kind"], one["data"].get("rows")) for one in plain["events"]] == [
        ("log.info", 3),
        ("log.warning", None),
    ]


@pytest.mark.long
async def test_export_format_follows_the_file_name(finished_run: Path) -> None:
    done = await rookery("export", "latest", "-o", "x.csv", cwd=finished_run)
    assert done.code == 0, done.err
    with (finished_run / "x.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 12
    assert found[0]["id"] == "r0.0"
    assert found[0]["answer"] == "42"
    assert json.loads(found[0]["task_data"])["answer"] == 42
    assert json.loads(found[0]["run"])["settings"]["stream"]["k"] == 2
    assert found[2]["reward"] == ""
    (await rookery("export", "latest", "-o", "x.xlsx", cwd=finished_run)).assert_refused("x.xlsx", ".csv")
    assert not (finished_run / "x.xlsx").exists()
    stdout = await rookery("export", "latest", "--format", "csv", cwd=finished_run)
    assert stdout.out == (finished_run / "x.csv").read_text()
