"""A policy that kills its own sandbox gets no free retry; a failure of the machine does not cost it a reward."""

import json
from pathlib import Path

import pytest

from rookery.core import Truncated, label
from tests.engine.conftest import QUICK, run_groups
from tests.servers import Answer, ModelServer, Request

KILL_THE_GUARD = "import os, signal; os.kill(os.getppid(), signal.SIGKILL); signal.pause()"


def model_that_runs(*programs: str) -> ModelServer:
    """A model that runs each program with the `python` tool, then answers 42."""

    def play(request: Request) -> Answer:
        done = sum(message["role"] == "tool" for message in request.body["messages"])
        if done < len(programs):
            call = ("python", json.dumps({"code": programs[done]}))
            return Answer(None, calls=[call], prompt_ids=[1] * (3 + done), ids=[7, 8], logprobs=[-1.0, -1.0])
        return Answer("42", prompt_ids=[1] * (3 + done), ids=[9], logprobs=[-1.0])

    return ModelServer(play)


TASK = {"prompt": "what is six times seven?", "answer": "42"}


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 2])
async def test_policy_that_kills_its_sandbox_twice_gets_the_minimum_reward(tmp_path: Path, runners: int) -> None:
    async with model_that_runs(KILL_THE_GUARD) as model:
        (group,) = await run_groups(
            model, tmp_path, [TASK], k=2, env="tools", runners=runners, retry=QUICK, sandbox="subprocess"
        )  # with other providers a program cannot reach its guard
    for rollout in group.rollouts:
        assert rollout.outcome == Truncated("lost")
        assert rollout.reward == 0.0
        assert [label(attempt.outcome) for attempt in rollout.attempts] == ["sandbox.lost", "sandbox.lost"]
        assert rollout.valid
        assert rollout.segments  # its sampled tokens train


async def test_failed_program_is_an_observation_and_the_rollout_continues(tmp_path: Path) -> None:
    programs = [
        "print(6 * 7)",
        "raise ValueError('no')",
        "import os; os.kill(os.getpid(), 9)",
        "import sys; sys.exit(3)",
    ]
    async with model_that_runs(*programs) as model:
        (group,) = await run_groups(model, tmp_path, [TASK], env="tools", runners=1)
        seen = [message["content"] for message in model.requests[-1].body["messages"] if message["role"] == "tool"]
    assert label(group.rollouts[0].outcome) == "completed"
    assert group.rewards == [1.0]
    assert group.rollouts[0].usage.tool_calls == 4
    assert seen[0].strip() == "42"
    assert "ValueError: no" in seen[1]
    assert "SIGKILL" in seen[2] or "signal 9" in seen[2]
    assert "3" in seen[3]
