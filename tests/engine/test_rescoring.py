"""Stored rollouts of mixtures, SWE tasks and agents are graded again by their own environments."""

import os
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine, EngineConfig
from rookery.core import Completed, Failed, Rollout, SandboxSpec, Task
from rookery.core.records import SUBMISSIONS
from rookery.engine.rescoring import KeptScores, RescoringError, apply_rescoring, plan_rescoring
from rookery.environments.agent import AgentEnvironment
from rookery.environments.mixture import MIXTURE, tag_tasks
from rookery.environments.swe.stored_submissions import find_submission_problem
from rookery.environments.tool_environment import SANDBOX_GONE
from rookery.journal import RunReader
from rookery.scoring import Score
from rookery.scoring.swe.stored_submission import MAX_STORED_BYTES, pack_submission, unpack_submission
from rookery.scoring.swe.submission_transfer import SubmissionFiles
from rookery.upstreams import UpstreamConfig
from tests.environments.helpers import Attempt
from tests.environments.swe.helpers import SUBMIT, bash, scripted_model, small_task
from tests.servers import Answer, ModelServer, Request

FIX = bash("sed -i 's/-/+/' add.sh; rm old.txt; ln -s add.sh link.sh")
TEST = '[ "$(bash link.sh 2 3)" = 5 ] && [ ! -e old.txt ]\n'


def reply(request: Request) -> Answer:
    tools = {tool["function"]["name"] for tool in request.body.get("tools", ())}
    if "submit" in tools:
        return scripted_model(FIX, SUBMIT, bash("echo 7 > seven"), SUBMIT)(request)
    return Answer("42")


def read_rewards(run: Path) -> dict[str, float | None]:
    with RunReader(run) as reader:
        return {record.task: record.reward for record in reader.iter_rollouts()}


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_every_environment_of_a_mixture_grades_its_stored_rollouts_again(tmp_path: Path) -> None:
    """SWE submissions are installed in new sandboxes; what only the policy's sandbox shows keeps its score."""
    files = {"add.sh": "echo $(($1 - $2))\n", "old.txt": ""}
    swe = small_task(tmp_path, files=files, test=TEST, steps=(("More.", '[ "$(cat seven)" = 7 ]\n'),))
    rows = {"right": {"answer": 42}, "check": {"check": "true"}, "ungraded": {}}
    boxed = [Task(id=name, prompt=swe.prompt, data=data) for name, data in rows.items()]
    tasks = [*tag_tasks([swe], "swe"), *tag_tasks(boxed, "sandbox")]
    async with ModelServer(reply) as server:
        config = EngineConfig(
            environment=MIXTURE,
            arguments={"environments": [{"environment": "swe"}, {"environment": "sandbox"}]},
            upstreams={"policy": UpstreamConfig(urls=(server.url,), model="test-model")},
            sandbox=SandboxSpec(provider="local"),
            explicit_sandbox_fields=("provider",),
            runners=0,
        )
        async with Engine(MIXTURE, config=config, out=tmp_path / "runs") as engine:
            groups = [group async for group in engine.groups(tasks, k=1)]
        assert engine.folder is not None
        sampled = len(server.requests)
        first = {"swe/sum": 1.0, "sandbox/right": 1.0, "sandbox/check": 1.0, "sandbox/ungraded": None}
        assert read_rewards(engine.folder) == first
        (ungraded,) = (group.rollouts[0] for group in groups if group.task.id == "sandbox/ungraded")
        assert (ungraded.outcome, ungraded.ungraded, ungraded.valid) == (Completed(), True, False)

        (tmp_path / "sum" / "tests1" / "test.sh").write_text("exit 1\n")  # a stricter test
        plan = plan_rescoring(engine.folder)
        assert plan.kept == (KeptScores("sandbox", SANDBOX_GONE, 1),)
        async with Engine(plan.config.environment, config=plan.config, out=tmp_path / "rescores") as again:
            results = [group async for group in again.groups(plan.tasks, k=1)]
        assert len(results) == 3
        assert again.folder is not None
        done = apply_rescoring(engine.folder, again.folder, "same")
        assert (done.rollouts, done.changed, done.failed, done.kept) == (3, 1, 0, 0)
        assert read_rewards(engine.folder) == {**first, "swe/sum": 0.5}
        with RunReader(engine.folder) as reader:
            (record,) = (one for one in reader.iter_rollouts() if one.task == "swe/sum")
        assert record.rewards == {"s0": 1.0, "s1": 0.0}
        assert len(server.requests) == sampled


