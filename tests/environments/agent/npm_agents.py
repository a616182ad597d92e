"""Claude Code and Codex, unmodified, from npm: `make test-agents`. Not a part of `make test`."""

import json
from pathlib import Path
from typing import Any

import pytest

from rookery.environments.agent import AgentEnvironment
from tests.cli.sandbox_kit import boxes
from tests.environments.agent.kit import (
    agents_at,
    agents_home,
    all_of,
    real_agent,
    scripted,
    scripted_engine,
    trainable,
)
from tests.servers import Answer, ModelServer, Request

__all__ = ["boxes"]
pytestmark = [pytest.mark.usefixtures("boxes"), pytest.mark.timeout(600)]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "claude-code": ("Bash", {"command": "echo $((6 * 7)) > answer.txt", "description": "Writes the answer"}),
    "codex": ("exec_command", {"cmd": "echo $((6 * 7)) > answer.txt"}),
}


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_it_streams_two_turns_with_a_real_tool_call(name: str, tmp_path: Path) -> None:
    real_agent(name)
    with agents_at(agents_home()):
        env = AgentEnvironment(name)
        steps = scripted(CALLS[name], "it is done")
        async with ModelServer(steps) as server, scripted_engine(server, env, tmp_path) as made:
            (found,) = await all_of(made, [{"prompt": "6 * 7?", "answer": 42}])
    trainable(found, 2)
    assert found.reward == 1.0, found.info
    assert "it is done" in found.info["agents"][0]["stdout"]


async def test_a_sub_agent_gives_a_tree_whose_every_sampled_token_is_trained_once(tmp_path: Path) -> None:
    real_agent("claude-code")
    sub_task = {"description": "a part", "prompt": "SUBTASK-PART", "subagent_type": "general-purpose"}
    of_main = scripted(("Agent", {**sub_task, "run_in_background": False}), CALLS["claude-code"], "it is done")
    of_sub = scripted(("Bash", {"command": "true", "description": "Nothing"}), "the part is 42")

    def play(request: Request) -> Answer:
        users = [message["content"] for message in request.body["messages"] if message["role"] == "user"]
        if "SUBTASK-PART" not in json.dumps(users):
            return of_main(request)
        answer = of_sub(request)
        answer.prompt_ids = [1000 + token for token in answer.prompt_ids or ()]
        answer.ids = [1000 + token for token in answer.ids or ()]
        return answer

    with agents_at(agents_home()):
        env = AgentEnvironment("claude-code")
        async with ModelServer(play) as server, scripted_engine(server, env, tmp_path) as made:
            (found,) = await all_of(made, [{"prompt": "6 * 7?", "answer": 42}])
    trainable(found, 5)
    assert found.reward == 1.0, found.info
    assert sorted(segment.trained for segment in found.segments) == [6, 9]
