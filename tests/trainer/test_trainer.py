"""Training runs: metrics, weight updates, evaluation, checkpoints, and what happens when something is wrong."""

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rookery import Stopped, UsageError
from rookery.trainer import TrainConfig, TrainingError, read_metrics, read_settings, resume_training
from rookery.trainer.errors import memory_errors
from rookery.trainer.ratios import read_ratios
from rookery.training import BatchError
from rookery.upstreams.embedded import Weights, load_builtin_weights
from rookery.view.data import RunData
from rookery.view.runs import open_viewed_run
from tests.conftest import TOKENIZERS
from tests.telemetry.test_metrics import values
from tests.trainer.environments import Broken, Constant, Parity, options
from tests.waiting import block_until

torch = pytest.importorskip("torch", reason="[probed] this machine has no torch")
SMALL: dict[str, Any] = {"groups": 3, "group_size": 4, "eval_tasks": 4, "eval_every": 2, "checkpoint_every": 1}


def train(env: Any, out: Path, **settings: Any) -> Any:
    from rookery.trainer import Trainer

    return Trainer(env, config=TrainConfig(**{**SMALL, **settings}), out=out, **options())


@pytest.mark.parametrize("lag", [0, 2])
def test_training_pushes_weights_and_writes_metrics(tmp_path: Path, lag: int) -> None:
    trainer = train(Parity(), tmp_path, steps=4, lag=lag)
    result = trainer.train()
    assert result.steps == 4
    rows = read_metrics(result.folder)
    held_out = [row["eval_pass_rate"] for row in rows if "eval_pass_rate" in row]
    assert (result.eval_before, result.eval_after) == (held_out[0], held_out[-1])
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 2, 4]
    assert max(row["staleness_max"] for row in steps) == (0 if lag == 0 else pytest.approx(1, abs=1))
    assert all(row["valid"] == row["rollouts"] for row in steps)
    weights = Weights.load(result.folder / "policy")
    assert weights.version == 4
    name = "model.norm.weight"
    assert not np.array_equal(weights.tensors[name], load_builtin_weights().tensors[name])
    assert torch.equal(torch.from_numpy(weights.tensors[name]), trainer.policy.model.state_dict()[name])


def test_training_serves_the_metrics_of_its_rows(tmp_path: Path) -> None:
    from rookery.trainer import Trainer

    config = TrainConfig(steps=2, groups=2, group_size=2, eval_tasks=2, eval_every=1)
    trainer = Trainer(Parity(), config=config, out=tmp_path, **options(metrics="127.0.0.1:0"))
    seen: list[tuple[dict[str, Any], dict[tuple[str, ...], float]]] = []

    def on_row(row: dict[str, Any]) -> None:
        with urllib.request.urlopen(trainer.engine.metrics_url, timeout=60) as response:
            seen.append((row, values(response.read())))

    trainer.on_row = on_row
    trainer.train()
    assert [row["step"] for row, _ in seen] == [0, 1, 1, 2, 2]
    for row, page in seen:
        assert page["rookery_train_step",] == row["step"]
        for name in ("reward", "loss", "eval_reward", "staleness_max"):
            if row.get(name) is not None:
                assert page["rookery_train_value", f"name={name}"] == pytest.approx(row[name])
    waited = sum(row["wait_seconds"] for row, _ in seen if "wait_seconds" in row)
    counted = [page.get(("rookery_train_seconds_total", "phase=wait"), 0.0) for _, page in seen]
    assert counted[-1] - counted[0] == pytest.approx(waited)


def test_lag_zero_is_on_policy(tmp_path: Path) -> None:
    trainer = train(Parity(), tmp_path, steps=3, lag=0, learning_rate=1e-2, eval_tasks=0)
    trainer.train()
    rows = read_metrics(trainer.folder.path)
    assert all(row["staleness_max"] == 0 and row["sampler_kl"] < 1e-5 for row in rows)


