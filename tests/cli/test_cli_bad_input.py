"""Invalid input is one clear sentence with the right exit code, and loses no data."""

import asyncio
import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rookery.journal import RunReader
from tests.cli.conftest import tasks
from tests.cli.helpers import rookery, runs, start_command, wait_for_end
from tests.servers import Answer, ModelServer, unreachable_url


async def refused(here: Path, *args: str | Path, named: tuple[str, ...]) -> None:
    (await rookery(*args, cwd=here)).assert_refused(*named)
    assert not (here / "runs").exists()


@pytest.mark.long
async def test_missing_tasks_file_is_refused(here: Path, server: ModelServer) -> None:
    await refused(here, "run", "sums.py", "--tasks", "no.jsonl", "--policy", server.url, named=("no.jsonl",))
    assert server.connections == 0


@pytest.mark.long
async def test_line_that_is_not_json_is_refused_before_the_start(here: Path, server: ModelServer) -> None:
    (here / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    await refused(
        here,
        *("run", "sums.py", "--tasks", "bad.jsonl", "--policy", server.url),
        named=("bad.jsonl", " 2 "),
    )
    assert server.connections == 0


@pytest.mark.long
async def test_invalid_task_row_is_quarantined_and_the_others_run(here: Path, server: ModelServer) -> None:
    rows = [{"id": "fine", "prompt": "a", "answer": 42}, {"id": "odd", "prompt": 3}, {"id": "too", "prompt": "b"}]
    rows[2]["answer"] = 42
    (here / "mixed.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = await rookery("run", "sums.py", "--tasks", "mixed.jsonl", "--policy", server.url, "-k", "2", cwd=here)
    assert done.code == 3
    assert "mixed.jsonl, line 2" in done.err
    with RunReader(runs(here)[0]) as reader:
        assert reader.counts() == {"completed": 4, "task.invalid": 2}
        assert [row.status for row in reader.task_rows()] == ["ok", "quarantined", "ok"]


@pytest.mark.long
async def test_unknown_environment_is_refused_with_the_known_ones(here: Path) -> None:
    await refused(here, "run", "nothing", named=("'nothing'", "tools"))
    await refused(here, "run", "nothing.py", named=("nothing.py",))
    await refused(here, "run", "no.module:attr", named=("'no.module'",))
    await refused(here, "run", "sums.py:Nope", named=("'Nope'",))


@pytest.mark.long
async def test_environment_that_raises_on_import_is_reported_with_its_line(
    here: Path, server: ModelServer
) -> None:
    (here / "broken.py").write_text("import rookery\n\nx = undefined\n")
    await refused(here, "run", "broken.py", named=("NameError: name 'undefined'", "broken.py", " 3"))
    (here / "torn.py").write_text("def (:\n")
    await refused(here, "run", "torn.py", named=("SyntaxError", "torn.py", " 1"))
    (here / "raising.py").write_text(
        "import rookery\n\n\ndef some():\n    raise KeyError('rows')\n\n\n"
        "@rookery.environment(tasks=some)\nasync def play(ctx):\n    return 1.0\n"
    )
    await refused(
        here,
        "run",
        "raising.py",
        "--policy",
        server.url,
        named=("play", "KeyError", "raising.py", " 5"),
    )


@pytest.mark.long
async def test_unreachable_policy_is_reported_before_the_start(here: Path) -> None:
    async with unreachable_url() as url:
        await refused(here, "run", "sums.py", "--tasks", "tasks.jsonl", "--policy", url, named=(url,))


@pytest.mark.long
async def test_invalid_policy_is_refused(here: Path, server: ModelServer) -> None:
    run = ("run", "sums.py", "--tasks", "tasks.jsonl")
    await refused(here, *run, named=("--policy",))
    await refused(here, *run, "--policy", "localhost:8000", named=("localhost:8000", "http://"))
    await refused(here, *run, "--policy", server.url, "--model", "other", named=("'other'", "test-model"))
    server.models = ("one", "two")
    await refused(here, *run, "--policy", server.url, named=("--model", "one, two"))
    server.models = Answer(status=401, error="no such key")
    await refused(here, *run, "--policy", server.url, named=("ROOKERY_API_KEY",))


@pytest.mark.long
async def test_unknown_environment_argument_is_refused(here: Path, server: ModelServer) -> None:
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url)
    await refused(here, *run, "--arg", "nope=1", named=("'nope'",))
    await refused(here, *run, "--arg", "nope", named=("KEY=VALUE",))
    await refused(here, *run, "--arg", "max_turns=0", named=("max_turns",))


@pytest.mark.long
async def test_invalid_configuration_file_is_reported_with_its_key(here: Path) -> None:
    named: tuple[str, ...]
    for text, named in {
        "[run\n": ("rookery.toml", "TOML"),
        "[run]\npolcy = 'x'\n": ("[run]", "'polcy'", "'policy'"),
        "[rum]\n": (" rum",),
        "[run]\nk = 'many'\n": ("[run] k ", "many"),
        "[run]\nk = true\n": ("[run] k ", "True"),
        "[run]\nmodel = ['a']\n": ("[run] model ",),
        "[run.limits]\nturn = 3\n": ("[run.limits]",),
        "[run.limits]\nturns = -3\n": ("limits.turns", "-3"),
        "[run.sampling]\ntemperature = 'hot'\n": ("[run.sampling]",),
        "[run.roles.judge]\nurll = 'x'\n": ("[run.roles.judge]", "'urll'"),
    }.items():
        (here / "rookery.toml").write_text(text)
        await refused(
            here, "run", "sums.py", "--tasks", "tasks.jsonl", "--policy", "http://127.0.0.1:1", named=named
        )
    (here / "rookery.toml").unlink()
    await refused(here, "run", "sums.py", "--config", "no.toml", named=("no.toml",))


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_read_only_output_directory_is_reported(
    here: Path, server: ModelServer, disk: Callable[[str], Path]
) -> None:
    folder = disk("ro,size=64k")
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url)
    (await rookery(*run, "-o", folder, cwd=here)).assert_refused(str(folder), "Read-only file system", "-o")
    (await rookery(*run, "-o", here / "sums.py", cwd=here)).assert_refused("sums.py", "-o")


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_full_disk_stops_the_run_and_resume_loses_nothing(
    here: Path, server: ModelServer, disk: Callable[[str], Path]
) -> None:
    folder = disk("size=1m")
    tasks(here, 60)
    server.default = Answer("x" * 40_000 + " 42")
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url, "--runners", "1", "-c", "4")
    done = await rookery(*run, "-o", folder, cwd=here)
    assert done.code == 4, done.err
    assert str(folder) in done.err
    name = next(path.name for path in folder.glob("2*"))
    subprocess.run(["mount", "-o", "remount,size=32m", str(folder)], check=True)
    with RunReader(folder / name) as reader:
        before = {record.id: record.seed for record in reader.iter_rollouts()}
    assert 0 < len(before) < 60
    again = await rookery("resume", folder / name, cwd=here)
    assert again.code == 0, again.err
    with RunReader(folder / name) as reader:
        after = {record.id: record.seed for record in reader.iter_rollouts()}
        assert len(after) == 60
        assert before.items() <= after.items()
        assert all(reader.turns(record) for record in reader.iter_rollouts())


