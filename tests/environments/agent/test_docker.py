"""Agents in containers: the agent is this machine's, the system and its Python are the image's."""

from pathlib import Path

import msgspec
import pytest

from rookery.core import SandboxSpec, label
from rookery.environments.agent import AgentEnvironment
from tests.environments.agent.folders import StepFolder, harbor_task
from tests.environments.agent.kit import (
    PLAIN,
    agents_at,
    all_of,
    get_agents_dir,
    program,
    real_agent,
    scripted,
    scripted_engine,
    trainable,
)
from tests.environments.swe.system_image import system_at
from tests.sandboxes.docker.conftest import engine, image_archives
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine
from tests.servers import ModelServer

__all__ = ["engine", "image_archives"]
SYSTEM = "rookery-agent-steps:latest"
"""This machine's system: grading needs more of one than the small image has."""
BOX = SandboxSpec(provider="docker", image=IMAGE, network="model", memory=512 << 20)
ROW = {"prompt": "6 * 7?", "answer": 42}
SIX = {
    "name": "six",
    "command": ["{python}", "-I", "{agent}/start.py", "{script}", "{prompt}"],
    "script": True,
    "install": {"python": ["six==1.17.0"]},
    "check": ["{python}", "-I", "{agent}/start.py", "-c", "import six"],
    "environment": {"MODEL": "{model}"},
}
USES = """
import six
for turn in range(2):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "go on"})
print(messages[-2]["content"] if six.PY3 else "")
"""


@pytest.fixture(autouse=True)
def where(engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")


@pytest.mark.long
async def test_an_installed_agent_in_a_container_to_a_scored_and_trainable_rollout(
    tmp_path: Path,
    engine: PrivateEngine,
) -> None:
    with agents_at(get_agents_dir()):
        env = AgentEnvironment(SIX, script=program(tmp_path, USES, before=PLAIN))
        async with (
            ModelServer(scripted("hm", "42")) as server,
            scripted_engine(server, env, tmp_path, sandbox=BOX) as made,
        ):
            found = await all_of(made, [ROW], k=2)
    for one in found:
        trainable(one, 2)
        assert one.reward == 1.0, one.info
    assert engine.containers() == []


@pytest.mark.long
async def test_steps_of_a_task_in_a_container_each_with_an_agent(tmp_path: Path, engine: PrivateEngine) -> None:
    """As root, who may remove the folder that the next one starts in."""
    steps = (
        StepFolder("one", "true"),
        StepFolder("two", "test -e two && test ! -e one", reward='{"reward": 0.5}'),
    )
    script = """
import shutil, subprocess
open(sys.argv[1], "w").close()
if ask(messages)["content"] == "42" and sys.argv[1] == "one":
    shutil.rmtree("/workspace")
"""
    env = AgentEnvironment("program", script=program(tmp_path, script))
    engine.load(system_at(tmp_path / "system.tar"), SYSTEM)
    box = msgspec.structs.replace(BOX, image=SYSTEM, user="root")
    async with (
        ModelServer(scripted("42")) as server,
        scripted_engine(server, env, tmp_path, sandbox=box) as made,
    ):
        (found,) = await all_of(made, [harbor_task(tmp_path, *steps)])
    assert label(found.outcome) == "completed", found.outcome
    assert found.info["agents"][1]["exit_code"] == 127, found.info
    assert found.reward == 0.0, found.info
    assert engine.containers() == []


@pytest.mark.long
async def test_an_agent_that_cannot_start_in_an_image_is_no_failure_of_the_policy(tmp_path: Path) -> None:
    """This image lacks a library that its packages need."""
    real_agent("openai-sdk")
    with agents_at(get_agents_dir()):
        env = AgentEnvironment("openai-sdk", script=program(tmp_path, "pass", before=""))
        async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path, sandbox=BOX) as made:
            (found,) = await all_of(made, [ROW])
    assert label(found.outcome) == "agent.missing", found.outcome
    assert "cannot start in the image" in str(found.outcome)
