"""Tools and servers as the command line and `rookery.toml` name them."""

from pathlib import Path
from typing import Any

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


async def dry(here: Path, *words: str) -> dict[str, Any]:
    done = await rookery("run", "swe", "--tasks", "t.jsonl", *words, "--dry-run", "--json", cwd=here)
    (event,) = done.events
    return event


async def test_the_file_and_the_command_line_configure_tools(tmp_path: Path) -> None:
    (tmp_path / "rookery.toml").write_text(FILE)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "t.jsonl").write_text('{"prompt": "?"}\n')
    event = await dry(tmp_path)
    assert [tool["name"] for tool in event["tools"]] == ["execute_bash", "submit", "lookup"]
    values = {row["name"]: row for row in event["values"]}
    assert values["arg.tool_config"]["value"] == {"preset": "open-instruct", "bash": {"output": 4000}}
    assert values["arg.mcp"]["value"] == [{"name": "files", "command": "python3 -m server"}]
    (tmp_path / "more.toml").write_text('marker = "DONE"\n[bash]\nname = "terminal"\n')
    event = await dry(
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


async def test_a_wrong_name_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "?"}\n')
    run = ("run", "swe", "--tasks", "t.jsonl", "--policy", "http://127.0.0.1:1", "--model", "m")
    (await rookery(*run, "--tools", "bsah", cwd=tmp_path)).refused("no tool 'bsah'", "bash, edit, submit")
    (await rookery(*run, "--tool-config", "bash.nme=x", cwd=tmp_path)).refused("nme", "description")
    (await rookery(*run, "--tool-config", "nothing.toml", cwd=tmp_path)).refused("neither KEY=VALUE nor")