def test_tokens_of_older_versions_have_other_ratios(tmp_path: Path) -> None:
    trainer = train(Parity(), tmp_path, steps=4, lag=1, learning_rate=1e-2, warmup=0, eval_tasks=0)

    def sync_after_sampling(engine: Any) -> None:
        """Let the groups of the next step be sampled before each weight update, whatever is faster here."""
        sync = engine.sync

        def wait_and_sync(version: int, load: Any) -> Any:
            block_until(
                lambda: sum(one["waiting"] for one in engine.status()["streams"].values()) >= SMALL["groups"]
            )
            return sync(version, load)

        engine.sync = wait_and_sync

    trainer.on_start = lambda: sync_after_sampling(trainer.engine)
    trainer.train()
    rows = read_metrics(trainer.folder.path)
    stale = [row for row in rows if row["staleness_mean"] == 1]
    assert stale
    assert all(row["sampler_kl"] > 1e-6 for row in stale)
    # The viewer shows the ratio of each trained token.
    run = open_viewed_run(trainer.folder.path)
    trained, ratios = 0, []
    with RunData(run, run.journals[0]) as data:
        for record in data.reader.iter_rollouts():
            for number in read_ratios(run.folder, run.journals[0].name, record.id):
                page = data.tokens(record.id, number)
                found = page["extras"]["importance ratio"]
                assert [one is not None for one in found] == [bool(mask) for mask in page["mask"]]
                ratios += [one for one in found if one is not None]
                trained += sum(page["mask"])
    assert trained == len(ratios) == sum(row["tokens"] for row in rows)
    assert max(*ratios, 1 / min(ratios)) == pytest.approx(max(row["sampler_ratio"] for row in rows), rel=1e-4)
    assert any(abs(ratio - 1) > 1e-4 for ratio in ratios)


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 2, "minibatches": 2, "row_tokens": 64},
        {"share_prefixes": False, "row_tokens": 64, "compare": "prefix"},
        {"correction": "icepop", "scale": "std", "refill": False},
        {"correction": "dppo", "normalise": "seq-mean-token-sum-norm", "length": 6},
        {"kl": 0.1, "correction": "none", "normalise": "prompt-mean", "baseline": "mean"},
    ],
)
def test_every_part_of_the_algorithm_trains(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = train(Parity(), tmp_path, steps=2, lag=0, eval_tasks=0, **settings)
    trainer.train()
    rows = read_metrics(trainer.folder.path)
    assert len(rows) == 2
    assert all(row["tokens"] > 0 and row["grad_norm"] > 0 for row in rows)


@pytest.mark.timeout(600)  # importing peft takes minutes on a busy machine
def test_lora_trains_adapters_and_pushes_merged_weights(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="[probed] this machine has no peft")
    trainer = train(Parity(), tmp_path, steps=2, lag=0, lora_rank=2, learning_rate=1e-2, eval_tasks=0)
    trainer.train()
    rows = read_metrics(trainer.folder.path)
    assert all(row["sampler_kl"] < 1e-5 for row in rows)  # the sampler has the adapters
    pushed, initial = Weights.load(trainer.folder.path / "policy").tensors, load_builtin_weights().tensors
    changed = {name for name in initial if not np.array_equal(pushed[name], initial[name])}
    assert changed
    assert all("proj" in name for name in changed)


def check_saved_model(trainer: Any, folder: Path) -> None:
    """Check that transformers loads the trained weights from the folder."""
    from transformers import AutoModelForCausalLM

    saved, trained = AutoModelForCausalLM.from_pretrained(folder).state_dict(), trainer.policy.model.state_dict()
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name]) for name in trained)


def test_save_writes_a_model_that_transformers_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    trainer = train(Parity(), tmp_path / "runs", steps=1, lag=0, eval_tasks=0, save="saved")
    monkeypatch.chdir("/")
    trainer.train()
    check_saved_model(trainer, tmp_path / "saved")
    with pytest.raises(UsageError):
        train(Parity(), tmp_path / "others", steps=1, save=str(tmp_path / "saved"))
    assert not (tmp_path / "others").exists()


def test_a_single_task_is_trained_only_without_an_evaluation(tmp_path: Path) -> None:
    from rookery.trainer import Trainer

    tasks = Parity().tasks()[:1]
    with pytest.raises(UsageError):
        Trainer(Parity(), tasks=tasks, config=TrainConfig(steps=1), out=tmp_path, **options())
    assert not list(tmp_path.iterdir())
    trainer = Trainer(Parity(), tasks=tasks, config=TrainConfig(steps=1, eval_tasks=0), out=tmp_path, **options())
    assert (trainer.tasks, trainer.held_out) == (tasks, [])
    trainer.policy.close()
    trainer.folder.close()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_transformers_model_is_trained_and_sampled_in_this_process(tmp_path: Path, lag: int) -> None:
    from rookery.trainer import Trainer
    from tests.upstreams.torch_kit import save_model

    save_model(tmp_path / "model")
    config = TrainConfig(steps=3, groups=3, group_size=4, eval_tasks=2, lag=lag, learning_rate=1e-3, warmup=0)
    config = msgspec.structs.replace(config, save=str(tmp_path / "saved"))
    trainer = Trainer(
        Parity(), policy=f"hf:{tmp_path / 'model'}?device=cpu&slots=8", config=config, out=tmp_path / "runs"
    )
    assert trainer.engine.config.runners == 0
    trainer.train()
    check_saved_model(trainer, tmp_path / "saved")
    rows = [row for row in read_metrics(trainer.folder.path) if "loss" in row]
    assert len(rows) == 3
    assert all(row["grad_norm"] > 0 for row in rows)
    fresh = [row for row in rows if row["staleness_max"] == 0]
    assert fresh
    assert all(row["sampler_kl"] < 1e-4 for row in fresh)
    assert all(row["sampler_kl"] > 1e-4 for row in rows if row["staleness_mean"] == 1)


