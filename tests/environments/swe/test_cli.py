"""Tools and servers as the command line and `rookery.toml` name them."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import rookery

FILE = """
[run]
policy = "http://127.0.0.1:1"
model = "m"
tools = ["bash", "submit", "mine:lookup"]

[run.tool-config]
preset = "open-instruct"

[run.tool-config.bash]
output = 4000

[[run.mcp]]
name = "files"
command = "python3 -m server"
"""
MINE = '''
async def lookup(word: str) -> str:
    """Looks a word up."""
    return word
'''


def write_harbor_task(folder: Path, toml: str, script: str = "exit 0\n") -> None:
    (folder / "tests").mkdir(parents=True)
    for name, text in (("task.toml", toml), ("instruction.md", "Do it.\n"), ("tests/test.sh", script)):
        (folder / name).write_text(text)


async def dry_run(here: Path, *words: str) -> dict[str, Any]:
    result = await rookery("run", "swe", "--tasks", "t.jsonl", *words, "--dry-run", "--json", cwd=here)
    (event,) = result.events
    return event


@pytest.mark.long
async def test_file_and_command_line_configure_tools(tmp_path: Path) -> None:
    (tmp_path / "rookery.toml").write_text(FILE)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "t.jsonl").write_text('{"prompt": "?"}\n')
    event = await dry_run(tmp_path)
    assert [tool["name"] for tool in event["tools"]] == ["execute_bash", "submit", "lookup"]
    values = {row["name"]: row for row in event["values"]}
    assert values["arg.tool_config"]["value"] == {"preset": "open-instruct", "bash": {"output": 4000}}
    assert values["arg.mcp"]["value"] == [{"name": "files", "command": "python3 -m server"}]
    (tmp_path / "more.toml").write_text('marker = "DONE"\n[bash]\nname = "terminal"\n')
    event = await dry_run(
        tmp_path, "--tools", "bash,edit", "--tool-config", "more.toml", "--tool-config", "bash.timeout=5"
    )
    assert [tool["name"] for tool in event["tools"]] == ["terminal", "str_replace_editor"]
    values = {row["name"]: row for row in event["values"]}
    assert values["arg.tools"] == {
        "name": "arg.tools",
        "value": ["bash", "edit"],
        "origin": "command line",
        "note": "",
    }
    assert values["arg.tool_config"]["value"]["bash"] == {"output": 4000, "name": "terminal", "timeout": 5}


@pytest.mark.long
async def test_unknown_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "?"}\n')
    run = ("run", "swe", "--tasks", "t.jsonl", "--policy", "http://127.0.0.1:1", "--model", "m")
    (await rookery(*run, "--tools", "bsah", cwd=tmp_path)).assert_refused("tool 'bsah'", "bash, edit, submit")
    (await rookery(*run, "--tool-config", "bash.nme=x", cwd=tmp_path)).assert_refused("nme", "description")
    (await rookery(*run, "--tool-config", "nothing.toml", cwd=tmp_path)).assert_refused("neither KEY=VALUE nor")


@pytest.mark.long
async def test_task_data_and_variables_are_options_or_settings(tmp_path: Path) -> None:
    write_harbor_task(
        tmp_path / "elsewhere" / "one", '[environment.env]\nPORT = "${PORT}"\nHOST = "${HOST:-here}"\n'
    )
    (tmp_path / "t.jsonl").write_text('{"env_config": {"task_id": "one"}}\n')
    policy = ("--policy", "http://127.0.0.1:1", "--model", "m")
    event = await dry_run(tmp_path, *policy)
    assert "--task-data" in event["invalid"][0]
    event = await dry_run(tmp_path, *policy, "--task-data", "elsewhere")
    assert "--variable" in event["invalid"][0]
    (tmp_path / "rookery.toml").write_text(
        '[run]\ntask_data = "elsewhere"\n[run.variables]\nPORT = 80\nHOST = "x"\n'
    )
    event = await dry_run(tmp_path, *policy, "--variable", "HOST=a=b")
    assert event["invalid"] == []
    values = {row["name"]: (row["value"], row["origin"]) for row in event["values"]}
    assert values["task-data"] == ("elsewhere", "rookery.toml")
    assert values["variable.PORT"] == ("80", "rookery.toml")
    assert values["variable.HOST"] == ("a=b", "command line")
    result = await rookery("run", "swe", "--dry-run", cwd=tmp_path)
    assert result.code == 2
    assert "--tasks" in result.err
    (tmp_path / "rookery.toml").write_text("[run.variables]\nPORT = [80]\n")
    result = await rookery("run", "swe", "--tasks", "t.jsonl", "--dry-run", cwd=tmp_path)
    assert result.code == 2
    assert "[run.variables] 'PORT'" in result.err


@pytest.mark.long
async def test_validate_takes_task_data_and_variables(tmp_path: Path) -> None:
    script = '[ "$PORT" = 80 ] && echo 1 > /logs/verifier/reward.txt\n'
    write_harbor_task(tmp_path / "elsewhere" / "one", '[environment.env]\nPORT = "${PORT}"\n', script)
    (tmp_path / "t.jsonl").write_text('{"env_config": {"task_id": "one"}}\n')
    words = ("validate", "t.jsonl", "--only", "one", "--no-cheats", "--provider", "local", "--json")
    result = await rookery(*words, "--task-data", "elsewhere", "--variable", "PORT=80", cwd=tmp_path)
    (task,) = result.events[-1]["tasks"]
    # Its tests look at the variable alone, so it is no task to train on.
    assert (task["task"], [one["variant"] for one in task["tried"]]) == ("one", ["nothing"])
    assert (result.code, bool(task["tried"][0]["problem"])) == (3, True)
