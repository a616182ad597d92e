"""Agents in containers: the agent is this machine's, the system and its Python are the image's."""

from pathlib import Path

import pytest

from rookery.core import SandboxSpec, label
from rookery.environments.agent import AgentEnvironment
from tests.environments.agent.kit import (
    PLAIN,
    agents_at,
    agents_home,
    all_of,
    program,
    real_agent,
    scripted,
    scripted_engine,
    trainable,
)
from tests.sandboxes.docker.conftest import engine, tars
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine
from tests.servers import ModelServer

__all__ = ["engine", "tars"]
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
    with agents_at(agents_home()):
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
async def test_an_agent_that_cannot_start_in_an_image_is_no_failure_of_the_policy(tmp_path: Path) -> None:
    """This image lacks a library that its packages need."""
    real_agent("openai-sdk")
    with agents_at(agents_home()):
        env = AgentEnvironment("openai-sdk", script=program(tmp_path, "pass", before=""))
        async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path, sandbox=BOX) as made:
            (found,) = await all_of(made, [ROW])
    assert label(found.outcome) == "agent.missing", found.outcome
    assert "cannot start in the image" in str(found.outcome)
