"""`verifiers:NAME` with the sample environments of verifiers: the same rewards as in verifiers' own run."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Completed, Failed, Truncated, UsageError
from rookery.environments import load_environment
from rookery.upstreams import UpstreamConfig
from tests.adapters.foreign_kit import as_stream, last_user_text, run_environment
from tests.servers import Answer, ModelServer, Request

pytestmark = [pytest.mark.needs("verifiers"), pytest.mark.timeout(600)]  # several processes of the peer start

SAMPLES = next(iter((Path(sys.prefix) / "sources").glob("verifiers-*/tests/v1/fixtures")), Path())
FOLDER = Path(os.environ.get("UV_CACHE_DIR", "")).parent
"""Folder of the test session, so that the programs of verifiers are installed once."""
NULL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(autouse=True)
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sample environments importable, also for tool servers, and keep verifiers' files in `tmp_path`."""
    from verifiers.v1.runtimes import subprocess

    monkeypatch.syspath_prepend(SAMPLES)
    monkeypatch.setenv("PYTHONPATH", str(SAMPLES), prepend=":")
    monkeypatch.setattr(subprocess, "CACHE_DIR", tmp_path / "cache")
    monkeypatch.setattr(subprocess.SubprocessRuntime, "scripts_dir", str(FOLDER / "scripts"))


def reply(request: Request) -> Answer:
    """Repeat the user's phrase, except "ping" and "goodbye"; call a tool once if there is one."""
    messages, tools = request.body["messages"], request.body.get("tools")
    if tools and messages[-1]["role"] != "tool":
        call = (tools[0]["function"]["name"], '{"message": "hello world"}')
        return as_stream(Answer(None, calls=[call], finish="tool_calls"), request)
    text = last_user_text(request.body).rpartition(": ")[2]
    return as_stream(Answer("something else" if text.startswith(("ping", "goodbye")) else text), request)


async def run_verifiers(
    name: str, settings: dict[str, Any], server: ModelServer, folder: Path
) -> dict[str, float]:
    """Return the rewards of verifiers' own evaluation, by the ID that Rookery gives to the task."""
    from verifiers.v1.cli.eval.runner import run_eval
    from verifiers.v1.configs.cli.eval import EvalConfig

    config = EvalConfig(
        env={"taskset": {"id": name, **settings}, "agent": NULL},
        model="test-model",
        client={"base_url": f"{server.url}/v1", "api_key_var": "NONE"},
        num_rollouts=1,
        rich=None,
        push=False,
        output_dir=folder,
        run={"dir": "own"},
    )
    return {
        f"{name}-{episode.task.data.idx}": episode.traces[0].reward
        for episode in await run_eval(config)
        if episode.ok
    }


@pytest.mark.parametrize(
    ("name", "settings", "rewards", "turns"),
    [
        ("echo-v1", {"phrases": ["ping", "verifiers"]}, [0.0, 1.0], 1),
        ("echo-tool-v1", {}, [1.0], 2),
        ("echo-user-sim-v1", {}, [0.5], 2),
    ],
)
async def test_rewards_equal_those_of_verifiers_own_run(
    name: str, settings: dict[str, Any], rewards: list[float], turns: int, tmp_path: Path
) -> None:
    async with ModelServer(reply) as server:
        own = await run_verifiers(name, settings, server, tmp_path)
        calls = len(server.requests)
        env = load_environment(f"verifiers:{name}", harness="null", taskset=settings)
        rollouts = {task: one for task, (one,) in (await run_environment(env, server, tmp_path)).items()}
        assert len(server.requests) == 2 * calls
    assert {task: rollout.reward for task, rollout in rollouts.items()} == own
    assert list(own.values()) == rewards
    for rollout in rollouts.values():
        assert isinstance(rollout.outcome, Completed)
        assert rollout.usage.turns == turns
        assert rollout.rewards == {"echoed": rollout.reward}


async def test_failures_and_limits_become_faults_and_truncations(tmp_path: Path) -> None:
    env = load_environment("verifiers:echo-user-sim-v1", harness="null")
    async with ModelServer(Answer(status=401)) as server:
        ((failed,),) = (await run_environment(env, server, tmp_path)).values()
    assert isinstance(failed.outcome, Failed)
    assert (failed.outcome.fault, failed.outcome.cause) == ("infra", "upstream.auth")
    async with ModelServer(reply) as server:
        ((cut,),) = (await run_environment(env, server, tmp_path, limits={"turns": 1})).values()
    assert (cut.outcome, cut.reward) == (Truncated("turns"), 0.0)


async def test_a_role_that_is_not_trained_needs_a_model_of_its_own(tmp_path: Path) -> None:
    async with ModelServer(reply) as server, ModelServer("hello world") as other:
        env = load_environment("verifiers:duet-v1", runtime="subprocess", taskset={"phrases": ["hello world"]})
        ((refused,),) = (await run_environment(env, server, tmp_path)).values()
        assert isinstance(refused.outcome, Failed)
        assert refused.outcome.cause == "bug.environment"
        config: dict[str, Any] = {"b": {"model": "judge"}}
        env = load_environment("verifiers:duet-v1", taskset={"phrases": ["hello world"]}, config=config)
        assert env.roles == ("judge",)
        roles = {"judge": UpstreamConfig(urls=(f"{other.url}/v1",), model="test-model")}
        ((rollout,),) = (await run_environment(env, server, tmp_path, roles=roles)).values()
        assert len(other.requests) == 1
    assert (rollout.reward, rollout.usage.turns, rollout.metrics["duet"]) == (1.0, 1, 1.0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("verifiers:no-such-package", {"harness": "null"}),
        ("verifiers:echo-v1", {}),  # its harness executes commands, and no runtime is chosen
        ("verifiers:echo-v1", {"harness": "no-such-harness"}),
        ("verifiers:echo-v1", {"harness": "null", "taskset": {"phrase": []}}),
        ("verifiers:echo-v1", {"harness": "null", "reward_range": 1}),
    ],
)
def test_wrong_references_and_arguments_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load_environment(name, **arguments)