def test_time_limit_includes_the_evaluation(tmp_path: Path) -> None:
    trainer = train(Parity(), tmp_path, minutes=0.02, eval_every=0, lag=0)
    result = trainer.train()
    rows = read_metrics(result.folder)
    assert rows[-1]["step"] == result.steps
    assert "eval_reward" in rows[-1]


# ---- checkpoints

SCRIPT = """
import sys
from pathlib import Path
from rookery.trainer import TrainConfig, Trainer, resume_training
from tests.trainer.environments import Parity, options

def train(out, folder, stop):
    if folder:
        trainer = resume_training(folder, env=Parity())
    else:
        trainer = Trainer(Parity(), config=TrainConfig(steps=6, groups=3, group_size=4, lag=0, eval_tasks=4,
            eval_every=3, checkpoint_every=2, minibatches=2, row_tokens=64), out=out, **options())
    def row(row):
        print(trainer.folder.path, row["step"], flush=True)
    trainer.on_row = row
    trainer.train()

train(Path(sys.argv[1]), sys.argv[2], 0)
"""
TIMES = ("seconds", "wait_seconds", "train_seconds", "sync_seconds", "tokens_per_second", "eval_seconds")


def run_script(out: Path, folder: str = "") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out), folder],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_resume_after_sigkill_continues_with_the_same_batches(tmp_path: Path) -> None:
    whole = run_script(tmp_path / "whole")
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0
    expected = read_metrics(Path(output.split()[0]))
    assert [row["step"] for row in expected] == [0, 1, 2, 3, 3, 4, 5, 6, 6]

    folder = ""
    for last in ("3", "5"):  # after a checkpoint and a further step, which is lost
        killed = run_script(tmp_path / "killed", folder)
        assert killed.stdout is not None
        for line in killed.stdout:
            folder, step = line.split()
            if step == last:
                os.kill(killed.pid, signal.SIGKILL)
                break
        killed.wait(timeout=60)
        killed.stdout.close()
        assert killed.returncode == -signal.SIGKILL
    resumed = run_script(tmp_path / "killed", folder)
    resumed.communicate(timeout=300)
    assert resumed.returncode == 0
    assert without_times(read_metrics(Path(folder))) == without_times(expected)


def test_resume_with_more_steps_continues(tmp_path: Path) -> None:
    result = train(Parity(), tmp_path, steps=2, lag=1).train()
    trainer = resume_training(result.folder, env=Parity(), steps=3)
    assert trainer.progress.step == 2
    assert trainer.train().steps == 3
    assert read_settings(result.folder).train.steps == 2


@pytest.mark.parametrize("lag", [0, 2])
def test_every_step_counts_its_groups_before_and_after_a_resume(tmp_path: Path, lag: int) -> None:
    settings = {"groups": 1, "max_refill": 1, "lag": lag, "eval_tasks": 0}
    result = train(Parity(), tmp_path, steps=3, **settings).train()
    resume_training(result.folder, env=Parity(), steps=6).train()
    rows = read_metrics(result.folder)
    assert [row["groups"] for row in rows] == [1] * 6
    assert all(row["rollouts"] == 4 and row["reward"] is not None for row in rows)


