"""Agents in containers: the agent comes from this machine, the system and its Python from the image."""

from pathlib import Path

import msgspec
import pytest

from rookery.core import SandboxSpec, label
from rookery.environments.agent import AgentEnvironment
from tests.environments.agent.helpers import (
    CALL_MODEL,
    agents_directory,
    assert_trainable,
    get_agents_dir,
    require_agent,
    run_rollouts,
    scripted_engine,
    scripted_model,
    write_program,
)
from tests.environments.agent.task_directories import StepDirectory, harbor_task
from tests.environments.swe.system_image import system_at
from tests.sandboxes.docker.conftest import engine, image_archives
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine
from tests.servers import ModelServer

__all__ = ["engine", "image_archives"]
SYSTEM = "rookery-agent-steps:latest"
"""An image of this machine's system: grading needs programs that the small image lacks."""
SANDBOX = SandboxSpec(provider="docker", image=IMAGE, network="model", memory=512 << 20)
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
def docker_host(engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")


@pytest.mark.long
async def test_installed_agent_in_a_container_gives_a_trainable_rollout(
    tmp_path: Path,
    engine: PrivateEngine,
) -> None:
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment(SIX, script=write_program(tmp_path, USES, prefix=CALL_MODEL))
        async with (
            ModelServer(scripted_model("hm", "42")) as server,
            scripted_engine(server, env, tmp_path, sandbox=SANDBOX) as run_engine,
        ):
            rollouts = await run_rollouts(run_engine, [ROW], k=2)
    for rollout in rollouts:
        assert_trainable(rollout, 2)
        assert rollout.reward == 1.0, rollout.info
    assert engine.containers() == []


@pytest.mark.long
async def test_each_step_in_a_container_has_its_own_agent(tmp_path: Path, engine: PrivateEngine) -> None:
    """The agent runs as root and removes the directory in which the next one starts."""
    steps = (
        StepDirectory("one", "true"),
        StepDirectory("two", "test -e two && test ! -e one", reward='{"reward": 0.5}'),
    )
    script = """
import shutil, subprocess
open(sys.argv[1], "w").close()
if ask(messages)["content"] == "42" and sys.argv[1] == "one":
    shutil.rmtree("/workspace")
"""
    env = AgentEnvironment("program", script=write_program(tmp_path, script))
    engine.load(system_at(tmp_path / "system.tar"), SYSTEM)
    sandbox = msgspec.structs.replace(SANDBOX, image=SYSTEM, user="root")
    async with (
        ModelServer(scripted_model("42")) as server,
        scripted_engine(server, env, tmp_path, sandbox=sandbox) as run_engine,
    ):
        (rollout,) = await run_rollouts(run_engine, [harbor_task(tmp_path, *steps)])
    assert label(rollout.outcome) == "completed", rollout.outcome
    assert rollout.info["agents"][1]["exit_code"] == 127, rollout.info
    assert rollout.reward == 0.0, rollout.info
    assert engine.containers() == []


@pytest.mark.long
async def test_agent_that_cannot_start_in_an_image_is_agent_missing(tmp_path: Path) -> None:
    """The image lacks a library that the agent's packages need."""
    require_agent("openai-sdk")
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("openai-sdk", script=write_program(tmp_path, "pass", prefix=""))
        async with (
            ModelServer("ok") as server,
            scripted_engine(server, env, tmp_path, sandbox=SANDBOX) as run_engine,
        ):
            (rollout,) = await run_rollouts(run_engine, [ROW])
    assert label(rollout.outcome) == "agent.missing", rollout.outcome
    assert IMAGE in str(rollout.outcome)