@pytest.mark.needs("mount")
async def test_disk_full_at_the_start_is_exit_code_2(
    here: Path, server: ModelServer, disk: Callable[[str], Path]
) -> None:
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url, "-o", disk("size=16k"))
    done = await rookery(*run, cwd=here)
    done.assert_refused("journal.sqlite")


@pytest.mark.long
async def test_journal_of_a_newer_version_is_refused_unchanged(here: Path, server: ModelServer) -> None:
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url, "--runners", "0")
    assert (await rookery(*run, cwd=here)).code == 0
    path = runs(here)[0] / "journal.sqlite"
    with sqlite3.connect(path) as journal:
        journal.execute("PRAGMA user_version=99")
    journal.close()
    before = path.read_bytes()
    for command in (("resume", "latest"), ("show", "latest"), ("export", "latest")):
        (await rookery(*command, cwd=here)).assert_refused("format 99")
    listed = await rookery("ls", cwd=here)
    assert listed.code == 0
    assert "unreadable" in listed.out
    assert path.read_bytes() == before


@pytest.mark.long
async def test_second_concurrent_resume_is_refused(here: Path, server: ModelServer) -> None:
    hold = asyncio.Event()
    server.default = Answer("42", hold=hold)
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url, "--runners", "1")
    async with start_command(*run, cwd=here) as first:
        async with asyncio.timeout(60):
            await server.wait_for_requests(4)
        second = await rookery("resume", "latest", cwd=here)
        second.assert_refused(f"pid {first.pid}")
        assert "running" in (await rookery("ls", cwd=here)).out
        hold.set()
        done = await wait_for_end(first)
    assert done.code == 0, done.err
    with RunReader(runs(here)[0]) as reader:
        assert reader.counts() == {"completed": 4}