def test_a_training_run_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    trainer = train(Parity(), tmp_path, steps=1)
    with pytest.raises(UsageError):
        resume_training(trainer.folder.path, env=Parity())
    trainer.folder.close()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    result = train(Parity(), tmp_path, steps=4, lag=0, eval_tasks=0, keep_checkpoints=2).train()
    names = sorted(path.name for path in (result.folder / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004"]


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = train(Parity(), tmp_path, steps=4, lag=0, eval_tasks=0)
    save = torch.save

    def fail(state: Any, path: Path) -> None:
        if "step-00000002" in str(path):
            Path(path).write_bytes(b"partial")
            raise OSError(28, "No space left on device")
        save(state, path)

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert caught.value.reason == "disk"
    monkeypatch.undo()
    assert sorted(path.name for path in (trainer.folder.path / "checkpoints").iterdir()) == [
        "step-00000000",
        "step-00000001",
    ]
    resumed = resume_training(trainer.folder.path, env=Parity())
    assert resumed.progress.step == 1
    assert resumed.train().steps == 4


def test_settings_that_cannot_be_written_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def fail(path: Path, data: bytes) -> int:
        if "train.json" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(TrainingError) as caught:
        train(Parity(), tmp_path / "runs", steps=1)
    assert caught.value.reason == "disk"
    assert not list((tmp_path / "runs").iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("[probed] this user cannot mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.long
def test_training_continues_when_a_full_disk_has_space_again(small_disk: Path) -> None:
    trainer = train(Parity(), small_disk / "runs", steps=50, lag=0, eval_tasks=0, keep_checkpoints=50)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert caught.value.reason == "disk"
    checkpoints = sorted((trainer.folder.path / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == [f"step-{step:08}" for step in range(len(checkpoints))]
    for path in checkpoints[:-1]:
        shutil.rmtree(path)
    last = trainer.progress.step + 1
    resumed = resume_training(trainer.folder.path, env=Parity(), steps=last, keep_checkpoints=1)
    assert resumed.progress.step == len(checkpoints) - 1
    assert resumed.train().steps == last


# ---- what can go wrong


def test_a_loss_that_is_not_finite_is_not_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rookery.trainer import loop

    trainer = train(Parity(), tmp_path, steps=3, lag=0, eval_tasks=0)
    real = loop.policy_loss

    def nan_in_second_step(*args: Any, **kwargs: Any) -> Any:
        loss, dropped = real(*args, **kwargs)
        return (loss * float("nan") if trainer.progress.step == 1 else loss), dropped

    monkeypatch.setattr(loop, "policy_loss", nan_in_second_step)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert caught.value.reason == "nan"
    assert all(torch.isfinite(value).all() for value in trainer.policy.model.state_dict().values())
    monkeypatch.undo()
    assert resume_training(trainer.folder.path, env=Parity()).train().steps == 3


def raise_gpu_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "allocate",
    [raise_gpu_error, lambda: torch.zeros(1 << 46), lambda: np.zeros(1 << 46)],
    ids=["gpu", "cpu", "numpy"],
)
def test_out_of_memory_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocate: Callable[[], Any]
) -> None:
    from rookery.trainer import loop

    trainer = train(Parity(), tmp_path, steps=2, lag=0, eval_tasks=0)
    monkeypatch.setattr(loop, "token_logprobs", lambda *_, **__: allocate())
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert caught.value.reason == "memory"
    assert "row-tokens" in str(caught.value)
    monkeypatch.undo()
    assert resume_training(trainer.folder.path, env=Parity(), row_tokens=64).train().steps == 2


def test_other_errors_of_torch_are_not_taken_for_missing_memory() -> None:
    with pytest.raises(RuntimeError, match="illegal"), memory_errors(1, 512):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("refill", [True, False])
def test_equal_rewards_stop_training(tmp_path: Path, refill: bool) -> None:
    trainer = train(Constant(), tmp_path, steps=20, lag=0, eval_tasks=0, refill=refill, max_refill=2)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert caught.value.reason == "no_signal"
    assert trainer.progress.step == 2
    assert list((trainer.folder.path / "checkpoints").iterdir())


def test_an_environment_whose_rollouts_all_fail_stops_training(tmp_path: Path) -> None:
    from rookery.trainer import Trainer

    config = TrainConfig(**{**SMALL, "steps": 20, "eval_tasks": 0})
    with pytest.raises(Stopped):
        Trainer(Broken(), config=config, out=tmp_path, **options()).train()
    with pytest.raises(TrainingError) as caught:
        Trainer(Broken(), config=config, out=tmp_path, **options(breaker=None)).train()
    assert caught.value.reason == "no_signal"
    assert "bug" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({"steps": None}, {}),
        ({"device": "nonsense"}, {}),
        ({"device": "cuda"}, {}),
        ({}, {"sampling": {"temperature": 0.5}}),
        ({}, {"sampling": {"top_p": 0.5}}),
        ({}, {"sampling": {"extra": {"min_p": 0.1}}}),
        ({}, {"record": "plain"}),
    ],
)
def test_invalid_settings_are_refused_before_anything_starts(
    tmp_path: Path, settings: dict[str, Any], engine: dict[str, Any]
) -> None:
    from rookery.trainer import Trainer

    config = TrainConfig(**{"steps": 1, **settings})
    with pytest.raises(UsageError):
        Trainer(Parity(), config=config, out=tmp_path, **options(**engine))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["http://localhost:1/v1", "embedded:does-not-exist"])
def test_a_policy_that_cannot_be_trained_is_refused(tmp_path: Path, policy: str) -> None:
    from rookery.trainer import Trainer

    with pytest.raises(UsageError):
        Trainer(Parity(), policy=policy, config=TrainConfig(steps=1), out=tmp_path, **options())
    assert not list(tmp_path.iterdir())


@pytest.mark.needs("tokenizers")
def test_a_tokenizer_that_does_not_match_the_model_is_refused(tmp_path: Path) -> None:
    from rookery.trainer import Trainer
    from rookery.upstreams.torch import ModelLoadError
    from tests.upstreams.torch_kit import save_model

    for name in ("own", "mixed"):
        save_model(tmp_path / name)
    shutil.copy(TOKENIZERS / "llama-3" / "tokenizer.json", tmp_path / "mixed")
    config, out = TrainConfig(steps=1, eval_tasks=0), tmp_path / "runs"
    with pytest.raises(ModelLoadError) as caught:
        Trainer(Parity(), policy=f"hf:{tmp_path / 'mixed'}", config=config, out=out)
    assert caught.value.reason == "mismatch"
    rendering = {"tokenizer": str(TOKENIZERS / "qwen3")}
    with pytest.raises(UsageError):
        Trainer(Parity(), policy=f"hf:{tmp_path / 'own'}?slots=2", config=config, out=out, rendering=rendering)
    assert not list(out.iterdir())


def test_a_policy_without_log_probabilities_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rookery.upstreams.embedded import EmbeddedUpstream

    complete = EmbeddedUpstream.complete

    async def without_logprobs(*arguments: Any, **named: Any) -> Any:
        return msgspec.structs.replace(await complete(*arguments, **named), logprobs=b"")

    monkeypatch.setattr(EmbeddedUpstream, "complete", without_logprobs)
    trainer = train(Parity(), tmp_path, steps=2, lag=0, eval_tasks=0)
    with pytest.raises(BatchError):
        trainer.train()
    assert trainer.progress.step == 0


def test_weights_that_are_not_finite_are_not_pushed(tmp_path: Path) -> None:
    trainer = train(Parity(), tmp_path, steps=2, lag=0, eval_tasks=0)
    step = trainer.optimizer.step

    def overflow(*arguments: Any) -> Any:
        stats = step(*arguments)
        trainer.optimizer.parameters[0].data[0] = float("inf")
        return stats

    trainer.optimizer.step = overflow
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert caught.value.reason == "nan"
    pushed = Weights.load(trainer.folder.path / "policy")
    assert pushed.version == 0
    assert all(np.isfinite(tensor).all() for tensor in pushed.tensors.values())
    assert resume_training(trainer.folder.path, env=Parity()).train().steps == 2


def test_a_corrupt_checkpoint_is_named(tmp_path: Path) -> None:
    result = train(Parity(), tmp_path, steps=2, lag=0, eval_tasks=0).train()
    (result.folder / "checkpoints" / "step-00000002" / "model.pt").write_bytes(b"nonsense")
    with pytest.raises(TrainingError) as caught:
        resume_training(result.folder, env=Parity(), steps=3)
    assert caught.value.reason == "checkpoint"
    assert "step-00000002" in str(caught.value)


# ---- plots


def test_plots_are_written_as_png_and_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="[probed] this machine has no matplotlib")
    from rookery.trainer.plot import plot_learning

    result = train(Parity(), tmp_path, steps=2, lag=0).train()
    png, svg = plot_learning([result.folder, result.folder], tmp_path / "curves" / "two", labels=["a", "b"])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()


def test_incomplete_rows_of_metrics_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(msgspec.json.encode({"step": 1}) + b'\n{"step":')
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_the_training_loop_has_at_most_400_lines() -> None:
    from rookery.trainer import loop

    assert len(Path(loop.__file__).read_text().splitlines()) <= 400