def test_run_of_which_nothing_can_be_graded_again_names_the_reason_per_environment(tmp_path: Path) -> None:
    from rookery.core import Extent
    from rookery.journal import Journal

    with Journal.create(tmp_path, {"environment": "sandbox"}) as journal:
        journal.add_tasks([Task(id="t", data={"check": "true"})])
        journal.add_group(0, stream="main", position=0, task=0, k=1)
        tokens = (Extent("x", 0, 0, 0),)
        record = Rollout(id="0.0", group=0, member=0, task="t", outcome=Completed(), reward=1.0, tokens=tokens)
        journal.add_rollout(record)
        journal.end("finished")
    with pytest.raises(RescoringError) as caught:
        plan_rescoring(tmp_path)
    assert caught.value.kept == (KeptScores("sandbox", SANDBOX_GONE, 1),)


@pytest.mark.parametrize(
    ("data", "info", "reward"),
    [
        ({"answer": 42}, {"submission": "42"}, 1.0),
        ({"answer": 42}, {"submission": "41", "agents": [{"stdout": "42"}]}, 0.0),
        ({"answer": 42}, {"agents": [{"stdout": "It is\n42\n"}]}, 1.0),
    ],
)
async def test_answer_of_an_agent_is_graded_again(data: Any, info: dict[str, Any], reward: float) -> None:
    env = AgentEnvironment("mini-swe-agent")
    record = Rollout(id="0.0", group=0, member=0, task="t", outcome=Completed(), info=info)
    attempt = Attempt(task=Task(id="t", data=data))
    assert env.find_restore_problem(attempt.ctx.task, record) == ""
    await env.restore(attempt.ctx, record, [])
    score = await env.score(attempt.ctx)
    assert isinstance(score, Score)
    assert score.reward == reward
    large = Rollout(id="0.0", group=0, member=0, task="t", outcome=Completed(), info={"submission": None})
    assert env.find_restore_problem(attempt.ctx.task, large)


@pytest.mark.parametrize(
    ("stored", "graded", "failed", "rescored", "restorable"),
    [
        (1, 1, False, False, True),
        (1, 2, False, False, False),
        (1, 0, True, False, True),
        (1, 1, True, False, False),  # the second step failed before its submission was stored
        (2, 1, True, False, True),
        (1, 1, True, True, True),  # a later grading failed
    ],
)
def test_failed_rollout_needs_the_submission_of_the_step_that_failed(
    stored: int, graded: int, failed: bool, rescored: bool, restorable: bool
) -> None:
    info: dict[str, Any] = {SUBMISSIONS: {str(step): "x" for step in range(stored)}, "grades": [{}] * graded}
    if rescored:
        info["rescored"] = {}
    outcome = Failed("infra", "sandbox.lost", "", "score") if failed else Completed()
    record = Rollout(id="0.0", group=0, member=0, task="t", outcome=outcome, info=info)
    assert (find_submission_problem(record) == "") == restorable


def test_stored_submission_keeps_modes_links_and_names(tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    folder = tree / "work" / "empty"
    folder.mkdir(parents=True, mode=0o750)
    (tree / "work" / "run.sh").write_text("echo\n")
    (tree / "work" / "run.sh").chmod(0o4755)
    Path(os.fsdecode(bytes(tree) + b"/work/\xff")).write_bytes(b"\0")
    (tree / "work" / "link").symlink_to("/etc/passwd")
    files = SubmissionFiles(
        tree=tree, folders=frozenset({"/work/empty"}), removed=("/work/old",), replaced=("/work/run.sh",)
    )
    out.mkdir()
    tops, copy = unpack_submission(pack_submission(files, ("/work",)), out)
    assert (tops, copy.folders, copy.removed, copy.replaced) == (
        ("/work",),
        files.folders,
        files.removed,
        files.replaced,
    )
    assert os.readlink(out / "tree" / "work" / "link") == "/etc/passwd"
    assert (out / "tree" / "work" / "run.sh").stat().st_mode & 0o7777 == 0o755  # without the set-user-ID bit
    assert (out / "tree" / "work" / "empty").stat().st_mode & 0o777 == 0o750
    assert Path(os.fsdecode(bytes(out) + b"/tree/work/\xff")).read_bytes() == b"\0"
    (tree / "work" / "large").write_bytes(bytes(MAX_STORED_BYTES))
    assert pack_submission(files, ("/work",)) == ""
