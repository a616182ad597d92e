"""Environments with several participants: who learns, what each observes, and a reward for each side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine
from rookery.core import Message, Task, TaskError, UsageError
from rookery.environments import Context, MultiAgentEnvironment, Participant, Score
from rookery.journal import RunReader
from tests.environments.helpers import Attempt

GAME = str(Path(__file__).parents[2] / "examples" / "higher.py")


class Talk(MultiAgentEnvironment):
    participants = (
        Participant(name="ann", system_prompt="You are Ann."),
        Participant(name="bob"),
        Participant(name="eve", trainable=False),
    )
    max_replies = 4

    async def rewards(self, ctx: Context) -> Mapping[str, float]:
        return {"ann": 1.0, "bob": 0.25, "eve": 0.0}


class Team(Talk):
    shared_reward = True


def make_task(**data: Any) -> Task:
    return Task(id="t", prompt=(Message("user", "Talk."),), data=data)


async def run(env: MultiAgentEnvironment, **data: Any) -> tuple[Attempt, Score]:
    attempt = Attempt(["a1", "b1", "e1", "a2"], task=make_task(**data))
    await env.setup(attempt.ctx)
    await env.run(attempt.ctx)
    return attempt, await env.score(attempt.ctx)


async def test_participants_hear_each_other_and_only_the_learner_trains() -> None:
    env = Talk()
    attempt, score = await run(env, learner="ann")
    assert [turn.role for turn in attempt.turns] == ["policy", "bob", "eve", "policy"]
    heard = [(message.role, message.text) for message in env.conversation(attempt.ctx, "ann")]
    assert heard == [
        *(("system", "You are Ann."), ("user", "Talk."), ("assistant", "a1")),
        *(("user", "b1\ne1"), ("assistant", "a2")),
    ]
    assert score == Score(1.0, {"ann": 1.0, "bob": 0.25, "eve": 0.0}, {"replies": 4.0})
    assert attempt.session.turns == 2  # the others do not use up the budget of turns
    attempt, score = await run(env, learner="bob")
    assert [turn.role for turn in attempt.turns] == ["ann", "policy", "eve", "ann"]
    assert score.reward == 0.25


async def test_team_with_a_shared_reward_trains_all_trainable_participants() -> None:
    attempt, score = await run(Team())
    assert [turn.role for turn in attempt.turns] == ["policy", "policy", "eve", "policy"]
    assert score.reward == pytest.approx((1.0 + 0.25) / 2)


def test_learner_is_the_same_for_all_rollouts_of_a_task() -> None:
    env = Talk()
    learners = [env.learner(Task(id=f"t{n}")) for n in range(50)]
    assert set(learners) == {"ann", "bob"}
    assert learners == [Talk().learner(Task(id=f"t{n}")) for n in range(50)]
    for wrong in ("eve", "zoe", 7):
        with pytest.raises(TaskError):
            env.learner(make_task(learner=wrong))


def test_wrong_participants_are_refused() -> None:
    one, two = Participant(name="one"), Participant(name="two", role="user")
    for wrong in ((), (one,), (one, one), (one, Participant(name="policy"))):
        with pytest.raises(UsageError):
            type("Wrong", (Talk,), {"participants": wrong})()
    with pytest.raises(UsageError):
        type("Wrong", (Talk,), {"participants": tuple(Participant(name=n, trainable=False) for n in "ab")})()
    assert type("Users", (Talk,), {"participants": (one, two)})().roles == ("user",)


@pytest.mark.long
async def test_self_play_game_runs_with_the_embedded_policy(tmp_path: Path) -> None:
    async with Engine(GAME, policy="embedded", runners=0, out=tmp_path) as engine:
        groups = [group async for group in engine.groups(list(engine.environment.tasks())[-4:], k=2)]
        assert engine.folder is not None
        with RunReader(engine.folder) as reader:
            for group in groups:
                learner = group.task.data["learner"]
                for rollout in group.rollouts:
                    assert rollout.valid
                    assert sum(rollout.rewards.values()) == 1.0  # one side wins
                    assert rollout.reward == rollout.rewards[learner]
                    assert rollout.info["learner"] == learner
                    roles = [turn.role for turn in reader.turns(rollout)]
                    other = "second" if learner == "first" else "first"
                    assert set(roles) <= {"policy", other}
                    own = [i for i, turn in enumerate(reader.turns(rollout)) if turn.role == "policy"]
                    assert sorted(i for one in rollout.segments for i in one.turns) == own
