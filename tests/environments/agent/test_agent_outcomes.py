"""Outcomes of agents, and what agents can and cannot do to other sessions."""

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
from tests.environments.agent.helpers import (
    SANDBOX_PIDS,
    RecordsSandboxPids,
    WaitsForRefusal,
    make_leftover_program,
    run_rollouts,
    scripted_engine,
    scripted_model,
    write_program,
)
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


class StartsClockAtMarker(AgentEnvironment):
    """Stops the clock of the run stage until the agent has created the file /tmp/marker in its sandbox."""

    async def run(self, ctx: Context) -> None:
        open_session = ctx.gateway_session
        # The deadline of a timed session does not move while the clock is stopped.
        ctx.gateway_session = lambda sandbox, **_: open_session(sandbox, timed=False)  # type: ignore[method-assign, misc]
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


@pytest.mark.long
@pytest.mark.parametrize(("code", "reward"), [(3, 1.0), (0, 1.0)])
async def test_agent_is_scored_whatever_its_exit_code(code: int, reward: float, tmp_path: Path) -> None:
    text = f"ask(messages)\nprint(42)\nsys.exit({code})"
    env = AgentEnvironment("program", script=write_program(tmp_path, text))
    async with ModelServer(scripted_model("ok")) as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [ROW])
    assert label(rollout.outcome) == "completed", rollout.outcome
    assert rollout.reward == reward
    assert rollout.info["agents"][0]["exit_code"] == code
    assert rollout.metrics["agent/exited_zero"] == float(code == 0)
    assert len(rollout.attempts) == 1


@pytest.mark.long
async def test_agent_is_killed_at_its_deadline_and_scored(tmp_path: Path) -> None:
    text = "ask(messages)\nprint(42, flush=True)\nopen('/tmp/marker', 'w').close()\nwhile True: time.sleep(60)"
    env = StartsClockAtMarker("program", script=write_program(tmp_path, text), timeout=1.5)
    async with ModelServer(scripted_model("ok")) as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [ROW])
    assert label(rollout.outcome) == "truncated.time", rollout.outcome
    assert (rollout.reward, rollout.usage.turns) == (1.0, 1)
    assert rollout.info["agents"][0]["reason"] == "deadline"
    assert sum(segment.trained for segment in rollout.segments) == 3


@pytest.mark.long
async def test_deadline_during_a_hung_model_call_is_infra(tmp_path: Path) -> None:
    text = "open('/tmp/marker', 'w').close()\nask(messages)"
    env = StartsClockAtMarker("program", script=write_program(tmp_path, text), timeout=10.0)
    never_set = asyncio.Event()
    retry = RetryPolicy(attempts=1)
    async with (
        ModelServer(Answer("late", hold=never_set)) as server,
        scripted_engine(server, env, tmp_path, limits=Limits(run=60.0), retry=retry, breaker=None) as engine,
    ):
        (rollout,) = await run_rollouts(engine, [ROW])
    assert label(rollout.outcome) == "upstream.hung", rollout.outcome
    assert rollout.reward is None
    (seen,) = rollout.attempts[0].evidence["upstream"]
    assert (seen["verdict"], seen["report"]["health"]) == ("hung", "ok")


@pytest.mark.long
async def test_agent_is_killed_shortly_before_the_deadline_of_the_run_stage(tmp_path: Path) -> None:
    text = "ask(messages)\nprint(42, flush=True)\nopen('/tmp/marker', 'w').close()\nwhile True: time.sleep(60)"
    env = StartsClockAtMarker("program", script=write_program(tmp_path, text))
    async with (
        ModelServer(scripted_model("ok")) as server,
        scripted_engine(server, env, tmp_path, limits=Limits(run=2.0)) as engine,
    ):
        (rollout,) = await run_rollouts(engine, [ROW])
    assert label(rollout.outcome) == "truncated.time", rollout.outcome
    assert (rollout.reward, rollout.usage.turns) == (1.0, 1)


@pytest.mark.long
async def test_agent_that_ignores_its_exhausted_budget_is_killed(tmp_path: Path) -> None:
    env = AgentEnvironment("program", script=write_program(tmp_path, STUBBORN), grace=0.2)
    async with (
        ModelServer(scripted_model("ok")) as server,
        scripted_engine(server, env, tmp_path, limits=Limits(turns=2)) as engine,
    ):
        (rollout,) = await run_rollouts(engine, [ROW])
        asked = len(server.requests)
    assert label(rollout.outcome) == "truncated.turns", rollout.outcome
    assert (rollout.reward, rollout.usage.turns, asked) == (1.0, 2, 2)
    assert rollout.info["agents"][0]["killed"]


