"""Checks at the start: versions, sampling parameters, context length and tokenizer."""

import asyncio
import logging
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from rookery import Limits, Sampling, SyncEngine, Task
from rookery.adapters.compatibility import RolloutChecks, TrainerSettings, check_version
from rookery.adapters.trainer_engine import MAX_ENGINES, ThreadedTrainerEngine
from rookery.core import UsageError
from rookery.engine import Engine
from tests.adapters.kit import ByteTokenizer, ScriptedEnvironment, make_task
from tests.adapters.trl_kit import tiny


def test_version_outside_the_tested_range_is_named(caplog: pytest.LogCaptureFixture) -> None:
    found = check_version("msgspec", "0.1", "99")
    assert found
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "rookery.adapters"):
        assert check_version("msgspec", "98.1", "99") == found
    (record,) = caplog.records
    assert record.args == ("msgspec", found, "98.1", "99")
    assert check_version("no-such-package", "1", "2") == ""


def test_sampling_parameters_are_explicit_and_equal_the_trainers() -> None:
    settings = TrainerSettings(temperature=0.7, top_p=0.9, top_k=0, max_tokens=9)
    explicit = settings.settle_sampling(Sampling(stop=("x",)))
    assert (explicit.temperature, explicit.top_p, explicit.top_k, explicit.max_tokens) == (0.7, 0.9, -1, 9)
    assert explicit.stop == ("x",)
    assert TrainerSettings().settle_sampling(None).top_p == 1.0
    for wrong in (Sampling(temperature=1.0), Sampling(top_p=1.0), Sampling(top_k=20)):
        with pytest.raises(UsageError):
            settings.settle_sampling(wrong)
    settings.settle_sampling(Sampling(top_k=0, top_p=0.9))
    assert settings.settle_sampling({"max_tokens": 3}).max_tokens == 3


def test_context_length_is_the_trainers() -> None:
    settings = TrainerSettings(context=100)
    assert settings.settle_limits(None).context == 100
    assert settings.settle_limits({"context": 50, "turns": 2}) == Limits(context=50, turns=2)
    with pytest.raises(UsageError):
        settings.settle_limits(Limits(context=101))


def test_changed_setting_is_refused() -> None:
    checks = RolloutChecks("a trainer", TrainerSettings(top_k=0))
    checks.check_unchanged(TrainerSettings(top_k=-1))
    with pytest.raises(UsageError):
        checks.check_unchanged(TrainerSettings(temperature=0.6))


def test_wrong_tokenizer_and_context_length_are_noticed_with_the_first_rollouts(tmp_path: Path) -> None:
    tiny(tmp_path / "policy.safetensors")
    options = {"policy": f"embedded:{tmp_path / 'policy.safetensors'}", "runners": 0, "out": tmp_path / "runs"}
    sampling = Sampling(temperature=1.0, max_tokens=20)
    with SyncEngine(ScriptedEnvironment(), sampling=sampling, **options) as engine:
        groups = list(engine.groups([make_task(f"t{n}", [1.0, 0.0]) for n in range(4)], k=2))
        folder = engine.folder
    settings = TrainerSettings(context=128)
    RolloutChecks("a trainer", settings, ByteTokenizer()).check_groups(groups, folder)
    RolloutChecks("a trainer", settings).check_groups(groups, folder)
    for tokenizer, wrong in (
        (ByteTokenizer(shift=1), settings),
        (ByteTokenizer(size=100), settings),
        (ByteTokenizer(), TrainerSettings(context=5)),
    ):
        with pytest.raises(UsageError):
            RolloutChecks("a trainer", wrong, tokenizer).check_groups(groups, folder)


def test_engine_in_a_trainer_refuses_what_contradicts_it_and_is_closed(tmp_path: Path) -> None:
    tiny(tmp_path / "policy.safetensors")
    options = {"trainer": "a trainer", "tested": ("msgspec", "0.1", "99"), "out": tmp_path / "runs", "runners": 0}
    options |= {"policy": f"embedded:{tmp_path / 'policy.safetensors'}"}
    settings = TrainerSettings(max_tokens=5, context=128)
    own = ThreadedTrainerEngine(
        ScriptedEnvironment(), tasks=[Task(id="a", sampling=Sampling(temperature=0.5))], **options
    )
    with pytest.raises(UsageError):  # a task samples with another temperature than the trainer
        own.open(settings)
    assert own.engine is None
    tokenizer = ByteTokenizer()
    with ThreadedTrainerEngine(ScriptedEnvironment(), tokenizer=tokenizer, **options) as rollouts:
        (task,) = rollouts.tasks
        rollouts.open(settings)
        assert [len(group.rollouts) for group in rollouts.run_groups([(task, 1), (task, 2), (task, 1)])] == [
            1,
            2,
            1,
        ]
        with pytest.raises(UsageError):
            rollouts.open(TrainerSettings(max_tokens=5, context=128, temperature=0.5))
        tokenizer.size = 100
        with pytest.raises(UsageError):
            rollouts.submit(task, 2, settings).result(60)
        tokenizer.size = ByteTokenizer().size
        closing = threading.Thread(target=rollouts.close, daemon=True)

        async def run_while_closing(engine: Engine) -> None:
            closing.start()
            while rollouts.engine is not None:
                await asyncio.sleep(0.01)
            await rollouts.run(engine, task, 2, settings)

        running = rollouts.open(settings).submit(run_while_closing)
        with pytest.raises(CancelledError):
            running.result(60)
        closing.join(60)
        assert not closing.is_alive()
        rollouts.open(settings)
        for number in range(MAX_ENGINES - 1):
            rollouts.open(settings, purpose=number)
        with pytest.raises(UsageError):
            rollouts.open(settings, purpose="one too many")
    assert rollouts.engine is None
