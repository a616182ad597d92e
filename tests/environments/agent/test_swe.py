"""Tasks in a box, by agents: the built-in repairs."""

from pathlib import Path

import pytest

from rookery.core import Task, label
from rookery.environments.agent import AgentEnvironment
from rookery.tasks.swe import get_swe_task
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.kit import (
    agents_at,
    all_of,
    get_agents_dir,
    real_agent,
    scripted,
    scripted_engine,
    trainable,
)
from tests.servers import ModelServer

__all__ = ["local_sandboxes"]
swe = pytest.importorskip("rookery.environments.swe")


def repair(name: str) -> tuple[Task, str]:
    """One of the built-in ones, and the lines of shell that repair it."""
    from rookery.environments.swe.repairs import repairs

    task = next(one for one in repairs() if one.id == name)
    (part,) = get_swe_task(task).steps[0].solution
    top = Path(part.source) / "files"
    lines = [
        f"cat > {path.relative_to(top)} <<'END OF FILE'\n{path.read_text()}END OF FILE"
        for path in sorted(top.rglob("*"))
        if path.is_file()
    ]
    return task, "\n".join(lines)


@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.timeout(900)  # it may install the agent first, and importing litellm takes long on a busy machine
async def test_mini_swe_agent_solves_a_repair(tmp_path: Path) -> None:
    real_agent("mini-swe-agent")
    task, lines = repair("backup-rotation")
    steps = scripted(
        ("bash", {"command": lines}), ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    )
    with agents_at(get_agents_dir()):
        env = AgentEnvironment("mini-swe-agent")
        async with ModelServer(steps) as server, scripted_engine(server, env, tmp_path) as made:
            (found,) = await all_of(made, [task])
    trainable(found, 2)
    assert found.reward == 1.0, found.info


@pytest.mark.usefixtures("local_sandboxes")
async def test_a_sandbox_that_an_agent_left_as_it_was_is_graded_too(tmp_path: Path) -> None:
    task, _ = repair("backup-rotation")
    env = AgentEnvironment({"name": "idle", "command": ["sh", "-c", "pwd", "sh", "{prompt}"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as made:
        (found,) = await all_of(made, [task])
    assert label(found.outcome) == "completed", found.outcome
    assert found.reward == 0.0
    assert found.info["agents"][0]["stdout"].strip() == get_swe_task(task).workdir
