"""`rookery run agent --launcher …`."""

import json
from pathlib import Path

import pytest

from tests.cli.sandbox_kit import local_sandboxes, run_cli

__all__ = ["local_sandboxes"]

LAUNCHER = """
command = ["{python}", "-c", "print(42)", "{prompt}"]
"""


def rows(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text(json.dumps({"prompt": "6 * 7?", "answer": 42}) + "\n")
    (folder / "mine.toml").write_text(LAUNCHER)


@pytest.mark.usefixtures("local_sandboxes")
def test_a_launcher_from_a_user_runs_by_its_file(tmp_path: Path) -> None:
    rows(tmp_path)
    done = run_cli(
        *("run", "agent", "--launcher", "mine.toml", "--tasks", "tasks.jsonl", "--policy", "embedded", "-k", "2"),
        *("--record", "plain", "--sandbox", "local", "--runners", "1", "--json"),
        cwd=tmp_path,
    )
    assert done.code == 0, done
    assert [one["reward"] for one in done.events if one["event"] == "rollout"] == [1.0, 1.0], done


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--launcher", "nobody"], "'nobody'"),
        (["--launcher", "nowhere.toml"], "does not exist"),
        (["--launcher", "program"], "script=FILE"),
        ([], "launcher"),
        (["--launcher", "mine.toml", "--network", "none"], "network is 'none'"),
        (["--launcher", "mine.toml", "--sandbox", "subprocess", "--unsafe"], "cannot restrict the network"),
        (
            ["--launcher", "mine.toml", "--sandbox", "subprocess", "--unsafe", "--network", "all"],
            "isolated file system",
        ),
        (["--launcher", "mine.toml", "--public-url", "http://127.0.0.1:9"], "--gateway-listen"),
    ],
)
def test_what_cannot_work_is_reported_before_anything_starts(
    options: list[str], said: str, tmp_path: Path
) -> None:
    rows(tmp_path)
    done = run_cli("run", "agent", "--tasks", "tasks.jsonl", "--policy", "embedded", *options, cwd=tmp_path)
    assert done.code == 2, done
    assert said in done.err
    assert not (tmp_path / "runs").exists()
