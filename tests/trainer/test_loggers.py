"""What loggers and the live table show is what the metrics file has."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rookery.trainer import TrainConfig, read_metrics
from rookery.trainer.loggers import select_numbers
from tests.cli.test_cli_terminal import Terminal
from tests.conftest import TOKENIZERS
from tests.trainer.environments import Parity, options

torch = pytest.importorskip("torch", reason="[probed] this machine has no torch")
ROOT = Path(__file__).parents[2]
WANDB = TOKENIZERS.parent / "venv-wandb" / "bin" / "python"
ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval_reward": 0.25, "eval_interval95": [0.1, 0.4]},
    {"step": 1, "reward": 0.5, "valid": 7, "failed": {"sandbox.lost": 2}},
    {"step": 1, "eval_reward": 0.75, "eval_interval95": None},
    {"step": 2, "reward": None, "valid": 0, "failed": {}},
]
WRITE = """
import json, sys
from pathlib import Path
from rookery.trainer.loggers import Loggers

with Loggers(["wandb"], Path(sys.argv[1])) as loggers:
    for row in json.loads(sys.argv[2]):
        loggers(row)
"""
READ = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

data, at = Path(sys.argv[1]).read_bytes(), 7  # records follow a header of 7 bytes, in the format of LevelDB's log
assert len(data) < 32768  # so no record is split
found = {}
while at + 7 <= len(data):
    size, kind = struct.unpack_from("<HB", data, at + 4)
    record = Record.FromString(data[at + 7 : at + 7 + size])
    at += 7 + size
    if record.WhichOneof("record_type") == "history":
        items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        found[items["_step"]] = {name: value for name, value in items.items() if not name.startswith("_")}
print(json.dumps(found))
"""


def run_with_wandb(home: Path, script: str, *arguments: Any) -> str:
    """Run a script in the environment that has W&B; return its output. It writes nothing to stderr."""
    done = subprocess.run(
        [WANDB, "-c", script, *map(str, arguments)],
        env={"PYTHONPATH": str(ROOT / "src"), "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_tensorboard_has_the_numbers_of_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="[probed] this machine has no tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rookery.trainer import Trainer

    config = TrainConfig(steps=2, groups=2, group_size=4, lag=0, eval_tasks=4, log_to=("tensorboard",))
    result = Trainer(Parity(), config=config, out=tmp_path, **options()).train()
    events = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(result.folder):
        for name, value in select_numbers(row).items():
            expected.setdefault(name, []).append((row["step"], pytest.approx(value)))
    assert {"reward", "pass_rate", "eval_pass_rate", "sampler_kl", "grad_norm"} <= set(expected)
    assert set(events.Tags()["scalars"]) == set(expected)
    for name, points in expected.items():
        assert [(event.step, event.value) for event in events.Scalars(name)] == points, name


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_offline_run_of_wandb_has_the_numbers_of_the_rows(tmp_path: Path) -> None:
    if not WANDB.exists():
        pytest.skip("[probed] this machine has no W&B (make wandb)")
    assert run_with_wandb(tmp_path / "home", WRITE, tmp_path, json.dumps(ROWS)) == ""
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = json.loads(run_with_wandb(tmp_path / "home", READ, file))
    expected: dict[str, dict[str, float]] = {}
    for row in ROWS:
        expected.setdefault(str(row["step"]), {}).update(select_numbers(row))
    assert found == expected


@pytest.mark.long
async def test_a_terminal_shows_a_table_of_the_last_steps(tmp_path: Path) -> None:
    arguments = ["--steps", "2", "--groups", "2", "--group-size", "4", "--eval-tasks", "4", "--runners", "0"]
    terminal = Terminal(
        "train",
        "tests.trainer.environments:Parity",
        *arguments,
        cwd=ROOT,
        ROOKERY_OUT=str(tmp_path),
        COLUMNS="200",
    )
    assert await terminal.end() == 0
    (run,) = tmp_path.iterdir()
    rows = read_metrics(run)
    lines = [line.split() for line in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.output).splitlines()]
    header = max(at for at, line in enumerate(lines) if line[:3] == ["step", "time", "reward"])
    table = {line[0]: line for line in lines[header + 1 :] if line and line[0].isdecimal()}
    assert set(table) == {"0", "1", "2"}
    for row in rows:
        rate = row.get("eval_pass_rate", row.get("pass_rate"))
        if rate is not None:  # no rollout ended since the step before
            assert f"{rate:.1%}" in table[str(row["step"])]
