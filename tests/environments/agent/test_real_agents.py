"""Real agents, unmodified, from inside a box with no other network, to scored and trainable rollouts."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rookery.environments.agent import AgentEnvironment
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.kit import (
    agents_at,
    all_of,
    get_agents_dir,
    program,
    real_agent,
    scripted,
    scripted_engine,
    trainable,
)
from tests.servers import Answer, ModelServer, Request

__all__ = ["local_sandboxes"]
# The first test that uses an agent installs it.
pytestmark = [pytest.mark.usefixtures("local_sandboxes"), pytest.mark.timeout(900)]

OPENAI = """
import os, socket, sys
from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for question in ("go on", "and?"):
    reply = client.chat.completions.create(model=os.environ["MODEL"], messages=messages)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    messages.append({"role": "user", "content": question})
try:
    socket.create_connection(("1.1.1.1", 53), timeout=2)
    print("there is another network")
except OSError:
    print(reply.choices[0].message.content)
"""


async def test_a_program_with_the_openai_package(tmp_path: Path) -> None:
    real_agent("openai-sdk")
    with agents_at(get_agents_dir()):
        env = AgentEnvironment("openai-sdk", script=program(tmp_path, OPENAI, before=""))
        async with (
            ModelServer(scripted("hm", "42")) as server,
            scripted_engine(server, env, tmp_path) as made,
        ):
            (found,) = await all_of(made, [{"prompt": "6 * 7?", "answer": 42}])
    trainable(found, 2)
    assert found.reward == 1.0, found.info


async def test_a_killed_shard_costs_an_agent_nothing_but_its_sdks_retry(tmp_path: Path) -> None:
    real_agent("openai-sdk")
    text = OPENAI.replace("OpenAI()", "OpenAI(max_retries=20)")
    waiting = asyncio.Event()
    play = scripted("hm", "42")

    def held(request: Request) -> Answer:
        answer = play(request)
        if len(request.body["messages"]) > 1:
            answer.hold = waiting
        return answer

    with agents_at(get_agents_dir()):
        env = AgentEnvironment("openai-sdk", script=program(tmp_path, text, before=""))
        async with ModelServer(held) as server, scripted_engine(server, env, tmp_path) as made:
            taking = asyncio.create_task(all_of(made, [{"prompt": "6 * 7?", "answer": 42}]))
            await asyncio.wait_for(server.wait_for_requests(2), 60)
            gateway = made.supervisor.gateway
            assert gateway is not None
            for pid in gateway.pids():
                os.kill(pid, signal.SIGKILL)
            waiting.set()
            (found,) = await taking
    trainable(found, 2)
    assert found.reward == 1.0, found.info
    assert len(found.attempts) == 1


ANTHROPIC = """
import os, sys
from anthropic import Anthropic

client = Anthropic()
messages = [{"role": "user", "content": sys.argv[1]}]
for question in ("go on", "and?"):
    with client.messages.stream(model=os.environ["MODEL"], max_tokens=64, messages=messages) as stream:
        said = "".join(stream.text_stream)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
print(said)
"""


async def test_a_program_with_the_anthropic_package_that_streams(tmp_path: Path) -> None:
    real_agent("anthropic-sdk")
    with agents_at(get_agents_dir()):
        env = AgentEnvironment("anthropic-sdk", script=program(tmp_path, ANTHROPIC, before=""))
        async with (
            ModelServer(scripted("hm", "42")) as server,
            scripted_engine(server, env, tmp_path) as made,
        ):
            (found,) = await all_of(made, [{"prompt": "6 * 7?", "answer": 42}])
    trainable(found, 2)
    assert found.reward == 1.0, found.info


async def test_openai_agents_with_a_tool_call(tmp_path: Path) -> None:
    real_agent("openai-agents")
    with agents_at(get_agents_dir()):
        env = AgentEnvironment("openai-agents")
        steps = scripted(("shell", {"command": "echo $((6 * 7)) > answer.txt"}), "it is done")
        async with ModelServer(steps) as server, scripted_engine(server, env, tmp_path) as made:
            (found,) = await all_of(made, [{"prompt": "6 * 7?", "answer": 42}])
    trainable(found, 2)
    assert found.reward == 1.0, found.info
    assert found.metrics["answer_file"] == 1.0


@pytest.mark.long
async def test_mini_swe_agent_writes_a_program_that_is_graded_by_its_tests(tmp_path: Path) -> None:
    real_agent("mini-swe-agent")
    row = {
        "prompt": "Write `double(x)`.",
        "tests": "def check(candidate):\n    assert candidate(4) == 8\n",
        "entry_point": "double",
    }
    steps = scripted(
        ("bash", {"command": "printf 'def double(x):\\n    return 2 * x\\n' > solution.py"}),
        ("bash", {"command": "cat solution.py"}),
        ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    )
    with agents_at(get_agents_dir()):
        env = AgentEnvironment("mini-swe-agent")
        async with ModelServer(steps) as server, scripted_engine(server, env, tmp_path) as made:
            (found,) = await all_of(made, [row])
    trainable(found, 3)
    assert found.reward == 1.0, found.info
    (agent,) = found.info["agents"]
    assert "Submitted" in agent["files"]["/tmp/rookery-agent/trajectory.json"]
