"""Real, unmodified agents in sandboxes without another network give scored and trainable rollouts."""

import asyncio
import signal
from pathlib import Path

import pytest

from rookery.environments.agent import AgentEnvironment
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.helpers import (
    agents_directory,
    assert_trainable,
    get_agents_dir,
    require_agent,
    run_rollouts,
    scripted_engine,
    scripted_model,
    write_program,
)
from tests.processes import send_signal
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


@pytest.mark.long
async def test_program_with_the_openai_package(tmp_path: Path) -> None:
    require_agent("openai-sdk")
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("openai-sdk", script=write_program(tmp_path, OPENAI, prefix=""))
        async with (
            ModelServer(scripted_model("hm", "42")) as server,
            scripted_engine(server, env, tmp_path) as engine,
        ):
            (rollout,) = await run_rollouts(engine, [{"prompt": "6 * 7?", "answer": 42}])
    assert_trainable(rollout, 2)
    assert rollout.reward == 1.0, rollout.info


@pytest.mark.long
async def test_killed_gateway_shard_costs_an_agent_only_a_retry(tmp_path: Path) -> None:
    require_agent("openai-sdk")
    text = OPENAI.replace("OpenAI()", "OpenAI(max_retries=20)")
    release = asyncio.Event()
    reply = scripted_model("hm", "42")

    def reply_after_release(request: Request) -> Answer:
        answer = reply(request)
        if len(request.body["messages"]) > 1:
            answer.hold = release
        return answer

    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("openai-sdk", script=write_program(tmp_path, text, prefix=""))
        async with ModelServer(reply_after_release) as server, scripted_engine(server, env, tmp_path) as engine:
            running = asyncio.create_task(run_rollouts(engine, [{"prompt": "6 * 7?", "answer": 42}]))
            await asyncio.wait_for(server.wait_for_requests(2), 60)
            gateway = engine.supervisor.gateway
            assert gateway is not None
            send_signal(gateway.pids(), signal.SIGKILL)
            release.set()
            (rollout,) = await running
    assert_trainable(rollout, 2)
    assert rollout.reward == 1.0, rollout.info
    assert len(rollout.attempts) == 1


ANTHROPIC = """
import os, sys
from anthropic import Anthropic

client = Anthropic()
messages = [{"role": "user", "content": sys.argv[1]}]
for question in ("go on", "and?"):
    with client.messages.stream(model=os.environ["MODEL"], max_tokens=64, messages=messages) as stream:
        reply = "".join(stream.text_stream)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
print(reply)
"""


@pytest.mark.long
async def test_program_that_streams_with_the_anthropic_package(tmp_path: Path) -> None:
    require_agent("anthropic-sdk")
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("anthropic-sdk", script=write_program(tmp_path, ANTHROPIC, prefix=""))
        async with (
            ModelServer(scripted_model("hm", "42")) as server,
            scripted_engine(server, env, tmp_path) as engine,
        ):
            (rollout,) = await run_rollouts(engine, [{"prompt": "6 * 7?", "answer": 42}])
    assert_trainable(rollout, 2)
    assert rollout.reward == 1.0, rollout.info


@pytest.mark.long
async def test_openai_agents_calls_a_tool(tmp_path: Path) -> None:
    require_agent("openai-agents")
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("openai-agents")
        steps = scripted_model(("shell", {"command": "echo $((6 * 7)) > answer.txt"}), "it is done")
        async with ModelServer(steps) as server, scripted_engine(server, env, tmp_path) as engine:
            (rollout,) = await run_rollouts(engine, [{"prompt": "6 * 7?", "answer": 42}])
    assert_trainable(rollout, 2)
    assert rollout.reward == 1.0, rollout.info
    assert rollout.metrics["answer_file"] == 1.0


@pytest.mark.long
async def test_mini_swe_agent_writes_a_program_that_is_graded_by_its_tests(tmp_path: Path) -> None:
    require_agent("mini-swe-agent")
    row = {
        "prompt": "Write `double(x)`.",
        "tests": "def check(candidate):\n    assert candidate(4) == 8\n",
        "entry_point": "double",
    }
    steps = scripted_model(
        ("bash", {"command": "printf 'def double(x):\\n    return 2 * x\\n' > solution.py"}),
        ("bash", {"command": "cat solution.py"}),
        ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    )
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("mini-swe-agent")
        async with ModelServer(steps) as server, scripted_engine(server, env, tmp_path) as engine:
            (rollout,) = await run_rollouts(engine, [row])
    assert_trainable(rollout, 3)
    assert rollout.reward == 1.0, rollout.info
    (agent,) = rollout.info["agents"]
    assert "Submitted" in agent["files"]["/tmp/rookery-agent/trajectory.json"]