@pytest.mark.long
async def test_model_calls_of_leftover_processes_are_refused(tmp_path: Path) -> None:
    env = WaitsForRefusal("program", script=write_program(tmp_path, make_leftover_program(0.5)))
    async with ModelServer(scripted_model("ok")) as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [ROW])
    assert label(rollout.outcome) == "completed", rollout.outcome
    statuses = rollout.info["statuses"]
    assert statuses[-1] in ("410", "401", "403", "404", "0"), statuses
    assert rollout.usage.turns == 1 + statuses.count("200"), "only calls answered before the end are recorded"
    assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens


ATTACK = """
import itertools
base = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
ask(messages)
statuses = {}
others = ["0.0.1", "1.0.1", "0.0.2", "x"]
paths = ["/admin", "/metrics", "/rollouts", "/pause", "/resume", "/v1/rollouts"]
for other in others:
    paths += [f"/rollouts/{other}", f"/rollouts/{other}/trajectory", f"/rollouts/{other}/cancel"]
    paths += [f"/v1/rollouts/{other}/v1/chat/completions", f"/v1/rollouts/{other}/chat/completions"]
body = json.dumps({"model": "policy", "messages": messages}).encode()
for path, method in itertools.product(paths, ["GET", "POST", "DELETE"]):
    for key in ("rookery", "", "admin"):
        headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
        request = urllib.request.Request(base + path, body if method == "POST" else None, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                statuses[f"{method} {path} {key}"] = answer.status
        except urllib.error.HTTPError as error:
            assert error.code < 500, (path, error.code)
print(json.dumps(statuses))
print(42)
"""


async def test_agent_cannot_reach_the_admin_api_or_another_session(tmp_path: Path) -> None:
    """Both sessions are open at the same time."""
    env = AgentEnvironment("program", script=write_program(tmp_path, ATTACK))
    both_called = asyncio.Event()
    reply = scripted_model("ok")

    def reply_after_release(request: Request) -> Answer:
        answer = reply(request)
        answer.hold = both_called
        return answer

    async with ModelServer(reply_after_release) as server, scripted_engine(server, env, tmp_path) as engine:
        running = asyncio.create_task(run_rollouts(engine, [ROW, ROW]))
        await asyncio.wait_for(server.wait_for_requests(2), 60)
        both_called.set()
        rollouts = await running
    for rollout in rollouts:
        assert label(rollout.outcome) == "completed", (rollout.outcome, rollout.info)
        reached = json.loads(rollout.info["agents"][0]["stdout"].splitlines()[0])
        own = f"POST /v1/rollouts/{rollout.attempts[0].id}/"
        assert [path for path in reached if not path.startswith(own)] == []
        assert (rollout.reward, rollout.usage.turns) == (1.0, 1 + len(reached)), "it reached its own session only"


async def test_lost_sandbox_is_infra_once_and_truncated_when_repeated(
    tmp_path: Path,
) -> None:
    text = "ask(messages)\nwhile True: time.sleep(60)"
    env = RecordsSandboxPids("program", script=write_program(tmp_path, text))
    SANDBOX_PIDS.clear()
    async with ModelServer(scripted_model("ok")) as server, scripted_engine(server, env, tmp_path) as engine:
        running = asyncio.create_task(run_rollouts(engine, [ROW]))
        for attempt in (1, 2):
            await asyncio.wait_for(server.wait_for_requests(attempt), 60)
            os.kill(SANDBOX_PIDS[-1], signal.SIGKILL)
        (rollout,) = await running
    assert rollout.outcome == Truncated("lost"), (rollout.outcome, rollout.attempts)
    assert [label(attempt.outcome) for attempt in rollout.attempts] == ["sandbox.lost", "sandbox.lost"]
    assert rollout.reward == 0.0
    assert rollout.segments, "its sampled tokens are trained"


async def test_cancelling_a_run_kills_its_agents(tmp_path: Path) -> None:
    text = "ask(messages)\nwhile True: time.sleep(60)"
    env = RecordsSandboxPids("program", script=write_program(tmp_path, text))
    SANDBOX_PIDS.clear()
    async with ModelServer(scripted_model("ok")) as server:
        async with scripted_engine(server, env, tmp_path) as engine:
            running = asyncio.create_task(run_rollouts(engine, [ROW, ROW]))
            await asyncio.wait_for(server.wait_for_requests(2), 60)
            running.cancel()
            await asyncio.wait({running})
        assert len(SANDBOX_PIDS) == 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in SANDBOX_PIDS)
