"""Agents on `swe` tasks: the built-in repairs."""

from pathlib import Path

import pytest

from rookery.core import Task, label
from rookery.environments.agent import AgentEnvironment
from rookery.tasks.swe import get_swe_task
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.helpers import (
    agents_directory,
    assert_trainable,
    get_agents_dir,
    require_agent,
    run_rollouts,
    scripted_engine,
    scripted_model,
)
from tests.servers import ModelServer

__all__ = ["local_sandboxes"]
swe = pytest.importorskip("rookery.environments.swe")


def load_repair(name: str) -> tuple[Task, str]:
    """Return a built-in task and a shell script that solves it."""
    from rookery.environments.swe.repairs import repairs

    task = next(task for task in repairs() if task.id == name)
    (mapping,) = get_swe_task(task).steps[0].solution
    top = Path(mapping.source) / "files"
    script = [
        f"cat > {path.relative_to(top)} <<'END OF FILE'\n{path.read_text()}END OF FILE"
        for path in sorted(top.rglob("*"))
        if path.is_file()
    ]
    return task, "\n".join(script)


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.timeout(900)  # it may install the agent first, and importing litellm takes long on a busy machine
async def test_mini_swe_agent_solves_a_repair(tmp_path: Path) -> None:
    require_agent("mini-swe-agent")
    task, script = load_repair("backup-rotation")
    steps = scripted_model(
        ("bash", {"command": script}), ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    )
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("mini-swe-agent")
        async with ModelServer(steps) as server, scripted_engine(server, env, tmp_path) as engine:
            (rollout,) = await run_rollouts(engine, [task])
    assert_trainable(rollout, 2)
    assert rollout.reward == 1.0, rollout.info


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
async def test_unchanged_sandbox_is_graded(tmp_path: Path) -> None:
    task, _ = load_repair("backup-rotation")
    env = AgentEnvironment({"name": "idle", "command": ["sh", "-c", "pwd", "sh", "{prompt}"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [task])
    assert label(rollout.outcome) == "completed", rollout.outcome
    assert rollout.reward == 0.0
    assert rollout.info["agents"][0]["stdout"].strip() == get_swe_task(task).workdir
