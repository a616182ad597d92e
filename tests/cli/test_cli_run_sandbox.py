"""`rookery run` and its sandboxes: settings, their origins, and machines without isolation."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rookery.engine import EngineConfig
from rookery.journal import RunReader
from tests.cli.helpers import CommandResult, runs
from tests.cli.sandbox_kit import local_sandboxes, run_cli, without_isolation
from tests.servers import Answer, ModelServer, Request

__all__ = ["local_sandboxes", "without_isolation"]

SANDBOXED = """
import rookery
from rookery.core import SandboxSpec


class Boxed(rookery.ToolEnvironment):
    sandbox = SandboxSpec(network="all", pids=50)
"""
OPENS = """
import rookery
from rookery.sandboxes.protocol import Command


@rookery.tool
async def shout(ctx: rookery.Context) -> str:
    \"\"\"Shouts.\"\"\"
    sandbox = await ctx.sandbox()
    return (await sandbox.exec(Command(argv=("sh", "-c", "echo HI; pwd")))).stdout.decode()


class Opens(rookery.ToolEnvironment):
    toolset = [shout]
"""


def rows(done: CommandResult) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(done.out)["values"]}


def dry_run(folder: Path, *args: str, env: str = "sums.py", **more: Any) -> CommandResult:
    policy = ("--policy", "http://localhost:9/v1")
    return run_cli("run", env, "--tasks", "tasks.jsonl", *policy, "--dry-run", "--json", *args, cwd=folder, **more)


@pytest.mark.usefixtures("local_sandboxes")
def test_dry_run_shows_the_default_sandbox(here: Path) -> None:
    found = rows(dry_run(here))
    assert (found["sandbox"]["value"], found["sandbox"]["origin"], found["sandbox"]["note"]) == (
        "local",
        "default",
        "isolated",
    )
    assert (found["sandbox.network"]["value"], found["sandbox.network"]["origin"]) == ("none", "default")


@pytest.mark.long
def test_command_line_overrides_variable_file_and_environment(here: Path) -> None:
    (here / "sandboxed.py").write_text(SANDBOXED)
    (here / "rookery.toml").write_text('[run]\nsandbox = "subprocess"\nnetwork = "model"\n')
    found = rows(
        dry_run(here, "--network", "none", env="sandboxed.py", ROOKERY_NETWORK="allow", ROOKERY_IMAGE="some")
    )
    assert (found["sandbox"]["value"], found["sandbox"]["origin"]) == ("subprocess", "rookery.toml")
    assert found["sandbox"]["note"]
    assert (found["sandbox.network"]["value"], found["sandbox.network"]["origin"]) == ("none", "command line")
    assert (found["sandbox.image"]["value"], found["sandbox.image"]["origin"]) == ("some", "$ROOKERY_IMAGE")
    assert (found["sandbox.pids"]["value"], found["sandbox.pids"]["origin"]) == (50, "environment's code")
    found = rows(dry_run(here, env="sandboxed.py", ROOKERY_NETWORK="allow"))
    assert (found["sandbox.network"]["value"], found["sandbox.network"]["origin"]) == ("allow", "$ROOKERY_NETWORK")
    found = rows(dry_run(here, env="sandboxed.py"))
    assert (found["sandbox.network"]["value"], found["sandbox.network"]["origin"]) == ("model", "rookery.toml")
    (here / "rookery.toml").unlink()
    found = rows(dry_run(here, "--sandbox", "subprocess", env="sandboxed.py"))
    assert (found["sandbox.network"]["value"], found["sandbox.network"]["origin"]) == ("all", "environment's code")


def test_sandbox_table_of_the_file_sets_all_fields(here: Path) -> None:
    table = '[run.sandbox]\nprovider = "subprocess"\nmemory = 1073741824\nallow = ["a.example"]\n'
    (here / "rookery.toml").write_text(f"[run]\nunsafe = true\n{table}")
    found = rows(dry_run(here))
    assert (found["sandbox"]["value"], found["sandbox"]["origin"]) == ("subprocess", "rookery.toml")
    assert found["sandbox.allow"]["value"] == ["a.example"]
    assert found["sandbox.untrusted_ok"]["value"] is True
    found = rows(dry_run(here, "--allow", "b.example"))
    assert found["sandbox.allow"] == {
        "name": "sandbox.allow",
        "value": ["b.example"],
        "origin": "command line",
        "note": "",
    }
    assert found["sandbox.network"]["value"] == "allow"


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--sandbox", "nosuch"], "'nosuch' ... docker, kubernetes, local"),
        (["--network", "some"], "--network"),
        (["--sandbox", "subprocess", "--image", "debian"], "subprocess ... debian"),
        (["--sandbox", "subprocess", "--network", "model"], "subprocess ... network"),
    ],
)
def test_invalid_sandbox_options_are_refused_before_the_start(args: list[str], named: str, here: Path) -> None:
    fixed = ("--tasks", "tasks.jsonl", "--policy", "http://localhost:9/v1")
    done = run_cli("run", "sums.py", *fixed, *args, cwd=here)
    done.assert_refused(*named.split(" ... "))
    assert runs(here) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sandbox = 7", "sandbox"),
        ("sandbox = true", "sandbox"),
        ('unsafe = "yes"', "'yes'"),
        ('network = "some"', "[run] network"),
        ("[run.sandbox]\nprovder = 'x'", "provder"),
    ],
)
def test_invalid_sandbox_table_is_reported_with_its_key(text: str, named: str, here: Path) -> None:
    (here / "rookery.toml").write_text(f"[run]\n{text}\n")
    run_cli("run", "sums.py", "--policy", "http://localhost:9/v1", cwd=here).assert_refused("rookery.toml", named)


# ---- real runs


def _reply_with_program(request: Request) -> Answer:
    if any(message["role"] == "tool" for message in request.body["messages"]):
        return Answer("42")
    return Answer(None, calls=[("shout", "{}")])


async def run(folder: Path, server: ModelServer, *args: str, env: str = "opens.py", **more: Any) -> CommandResult:
    (folder / "opens.py").write_text(OPENS)
    fixed = ("run", env, "--tasks", "tasks.jsonl", "--policy", server.url, "--runners", "1")
    return await asyncio.to_thread(run_cli, *fixed, *args, cwd=folder, **more)


def config(folder: Path) -> EngineConfig:
    import msgspec

    with RunReader(runs(folder)[-1]) as reader:
        return msgspec.convert(reader.config(), EngineConfig)


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
async def test_run_uses_sandboxes_by_default_and_records_the_provider(here: Path) -> None:
    async with ModelServer(_reply_with_program) as server:
        done = await run(here, server)
        seen = [
            message["content"] for message in server.requests[-1].body["messages"] if message["role"] == "tool"
        ]
    assert done.code == 0, done.err
    assert seen == ["HI\n/work\n"]
    assert "not_isolated" not in done.err
    assert config(here).sandbox.provider == "local"


@pytest.mark.long
async def test_named_provider_without_isolation_is_used_with_a_warning(here: Path) -> None:
    async with ModelServer(_reply_with_program) as server:
        done = await run(here, server, "--sandbox", "subprocess")
    assert done.code == 0, done.err
    assert done.err.count("sandbox.not_isolated") == 1
    assert config(here).sandbox.provider == "subprocess"


@pytest.mark.long
async def test_environment_without_sandbox_runs_without_isolation_with_a_warning(
    here: Path, without_isolation: tuple[str, ...], server: ModelServer
) -> None:
    done = await run(here, server, env="sums.py", before=without_isolation)
    assert done.code == 0, done.err
    assert done.err.count("sandbox.not_isolated") == 1
    assert "local: " in done.err


@pytest.mark.long
async def test_environment_that_needs_a_sandbox_does_not_start_without_isolation(
    here: Path, without_isolation: tuple[str, ...], server: ModelServer
) -> None:
    (here / "sandboxed.py").write_text(SANDBOXED)
    for env in ("tools", "sandboxed.py"):
        done = await run(here, server, env=env, before=without_isolation)
        done.assert_refused("rookery doctor", "--unsafe")
    assert runs(here) == []
    done = await asyncio.to_thread(dry_run, here, env="tools", before=without_isolation)
    assert done.code == 2
    assert rows(done)["sandbox"]["value"] is None
    assert rows(done)["sandbox"]["note"]


@pytest.mark.long
async def test_sandbox_request_is_refused_without_isolation(
    here: Path, without_isolation: tuple[str, ...]
) -> None:
    async with ModelServer(_reply_with_program) as server:
        done = await run(here, server, "-n", "1", "--breaker", "off", "--attempts", "1", before=without_isolation)
    assert done.code == 3, done.err
    assert "sandbox.refused" in done.err
    assert config(here).sandbox.provider == "", "a resume must not take this for a choice"


@pytest.mark.long
async def test_unsafe_runs_without_isolation_with_a_warning(
    here: Path, without_isolation: tuple[str, ...]
) -> None:
    async with ModelServer(_reply_with_program) as server:
        done = await run(here, server, "--unsafe", before=without_isolation)
    assert done.code == 0, done.err
    assert done.err.count("sandbox.not_isolated") == 1
    assert config(here).sandbox.provider == "subprocess"
