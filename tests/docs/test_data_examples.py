"""The TOML and JSON examples of the documentation are accepted by the code that reads them."""

import shlex
from pathlib import Path

import pytest

from rookery import load_tasks
from rookery.environments.agent import find_launcher
from tests.cli.helpers import rookery
from tests.docs.test_docs import ROOT, blocks

TOOL = 'async def search(word: str) -> str:\n    """Search."""\n    return word\n'


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "environment"),
    [("reference/configuration.md", "tools"), ("guides/swe.md", "swe")],
    ids=["tools", "swe"],
)
async def test_configuration_files_are_valid(page: str, environment: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "What is 3 + 4?", "answer": 7}\n')
    (tmp_path / "mytools.py").write_text(TOOL)
    files = [block for block in blocks(ROOT / "docs" / page, "toml") if "[run" in block]
    assert files
    for index, text in enumerate(files):
        (tmp_path / f"{index}.toml").write_text(text)
        command = ("run", environment, "--config", f"{index}.toml", "--policy", "embedded", "--sandbox", "local")
        done = await rookery(*command, "--dry-run", "--json", cwd=tmp_path, DOCS_KEY="a", JUDGE_KEY="b")
        assert done.code == 0, (text, done.err)


def test_launchers_are_valid(tmp_path: Path) -> None:
    for driver in ("my_driver.py", "my_driver.cjs"):
        (tmp_path / driver).write_text("")
    files = [block for block in blocks(ROOT / "docs" / "guides" / "agents.md", "toml") if "command =" in block]
    assert len(files) == 3
    for index, text in enumerate(files):
        (tmp_path / f"launcher-{index}.toml").write_text(text)
        assert find_launcher(str(tmp_path / f"launcher-{index}.toml")).command


@pytest.mark.parametrize("page", ["code.md", "environments.md", "tasks.md"])
def test_rows_are_valid_tasks(page: str, tmp_path: Path) -> None:
    task = tmp_path / "task-data" / "fix-1"
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text("Fix it.\n")
    (task / "tests" / "test.sh").write_text("exit 0\n")
    for index, text in enumerate(blocks(ROOT / "docs" / "guides" / page, "json")):
        rows = tmp_path / f"{index}.jsonl"
        rows.write_text(text.replace(",\n ", ", "))  # long rows are printed on several lines
        assert [(one.id, one.invalid) for one in load_tasks(str(rows)) if one.invalid] == []


@pytest.mark.long
async def test_mixture_file_runs_as_printed(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guides" / "mixtures.md"
    (tmp_path / "mix.toml").write_text(blocks(page, "toml")[0])
    (tmp_path / "words.py").write_text(blocks(page, "python")[0])
    command = shlex.split(blocks(page, "console")[0].splitlines()[0].removeprefix("$ rookery "))
    done = await rookery(*command, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    counts = {name: one["rollouts"] for name, one in done.events[-1]["environments"].items()}
    assert counts == {"arithmetic": 80, "words": 40}
