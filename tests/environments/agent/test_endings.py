"""However an agent ends, and whatever it tries, the failure stays where it happened."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from rookery.core import Limits, Truncated, label
from rookery.engine.retry import RetryPolicy
from rookery.environments import Context
from rookery.environments.agent import AgentEnvironment
from rookery.sandboxes.protocol import Command
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent import agent_envs
from tests.environments.agent.kit import all_of, left_behind, program, scripted, scripted_engine
from tests.servers import Answer, ModelServer, Request

__all__ = ["local_sandboxes"]
pytestmark = pytest.mark.usefixtures("local_sandboxes")

ROW = {"prompt": "6 * 7?", "answer": 42}
STUBBORN = """
import signal
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
if os.fork():
    pass
while True:
    try:
        messages.append(ask(messages))
        messages.append({"role": "user", "content": "go on"})
        print(42, flush=True)
    except urllib.error.HTTPError as error:
        if error.code < 400:
            raise
        time.sleep(0.01)
"""


@pytest.mark.parametrize(("code", "reward"), [(3, 1.0), (0, 1.0)])
async def test_an_exit_code_is_the_policys_and_is_scored(code: int, reward: float, tmp_path: Path) -> None:
    text = f"ask(messages)\nprint(42)\nsys.exit({code})"
    env = AgentEnvironment("program", script=program(tmp_path, text))
    async with ModelServer(scripted("ok")) as server, scripted_engine(server, env, tmp_path) as made:
        (found,) = await all_of(made, [ROW])
    assert label(found.outcome) == "completed", found.outcome
    assert found.reward == reward
    assert found.info["agents"][0]["exit_code"] == code
    assert found.metrics["agent/ended_well"] == float(code == 0)
    assert len(found.attempts) == 1


async def test_an_agent_that_does_not_end_is_ended_at_its_deadline_and_scored(tmp_path: Path) -> None:
    text = "ask(messages)\nprint(42, flush=True)\nwhile True: time.sleep(60)"
    env = AgentEnvironment("program", script=program(tmp_path, text), timeout=1.5)
    async with ModelServer(scripted("ok")) as server, scripted_engine(server, env, tmp_path) as made:
        (found,) = await all_of(made, [ROW])
    assert label(found.outcome) == "truncated.time", found.outcome
    assert (found.reward, found.usage.turns) == (1.0, 1)
    assert found.info["agents"][0]["why"] == "deadline"
    assert sum(segment.trained for segment in found.segments) == 3


async def test_an_agents_deadline_at_a_hung_model_server_is_infra(tmp_path: Path) -> None:
    env = AgentEnvironment("program", script=program(tmp_path, "ask(messages)"), timeout=3.0)
    never = asyncio.Event()
    retry = RetryPolicy(attempts=1)
    async with (
        ModelServer(Answer("late", hold=never)) as server,
        scripted_engine(server, env, tmp_path, limits=Limits(run=60.0), retry=retry, breaker=None) as made,
    ):
        (found,) = await all_of(made, [ROW])
    assert label(found.outcome) == "upstream.hung", found.outcome
    assert found.reward is None
    (seen,) = found.attempts[0].evidence["upstream"]
    assert (seen["verdict"], seen["report"]["health"]) == ("hung", "ok")


class ClockStartsAtMarker(AgentEnvironment):
    """Stops the run clock until the agent has created the file /tmp/marker in its sandbox."""

    async def run(self, ctx: Context) -> None:
        with contextlib.ExitStack() as stopped:
            stopped.enter_context(ctx.pause_clock())
            starting = asyncio.create_task(self._start_clock(ctx, stopped))
            try:
                await super().run(ctx)
            finally:
                starting.cancel()

    async def _start_clock(self, ctx: Context, stopped: contextlib.ExitStack) -> None:
        sandbox = await ctx.sandbox()
        while not (await sandbox.exec(Command(argv=("test", "-e", "/tmp/marker")))).ok:
            pass
        stopped.close()


async def test_agent_is_stopped_shortly_before_the_run_deadline_and_scored(tmp_path: Path) -> None:
    text = "ask(messages)\nprint(42, flush=True)\nopen('/tmp/marker', 'w').close()\nwhile True: time.sleep(60)"
    env = ClockStartsAtMarker("program", script=program(tmp_path, text))
    async with (
        ModelServer(scripted("ok")) as server,
        scripted_engine(server, env, tmp_path, limits=Limits(run=2.0)) as made,
    ):
        (found,) = await all_of(made, [ROW])
    assert label(found.outcome) == "truncated.time", found.outcome
    assert (found.reward, found.usage.turns) == (1.0, 1)


async def test_an_agent_that_ignores_its_budget_is_ended(tmp_path: Path) -> None:
    env = AgentEnvironment("program", script=program(tmp_path, STUBBORN), grace=0.2)
    async with (
        ModelServer(scripted("ok")) as server,
        scripted_engine(server, env, tmp_path, limits=Limits(turns=2)) as made,
    ):
        (found,) = await all_of(made, [ROW])
        asked = len(server.requests)
    assert label(found.outcome) == "truncated.turns", found.outcome
    assert (found.reward, found.usage.turns, asked) == (1.0, 2, 2)
    assert found.info["agents"][0]["killed"]


async def test_what_an_agent_left_running_is_refused_once_it_ended(tmp_path: Path) -> None:
    env = agent_envs.Watching("program", script=program(tmp_path, left_behind(0.5)))
    async with ModelServer(scripted("ok")) as server, scripted_engine(server, env, tmp_path) as made:
        (found,) = await all_of(made, [ROW])
    assert label(found.outcome) == "completed", found.outcome
    said = found.info["answers"]
    assert said[-1] in ("410", "401", "403", "404", "0"), said
    assert found.usage.turns == 1 + said.count("200"), "what was answered in time is its own, and nothing else"
    assert sum(segment.trained for segment in found.segments) == found.usage.sampled_tokens


ATTACK = """
import itertools
door = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
ask(messages)
said = {}
others = ["0.0.1", "1.0.1", "0.0.2", "x"]
paths = ["/admin", "/metrics", "/rollouts", "/pause", "/resume", "/v1/rollouts"]
for other in others:
    paths += [f"/rollouts/{other}", f"/rollouts/{other}/trajectory", f"/rollouts/{other}/cancel"]
    paths += [f"/v1/rollouts/{other}/v1/chat/completions", f"/v1/rollouts/{other}/chat/completions"]
