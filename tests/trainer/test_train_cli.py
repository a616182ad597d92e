"""The command `rookery train`: options, the `[train]` table, events and exit codes."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from rookery.cli.app import app, run_app
from rookery.cli.config import load_config_file
from rookery.core import UsageError
from rookery.environments import Mixture
from rookery.journal import RunReader
from rookery.trainer import TrainConfig, find_training_run, read_metrics, read_settings, setup
from rookery.trainer.config import field_types
from tests.core.test_imports import modules_loaded_by

PARITY = "tests.trainer.environments:Parity"
SHORT = ["--groups", "3", "--group-size", "4", "--eval-tasks", "4", "--eval-every", "0", "--runners", "0"]


def get_train() -> click.Command:
    found = app.get_command(click.Context(app), "train")
    assert found is not None
    return found


def test_every_setting_is_an_option_with_the_same_default() -> None:
    options = {param.name: param for param in get_train().params}
    for name in TrainConfig.__struct_fields__:
        default = None if name == "steps" else getattr(TrainConfig(steps=1), name)
        assert options[name].default == (() if isinstance(default, dict) else default), name
        assert options[name].envvar == f"ROOKERY_TRAIN_{name.upper()}"


def test_the_help_does_not_import_torch() -> None:
    code = "from rookery.cli.app import run_app; run_app(['train', '--help'])"
    assert not {"torch", "transformers", "numpy"} & modules_loaded_by(code)
    assert not {"torch", "transformers"} & modules_loaded_by("import rookery.trainer")


@pytest.mark.parametrize(
    "values",
    [
        {"steps": 0},
        {"steps": 1.5},
        {"group_size": 1},
        {"lag": -1},
        {"correction": "ppo"},
        {"clip_low": 1.5},
        {"learning_rate": 0},
        {"learning_rate": "fast"},
        {"normalise": "seq-mean-token-sum-norm"},
        {"length": 10},
        {"icepop_low": 6.0},
        {"compare": "prefix", "scale": "std"},
        {"decay": 2},
        {"log_to": ("stdout",)},
        {"nonsense": 1},
        {"quotas": {"words": 0}},
        {"part_weights": {"short": "much"}},
    ],
)
def test_invalid_settings_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TrainConfig.from_mapping({"steps": 1, **values})


def test_settings_survive_json() -> None:
    config = TrainConfig(minutes=3.5, lag=0, log_to=("tensorboard",), row_tokens=64)
    assert msgspec.json.decode(msgspec.json.encode(config), type=TrainConfig) == config
    assert set(field_types()) == set(TrainConfig.__struct_fields__)


def write_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "file.toml"
    path.write_text(text)
    return str(path)


def test_the_file_has_a_table_for_training(tmp_path: Path) -> None:
    file = write_file(
        tmp_path,
        '[run]\npolicy = "embedded"\nk = 2\n[train]\nlag = 3\nrefill = false\nsteps = 7\nquotas = {words = 0.5}\n',
    )
    context = click.Context(get_train())
    load_config_file(context, get_train().params[0], file)
    assert context.default_map == {
        "policy": ["embedded"],
        "per_task": 2,
        "lag": 3,
        "refill": False,
        "steps": 7,
        "quotas": ["words=0.5"],
    }


def test_quotas_and_weights_of_parts_are_dictionaries() -> None:
    args = ["arithmetic", "--quotas", "words=0.25", "--quotas", "a=b=0.5,c=0.1", "--part-weights", "short=-2"]
    values = get_train().make_context("train", args, resilient_parsing=False).params
    assert values["quotas"] == {"words": 0.25, "a=b": 0.5, "c": 0.1}
    assert values["part_weights"] == {"short": -2.0}
    config = TrainConfig(steps=1, quotas=values["quotas"], part_weights=values["part_weights"])
    batch = setup.batch_config(config)
    assert (batch.quotas, batch.part_weights) == (values["quotas"], values["part_weights"])
    with pytest.raises(UsageError):
        get_train().make_context("train", ["arithmetic", "--quotas", "words"])
    mixture = Mixture(["arithmetic"])
    setup.check_quotas(mixture, TrainConfig(steps=1, quotas={"arithmetic": 0.5}))
    for env, quotas in ((mixture, {"words": 0.5}), (mixture.entries["arithmetic"].environment, {"arithmetic": 1})):
        with pytest.raises(UsageError):
            setup.check_quotas(env, TrainConfig(steps=1, quotas=quotas))


@pytest.mark.parametrize(
    "settings",
    [
        {"curriculum": "dificulty"},
        {"curriculum": "no.module:Class"},
        {"curriculum": "difficulty", "difficulty_low": 1},
    ],
)
def test_wrong_task_samplers_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        setup.choose_sampler(TrainConfig(steps=1, **settings))


@pytest.mark.parametrize(
    "text",
    ["[train]\nlagg = 3\n", "[train]\nlag = -3\n", "[train]\nlag = true\n", "[run]\nlag = 3\n", "train = 3\n"],
)
def test_an_invalid_table_is_refused(tmp_path: Path, text: str) -> None:
    file = write_file(tmp_path, text)
    with pytest.raises(UsageError):
        load_config_file(click.Context(get_train()), get_train().params[0], file)


def test_run_accepts_a_file_with_a_table_for_training(tmp_path: Path) -> None:
    run = app.get_command(click.Context(app), "run")
    assert run is not None
    context = click.Context(run)
    load_config_file(context, run.params[0], write_file(tmp_path, "[run]\nk = 2\n[train]\nlag = 3\n"))
    assert context.default_map == {"per_task": 2}


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "arithmetic"],
        ["train", "--steps", "1"],
        ["train", "nosuch", "--steps", "1"],
        ["train", "arithmetic", "--steps", "1", "--policy", "http://localhost:1"],
        ["train", "arithmetic", "--steps", "1", "--policy", "hf:/nope"],
        ["train", "arithmetic", "--steps", "1", "--policy", "embedded:/nope"],
        ["train", "arithmetic", "--steps", "1", "--push", "vllm"],
        ["train", "arithmetic", "--steps", "1", "--push", "vllm", "--server", "http://localhost:1"],
        ["train", "arithmetic", "--steps", "1", "--record", "plain"],
        ["train", "arithmetic", "--steps", "1", "--policy", "embedded", "--policy", "embedded"],
        ["train", "arithmetic", "--steps", "1", "--temperature", "0.3"],
        ["train", "arithmetic", "--steps", "1", "--normalise", "seq-mean-token-sum-norm"],
        ["train", "--resume", "nothing"],
        ["train", "--resume", "latest"],
        ["train", "--resume", "."],
        ["plot", "nothing"],
        ["plot", "."],
    ],
)
def test_usage_errors_start_nothing(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(arguments) == 2
    assert not list(tmp_path.glob("runs/*"))


def test_dry_run_shows_the_settings_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(["train", PARITY, "--steps", "5", "--lag", "0", "--dry-run", "--json"]) == 0
    event = json.loads(capfd.readouterr().out.splitlines()[-1])
    found = {row["name"]: (row["value"], row["origin"]) for row in event["values"]}
    assert found["lag"] == (0, "command line")
    assert found["clip-high"] == (0.28, "default")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("run", "train", "arguments", "size"),
    [
        ("k = 2", "", [], 2),
        ("k = 2", "group_size = 3", [], 3),
        ("k = 2", "group_size = 3", ["-k", "4"], 4),
        ("k = 2", "", ["--group-size", "5"], 5),
    ],
)
def test_rollouts_per_task_are_the_group_size_unless_that_is_set_as_explicitly(
    run: str,
    train: str,
    arguments: list[str],
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rookery.toml").write_text(f"[run]\n{run}\n[train]\nsteps = 1\n{train}\n")
    assert run_app(["train", PARITY, "--dry-run", "--json", *arguments]) == 0
    event = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert {row["name"]: row["value"] for row in event["values"]}["group-size"] == size


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--steps", "5", "--policy", "http://localhost:1"],
        ["--steps", "5", "--push", "vllm", "--server", "http://localhost:1"],
        ["--steps", "5", "--temperature", "0.5"],
        ["--steps", "5", "--record", "plain"],
        ["--steps", "5", "--quotas", "nothing=0.5"],
        ["--steps", "5", "--save", "."],
    ],
)
def test_dry_run_reports_what_prevents_the_start(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert run_app(["train", PARITY, *arguments, "--dry-run", "--json"]) == 2
    assert len(json.loads(capfd.readouterr().out.splitlines()[-1])["problems"]) == 1


@pytest.mark.parametrize("arguments", [["--lora-rank", "4"], ["--log-to", "wandb"], ["--plot"], []])
def test_missing_packages_are_reported_before_the_start(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for package in ("peft", "wandb", "matplotlib", *(() if arguments else ("torch",))):
        monkeypatch.setitem(sys.modules, package, None)
    assert run_app(["train", PARITY, "--steps", "1", *SHORT, *arguments]) == 2
    assert not list(tmp_path.iterdir())


def test_train_writes_events_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="[probed] this machine has no torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rookery.toml").write_text(f'[run]\nenv = "{PARITY}"\n[train]\nsteps = 2\n')
    assert run_app(["train", "--json", "--metrics", "127.0.0.1:0", *SHORT]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    events = ["started", "metrics", "evaluation", "step", "step", "evaluation", "finished"]
    assert [line["event"] for line in lines] == events
    assert lines[1]["url"].startswith("http://127.0.0.1:")
    last = lines[-1]
    assert last["steps"] == 2
    assert last["exit_code"] == 0
    assert 0 <= last["eval_before"] <= 1
    assert 0 <= last["eval_after"] <= 1
    assert last["seconds"] > 0
    folder = Path(last["run"])
    assert read_settings(folder).train.groups == 3

    assert run_app(["train", "--resume", "latest", "--steps", "3"]) == 0
    shown = capfd.readouterr().err
    assert "rookery.toml" in shown
    assert "step 3" in shown
    for refused in ([PARITY], ["--concurrency", "2"]):
        assert run_app(["train", *refused, "--resume", "latest"]) == 2
    assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2, 2, 3, 3]


def test_resume_reads_the_tasks_again_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="[probed] this machine has no torch")
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"id": f"row-{at}", "question": f"What is {at} + {at}?"}) for at in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    tasks = ["--tasks", "rows.jsonl", "--columns", "prompt=question"]
    sampler = ["--curriculum", "tests.trainer.environments:OnlyTheFirst"]
    assert run_app(["train", PARITY, "--steps", "1", *tasks, *sampler, *SHORT]) == 0
    folder = find_training_run("latest", tmp_path / "runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run_app(["train", "--resume", str(folder), "--steps", "2"]) == 0
    assert read_metrics(folder)[-1]["step"] == 2
    seen: set[str] = set()
    for run in (folder / "rollouts").iterdir():
        if not run.is_symlink():
            with RunReader(run) as reader:
                seen |= {one.task for one in reader.iter_rollouts()}
    assert "row-0" in seen
    assert not seen & {"row-1", "row-2"}


def test_an_error_during_training_exits_with_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="[probed] this machine has no torch")
    monkeypatch.chdir(tmp_path)
    broken = "tests.trainer.environments:Broken"
    assert run_app(["train", broken, "--steps", "2", *SHORT[:4], "--eval-tasks", "0", "--runners", "0"]) == 4
    assert "--resume" in capfd.readouterr().err