async def test_unknown_run_is_refused(here: Path) -> None:
    (await rookery("resume", "latest", cwd=here)).assert_refused("runs", "`rookery run`")
    (await rookery("show", "abc", cwd=here)).assert_refused("'abc'")
    (await rookery("export", "./sums.py", cwd=here)).assert_refused("sums.py")


@pytest.mark.long
@pytest.mark.parametrize("misspelt", ["embeded", "Embedded", "embedde:weights"])
async def test_misspelt_embedded_policy_gets_a_suggestion(misspelt: str, here: Path) -> None:
    (await rookery("run", "arithmetic", "-n", "1", "--policy", misspelt, cwd=here)).assert_refused("'embedded'")


async def test_misspelt_environment_or_provider_gets_a_suggestion(here: Path) -> None:
    (await rookery("run", "aritmetic", "--policy", "embedded", cwd=here)).assert_refused("'arithmetic'")
    misspelt = ("run", "arithmetic", "--policy", "embedded", "--sandbox", "subproces")
    (await rookery(*misspelt, cwd=here)).assert_refused("'subprocess'")


@pytest.mark.long
async def test_sizes_in_the_file_have_the_same_format_as_options(here: Path) -> None:
    (here / "rookery.toml").write_text('[run]\n[run.sandbox]\nmemory = "1G"\ndisk = "512M"\noutput = 4096\n')
    plan = ("run", "arithmetic", "--policy", "embedded", "-n", "1", "--dry-run", "--json")
    done = await rookery(*plan, cwd=here)
    assert done.code == 0, done.err
    assert str(1 << 30) in done.out
    assert str(512 << 20) in done.out
    (here / "rookery.toml").write_text("[run]\n[run.sandbox]\nmemory = 256e6\n")
    done = await rookery(*plan, cwd=here)
    assert done.code == 0, done.err
    assert "256000000" in done.out
    (here / "rookery.toml").write_text('[run]\n[run.sandbox]\nmemory = "lots"\n')
    (await rookery("run", "arithmetic", "--policy", "embedded", cwd=here)).assert_refused(
        "[run.sandbox] memory", "'lots'"
    )
    (here / "rookery.toml").write_text('[run]\n[run.sandbox]\nmemry = "1G"\n')
    (await rookery("run", "arithmetic", "--policy", "embedded", cwd=here)).assert_refused("'memry'", "'memory'")


@pytest.mark.long
async def test_run_whose_directory_is_removed_stops(here: Path, server: ModelServer) -> None:
    tasks(here, 200)
    run = ("run", "sums.py", "--tasks", "tasks.jsonl", "--policy", server.url, "-c", "4", "--runners", "1")
    gate = asyncio.Event()
    server.default = Answer("42", hold=gate)
    async with start_command(*run, cwd=here) as process:
        await server.wait_for_requests(4)
        shutil.rmtree(here / "runs")
        gate.set()
        done = await wait_for_end(process)
    assert done.code == 4
    assert str(here / "runs") in done.err or "runs/" in done.err
    assert "Traceback" not in done.err