body = json.dumps({"model": "policy", "messages": messages}).encode()
for path, method in itertools.product(paths, ["GET", "POST", "DELETE"]):
    for key in ("rookery", "", "admin"):
        headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
        request = urllib.request.Request(door + path, body if method == "POST" else None, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                said[f"{method} {path} {key}"] = answer.status
        except urllib.error.HTTPError as error:
            assert error.code < 500, (path, error.code)
print(json.dumps(said))
print(42)
"""


async def test_an_agent_that_attacks_the_gateway_or_another_session_gets_nowhere(tmp_path: Path) -> None:
    """While the other's session is there."""
    env = AgentEnvironment("program", script=program(tmp_path, ATTACK))
    both = asyncio.Event()
    play = scripted("ok")

    def held(request: Request) -> Answer:
        answer = play(request)
        answer.hold = both
        return answer

    async with ModelServer(held) as server, scripted_engine(server, env, tmp_path) as made:
        taking = asyncio.create_task(all_of(made, [ROW, ROW]))
        await asyncio.wait_for(server.wait_for_requests(2), 60)
        both.set()
        found = await taking
    for one in found:
        assert label(one.outcome) == "completed", (one.outcome, one.info)
        reached = json.loads(one.info["agents"][0]["stdout"].splitlines()[0])
        own = f"POST /v1/rollouts/{one.attempts[0].id}/"
        assert [path for path in reached if not path.startswith(own)] == []
        assert (one.reward, one.usage.turns) == (1.0, 1 + len(reached)), "all that it reached is its own"


async def test_a_sandbox_that_is_lost_under_its_agent_is_infra_and_the_policys_when_repeated(
    tmp_path: Path,
) -> None:
    text = "ask(messages)\nwhile True: time.sleep(60)"
    env = agent_envs.Known("program", script=program(tmp_path, text))
    agent_envs.SANDBOX_PIDS.clear()
    async with ModelServer(scripted("ok")) as server, scripted_engine(server, env, tmp_path) as made:
        taking = asyncio.create_task(all_of(made, [ROW]))
        for attempt in (1, 2):
            await asyncio.wait_for(server.wait_for_requests(attempt), 60)
            os.kill(agent_envs.SANDBOX_PIDS[-1], signal.SIGKILL)
        (found,) = await taking
    assert found.outcome == Truncated("lost"), (found.outcome, found.attempts)
    assert [label(attempt.outcome) for attempt in found.attempts] == ["sandbox.lost", "sandbox.lost"]
    assert found.reward == 0.0
    assert found.segments, "what it sampled on the way trains"


async def test_cancelling_a_run_ends_its_agents(tmp_path: Path) -> None:
    text = "ask(messages)\nwhile True: time.sleep(60)"
    env = agent_envs.Known("program", script=program(tmp_path, text))
    agent_envs.SANDBOX_PIDS.clear()
    async with ModelServer(scripted("ok")) as server:
        async with scripted_engine(server, env, tmp_path) as made:
            taking = asyncio.create_task(all_of(made, [ROW, ROW]))
            await asyncio.wait_for(server.wait_for_requests(2), 60)
            taking.cancel()
            await asyncio.wait({taking})
        assert len(agent_envs.SANDBOX_PIDS) == 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in agent_envs.SANDBOX_PIDS)
