"""Trainable sessions of OpenEnv, validated by OpenEnv's own types."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.adapters.openenv import COMPLETED, FAILED, RookerySessionFactory
from rookery.adapters.task_rows import make_task_rows
from rookery.core import Sampling, Task, UsageError
from rookery.journal import RunReader
from rookery.tasks import tasks_from
from tests.adapters.kit import ByteTokenizer, ScriptedEnvironment, make_task
from tests.adapters.trl_kit import tiny

pytestmark = [pytest.mark.needs("openenv"), pytest.mark.long]
TASKS = [make_task("scored", [0.75], conversations=2), make_task("failing", [None])]
PROMPTS = {row["task"]: row["prompt"] for row in make_task_rows(tasks_from(TASKS, "tests"))}


@pytest.fixture
def factory(tmp_path: Path) -> Iterator[RookerySessionFactory]:
    tiny(tmp_path / "policy.safetensors")
    with RookerySessionFactory(
        ScriptedEnvironment(),
        policy=f"embedded:{tmp_path / 'policy.safetensors'}",
        tasks=TASKS,
        sampling={"temperature": 1.0, "top_p": 1.0},
        runners=0,
        retry={"attempts": 1},
        max_tokens=8,
        out=tmp_path / "runs",
    ) as made:
        yield made


def test_session_returns_the_tokens_of_its_rollout_and_none_for_a_failed_one(
    factory: RookerySessionFactory,
) -> None:
    from openenv.core.harness import TrainableSession, TrainingTrace

    session, failing = factory.create(PROMPTS["scored"], seed=0), factory.create(PROMPTS["failing"], seed=0)
    assert isinstance(session, TrainableSession)
    assert session.initial_messages() == [{"role": "user", "content": "say scored"}]
    assert (session.wait_for_completion(60), failing.wait_for_completion(60)) == (COMPLETED, FAILED)
    trace = session.fetch_training_trace()
    assert isinstance(trace, TrainingTrace)
    assert [turn.node_id.rpartition("-")[2] for turn in trace.turns] == ["0", "1"]
    for turn in trace.turns:
        assert sum(turn.loss_mask) == sum(turn.loss_mask[len(turn.prompt_token_ids) :]) > 0
        assert len(turn.per_token_logps) == len(turn.completion_token_ids)
    assert session.verify([]).env_reward == 0.75
    assert failing.fetch_training_trace().turns == []
    assert failing.verify([]).env_reward is None
    assert failing.verify([]).metrics["rookery/missing/sandbox.lost"] == 1.0
    for one in (session, failing):
        one.close()
    with pytest.raises(UsageError):
        session.call_tool("python", {})
    with pytest.raises(UsageError):
        factory.create([{"role": "user", "content": "x", "task": "unknown"}])
    with RunReader(factory.engine.folder or Path()) as reader:
        (record,) = [one for one in map(reader.rollout, ("0.0", "1.0")) if one is not None and one.reward == 0.75]
    assert record.usage.sampled_tokens == sum(sum(turn.loss_mask) for turn in trace.turns)


def test_another_tokenizer_and_contradicting_parameters_are_refused(tmp_path: Path) -> None:
    tiny(tmp_path / "policy.safetensors")
    options = {"policy": f"embedded:{tmp_path / 'policy.safetensors'}", "tasks": TASKS, "runners": 0}
    options |= {"sampling": {"temperature": 1.0}, "max_tokens": 8, "out": tmp_path / "runs"}
    contradicting = [Task(id="cold", sampling=Sampling(temperature=0.5))]
    with pytest.raises(UsageError):
        RookerySessionFactory(ScriptedEnvironment(), **(options | {"tasks": contradicting}))
    tokenizer = ByteTokenizer(shift=1)
    with RookerySessionFactory(ScriptedEnvironment(), tokenizer=tokenizer, **options) as factory:
        session = factory.create(PROMPTS["scored"])
        with pytest.raises(UsageError):
            session.wait_for_completion(60)
        session.close()


def test_closed_session_is_cancelled(factory: RookerySessionFactory) -> None:
    sessions = [factory.create(PROMPTS["scored"]) for _ in range(3)]
    threads = [threading.Thread(target=session.close) for session in sessions[:2]]
    for thread in threads:
        thread.start()
    assert sessions[2].wait_for_completion(60) == COMPLETED
    for thread in threads:
        thread.join(60)
    assert sessions[0].verify([]).env_reward is None
