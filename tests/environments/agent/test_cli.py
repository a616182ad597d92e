"""`rookery run agent --launcher …`."""

import json
from pathlib import Path

import pytest

from tests.cli.sandbox_kit import local_sandboxes, run_cli

__all__ = ["local_sandboxes"]

LAUNCHER = """
command = ["{python}", "-c", "print(42)", "{prompt}"]
"""


def write_files(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text(json.dumps({"prompt": "6 * 7?", "answer": 42}) + "\n")
    (folder / "mine.toml").write_text(LAUNCHER)


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_run_uses_a_launcher_file(tmp_path: Path) -> None:
    write_files(tmp_path)
    result = run_cli(
        *("run", "agent", "--launcher", "mine.toml", "--tasks", "tasks.jsonl", "--policy", "embedded", "-k", "2"),
        *("--record", "plain", "--sandbox", "local", "--runners", "1", "--json"),
        cwd=tmp_path,
    )
    assert result.code == 0, result
    assert [one["reward"] for one in result.events if one["event"] == "rollout"] == [1.0, 1.0], result


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--launcher", "nobody"], "'nobody'"),
        (["--launcher", "nowhere.toml"], "nowhere.toml"),
        (["--launcher", "program"], "script=FILE"),
        ([], "launcher"),
        (["--launcher", "mine.toml", "--network", "none"], "'none'"),
        (["--launcher", "mine.toml", "--sandbox", "subprocess", "--unsafe"], "network"),
        (
            ["--launcher", "mine.toml", "--sandbox", "subprocess", "--unsafe", "--network", "all"],
            "subprocess",
        ),
        (["--launcher", "mine.toml", "--public-url", "http://127.0.0.1:9"], "--gateway-listen"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(
    options: list[str], named: str, tmp_path: Path
) -> None:
    write_files(tmp_path)
    result = run_cli("run", "agent", "--tasks", "tasks.jsonl", "--policy", "embedded", *options, cwd=tmp_path)
    assert result.code == 2, result
    assert named in result.err
    assert not (tmp_path / "runs").exists()
