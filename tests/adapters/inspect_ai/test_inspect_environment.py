"""`inspect:MODULE@TASK`: the same scores as in Inspect's own evaluation with the same replies."""

from pathlib import Path
from typing import Any

import pytest

from rookery.core import Completed, Failed, UsageError
from rookery.environments import load_environment
from rookery.upstreams import UpstreamConfig
from tests.adapters.foreign_kit import last_user_text, run_environment
from tests.servers import Answer, ModelServer, Request

pytestmark = [pytest.mark.needs("inspect_ai"), pytest.mark.timeout(600)]  # several processes of the peer start

USAGE = {"usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}}
TASKS = "tests.adapters.inspect_ai.inspect_tasks"


def reply(request: Request) -> Answer:
    """Answer "Yes" to the first question of the data set, and "Maybe" to the other one."""
    text = "ANSWER: Yes" if "Positive posts" in last_user_text(request.body) else "ANSWER: Maybe"
    return Answer(text, extra=USAGE)


async def test_scores_equal_those_of_inspects_own_evaluation(tmp_path: Path) -> None:
    from inspect_ai import eval_async
    from inspect_ai.model import get_model
    from inspect_ai.scorer import value_to_float

    from tests.adapters.inspect_ai.inspect_tasks import popularity

    async with ModelServer(reply) as server:
        model = get_model("openai-api/own/test-model", base_url=f"{server.url}/v1", api_key="x", memoize=False)
        (log,) = await eval_async(popularity(), model=model, log_dir=str(tmp_path / "logs"))
        convert = value_to_float()
        own = {
            str(sample.id): {name: convert(score.value) for name, score in sample.scores.items()}
            for sample in log.samples
        }
        calls = len(server.requests)
        env = load_environment(f"inspect:{TASKS}@popularity", task_args={"count": 2}, scorer="includes")
        rollouts = {task: one for task, (one,) in (await run_environment(env, server, tmp_path)).items()}
        assert len(server.requests) == 2 * calls
    assert {task: one.rewards for task, one in rollouts.items()} == own
    for task, one in rollouts.items():
        assert (one.outcome, one.reward, one.usage.turns) == (Completed(), own[task]["includes"], 1)
    assert {one.reward for one in rollouts.values()} == {0.0, 1.0}


async def test_graders_have_a_role_and_errors_are_faults(tmp_path: Path) -> None:
    async with ModelServer("2") as server, ModelServer("GRADE: C") as grader:
        roles = {"grader": UpstreamConfig(urls=(f"{grader.url}/v1",), model="test-model")}
        env = load_environment(f"inspect:{TASKS}@graded", roles=["grader"])
        ((graded,),) = (await run_environment(env, server, tmp_path, roles=roles)).values()
        assert (graded.reward, graded.usage.turns, len(grader.requests)) == (1.0, 1, 1)
        env = load_environment(f"inspect:{TASKS}@failing")
        ((failed,),) = (await run_environment(env, server, tmp_path)).values()
    assert isinstance(failed.outcome, Failed)
    assert (failed.outcome.fault, failed.outcome.cause) == ("bug", "bug.environment")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(f"inspect:{TASKS}@nothing", {}), ("inspect:no_module@task", {}), (f"inspect:{TASKS}@popularity", {"x": 1})],
)
def test_wrong_references_and_arguments_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load_environment(name, **arguments)
