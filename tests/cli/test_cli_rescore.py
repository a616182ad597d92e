"""`rookery rescore RUN`: stored rollouts are graded again, and nothing is sampled."""

from pathlib import Path
from typing import Any

import pytest

from rookery.core import Completed, Failed, Rollout, Task, UsageError
from rookery.engine.rescoring import apply_rescoring, plan_rescoring
from rookery.environments import Environment, ToolEnvironment
from rookery.environments.rescoring import RescoringEnvironment
from rookery.environments.sandbox_environment import SandboxEnvironment
from rookery.environments.swe import SweEnvironment
from rookery.journal import Journal, RunReader, open_lock
from tests.cli.conftest import ENVIRONMENT, tasks
from tests.cli.helpers import rookery, runs
from tests.servers import Answer, ModelServer

SCORER = """
def grade(submission):
    if submission.task.id == "t2":
        raise ValueError("broken grader")
    return 0.25 if submission.answer == "42" and len(submission.messages) == 2 else 0.0
"""


async def store_run(here: Path, server: ModelServer) -> Path:
    """Return a run of four tasks in which scoring fails for t1."""
    server.default = Answer("42")
    tasks(here, 4, boom=(1,))
    args = ("run", "sums.py", "--tasks", "tasks.jsonl", "--runners", "0", "--policy", server.url)
    assert (await rookery(*args, cwd=here)).code == 3
    return runs(here)[0]


def read_rewards(run: Path) -> list[float | None]:
    with RunReader(run) as reader:
        return [record.reward for record in reader.iter_rollouts()]


@pytest.mark.long
async def test_rollouts_are_graded_again_without_sampling(here: Path, server: ModelServer) -> None:
    run = await store_run(here, server)
    sampled = len(server.requests)
    with open_lock(run):
        (await rookery("rescore", run, cwd=here)).assert_refused(run.name)
    assert read_rewards(run) == [1.0, None, 1.0, 1.0]
    (here / "graders.py").write_text(SCORER)
    other = await rookery("rescore", run, "--scorer", "graders:grade", "--runners", "1", "--json", cwd=here)
    assert other.code == 3, other.err
    assert other.events[-1]["rescored"] == {"rollouts": 4, "changed": 4, "failed": 1, "kept": 0}
    # The grader failed for t2: its reward is missing, not 0.
    assert read_rewards(run) == [0.25, 0.25, None, 0.25]
    with RunReader(run) as reader:
        assert reader.status == "finished"
        records = list(reader.iter_rollouts())
        failed = records[2].outcome
        assert isinstance(failed, Failed)
        assert (failed.fault, failed.cause, failed.stage) == ("bug", "bug.scoring", "score")
        assert [one.record.reward for one in reader.earlier(records[0].id)] == [1.0]
        assert isinstance(records[1].outcome, Completed)
        assert reader.turns(records[1])

    (here / "sums.py").write_text(ENVIRONMENT.replace('get("boom")', 'get("never")'))
    same = await rookery("rescore", "latest", "--runners", "0", cwd=here)
    assert same.code == 0, same.err
    assert read_rewards(run) == [1.0, 1.0, 1.0, 1.0]
    assert len(server.requests) == sampled
    first = min((run / "rescores").glob("2*"))
    with pytest.raises(UsageError):  # the run was graded again since
        apply_rescoring(run, first, "late")
    with RunReader(run) as reader:
        assert reader.status == "finished"
    assert read_rewards(run) == [1.0, 1.0, 1.0, 1.0]
    shown = await rookery("show", run, "0.0", "--json", cwd=here)
    assert [one["reward"] for one in shown.events[0]["earlier"]] == [1.0, 0.25]


class OwnRun(ToolEnvironment):
    async def run(self, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("env", "data"),
    [
        (Environment(), {}),
        (OwnRun(), {}),
        (ToolEnvironment(scorer="command"), {}),
        (SandboxEnvironment(), {"check": "true"}),
        (SweEnvironment(), {}),
    ],
)
def test_environment_says_why_it_cannot_grade_a_stored_rollout(env: Environment, data: dict[str, Any]) -> None:
    record = Rollout(id="0.0", group=0, member=0, task="t", outcome=Completed())
    assert env.find_restore_problem(Task(id="t", data=data), record)
    assert not SandboxEnvironment().find_restore_problem(Task(id="t", data={"answer": 4}), record)


def test_named_scorer_needs_no_environment(tmp_path: Path) -> None:
    env = RescoringEnvironment(str(tmp_path), scorer={"name": "judge", "calls": 1})
    assert env.roles == ("judge",)
    assert not env.needs_sandbox


@pytest.mark.parametrize("scorer", ["exakt", "command", {"name": "exact", "nope": 1}])
def test_scorer_that_cannot_grade_stored_rollouts_is_refused(scorer: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        RescoringEnvironment(str(tmp_path), scorer=scorer)


def test_run_without_gradable_rollouts_is_refused(tmp_path: Path) -> None:
    outcome = Failed("infra", "upstream.error", "down")
    with Journal.create(tmp_path, {"environment": "tools"}) as journal:
        journal.add_tasks([Task(id="t")])
        journal.add_group(0, stream="main", position=0, task=0, k=1)
        journal.add_rollout(Rollout(id="0.0", group=0, member=0, task="t", outcome=outcome))
        journal.end("finished")
    with pytest.raises(UsageError):
        plan_rescoring(tmp_path, scorer="exact")
