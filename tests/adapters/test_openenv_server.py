"""Environments served as OpenEnv, and OpenEnv servers as environments: both ends, without the package openenv."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from rookery import Context, environment
from rookery.adapters.openenv_server import OpenEnvServer, _Handler, _HttpSession
from rookery.adapters.rollout_service import RolloutService
from rookery.adapters.stepped_rollout import SteppedRollout
from rookery.core import Completed, Failed, SandboxError, UsageError
from rookery.environments import load_environment, make_reference
from tests.adapters.foreign_kit import run_environment
from tests.adapters.service_kit import make_config, serving_config
from tests.servers import Answer, ModelServer


@environment(tasks=[{"id": "add", "prompt": "2+3", "answer": "5"}, {"id": "lose", "prompt": "lost", "answer": ""}])
async def sums(ctx: Context) -> float:
    first = await ctx.policy.chat(ctx.task.prompt)
    if ctx.task.id == "lose":
        raise SandboxError("the sandbox is gone")
    again = [*ctx.task.prompt, first.message, {"role": "user", "content": "Are you sure?"}]
    return (await ctx.policy.chat(again)).text.count(ctx.task.data["answer"]) / 2


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    config = msgspec.structs.replace(make_config(""), environment=f"{__name__}:sums", concurrency=2)
    async with serving_config(OpenEnvServer(), tmp_path / "runs", config) as (_, url):
        yield url


async def ask(socket: aiohttp.ClientWebSocketResponse, kind: str, **data: Any) -> dict[str, Any]:
    await socket.send_json({"type": kind, "data": data})
    return dict(await socket.receive_json(timeout=60))


async def test_a_session_runs_rollouts_and_reports_failures_as_errors(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.ws_connect(f"{url}/ws") as socket:
            first = (await ask(socket, "reset", task="add"))["data"]
            assert first["observation"]["messages"] == [{"role": "user", "content": "2+3"}]
            second = (await ask(socket, "step", message="4"))["data"]
            assert (second["reward"], second["done"]) == (None, False)
            last = (await ask(socket, "step", message="5"))["data"]
            assert (last["reward"], last["done"]) == (0.5, True)
            assert (await ask(socket, "state"))["data"] == {"episode_id": "add", "step_count": 2}
            await ask(socket, "reset", task="lose")
            for kind, data, code in (
                ("step", {"massage": "5"}, "VALIDATION_ERROR"),
                ("step", {"message": "5"}, "EXECUTION_ERROR"),
                ("reset", {"task": "none"}, "EXECUTION_ERROR"),
                ("dance", {}, "UNKNOWN_TYPE"),
            ):
                refused = await ask(socket, kind, **data)
                assert (refused["type"], refused["data"]["code"]) == ("error", code)
            async with http.ws_connect(f"{url}/ws"), http.ws_connect(f"{url}/ws") as third:
                assert (await third.receive_json(timeout=60))["data"]["code"] == "CAPACITY_REACHED"
        async with asyncio.timeout(60):  # a closed connection frees its session
            while True:
                async with http.ws_connect(f"{url}/ws") as socket:
                    if (await ask(socket, "reset", task="add"))["type"] == "observation":
                        break
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await http.ws_connect(f"{url}/ws", headers={"origin": "http://example.org"})


async def test_clients_without_a_connection_name_their_episode(url: str) -> None:
    async with aiohttp.ClientSession() as http:

        async def post(path: str, status: int = 200, **body: Any) -> Any:
            async with http.post(f"{url}{path}", json=body) as response:
                assert response.status == status, await response.text()
                return await response.json()

        first = await post("/reset", episode_id="e", split="train", index=0)
        assert first["observation"]["messages"] == [{"role": "user", "content": "2+3"}]
        assert (first["done"], first["metadata"]) == (False, {"task": "add", "episode_id": "e"})
        other = (await post("/reset", task="add"))["metadata"]["episode_id"]
        await post("/reset", status=503)  # two sessions are open
        await post("/step", status=422, episode_id="e", action={"massage": "5"})
        await post("/step", status=400, action={"message": "5"})  # which of the two?
        await post("/step", episode_id="e", action={"message": "4"})
        async with http.get(f"{url}/state", params={"episode_id": "e"}) as response:
            assert await response.json() == {"episode_id": "add", "step_count": 1}
        last = await post("/step", episode_id="e", action={"message": "5"})
        assert (last["reward"], last["done"]) == (0.5, True)
        await post("/step", status=400, episode_id="e", action={"message": "5"})  # its rollout has ended
        await post("/step", episode_id=other, action={"message": "5"})
        await post("/reset", status=400, index=7)
        lost = (await post("/reset", index=1))["metadata"]["episode_id"]
        await post("/step", status=500, episode_id=lost, action={"message": "5"})
        async with http.post(f"{url}/reset", json={}, headers={"origin": "http://example.org"}) as response:
            assert response.status == 403


async def test_cancelled_waiting_request_leaves_the_episode_open_and_closing_sessions_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()
    close = SteppedRollout.aclose

    async def close_later(rollout: SteppedRollout) -> None:
        closing.set()
        await may_close.wait()
        await close(rollout)

    monkeypatch.setattr(SteppedRollout, "aclose", close_later)
    config = msgspec.structs.replace(make_config(""), environment=f"{__name__}:sums", concurrency=1)
    async with RolloutService(config, out=tmp_path / "runs") as service, asyncio.timeout(60):
        handler = _Handler(service)
        session = handler.episodes["e"] = _HttpSession(handler.open_rollout(), handler._tasks)
        await handler.answer("e", session, "reset", {"task": "add"})
        async with session.lock:
            waiting = asyncio.create_task(handler.answer("e", session, "step", {"message": "4"}))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert handler.episodes == {"e": session}
        handler.end_episode("e")
        await closing.wait()
        with pytest.raises(web.HTTPBadRequest):
            await handler.answer("e", session, "reset", {"task": "add"})
        waiting = asyncio.create_task(handler.can_open_session())
        await asyncio.sleep(0)
        assert not waiting.done()
        may_close.set()
        assert await waiting


async def test_the_task_api_lists_tasks_without_their_answers(url: str) -> None:
    async with aiohttp.ClientSession(url) as http:

        async def post(path: str, status: int = 200, **body: Any) -> Any:
            async with http.post(path, json={"split": "train", **body}) as response:
                assert response.status == status
                return await response.json()

        async with http.get("/list_environments") as response:
            assert await response.json() == ["sums"]
        async with http.get("/sums/splits") as response:
            assert [split["name"] for split in await response.json()] == ["train"]
        add, lose = (await post("/Sums/tasks"))["tasks"]
        assert add == {"id": "add", "index": 0, "prompt": "2+3"}
        assert (await post("/sums/num_tasks"))["num_tasks"] == 2
        assert (await post("/sums/task", index=1))["task"] == lose
        assert (await post("/sums/task_range", start=1))["tasks"] == [lose]
        await post("/sums/task", status=400, index=2)
        await post("/sums/tasks", status=400, split="test")
        await post("/other/tasks", status=404)


async def test_the_client_environment_gets_the_rewards_of_the_server(url: str, tmp_path: Path) -> None:
    env = load_environment(f"openenv:{url}", resets=[{"task": "add"}, {"task": "lose"}])
    script = ['{"message": "4"}', "no JSON", '{"message": "5 5"}', '{"message": "?"}']
    async with ModelServer("unused") as server:
        server.then(*map(Answer, script))
        rollouts = await run_environment(env, server, tmp_path, concurrency=1)
    (added,), (lost,) = rollouts["reset-0"], rollouts["reset-1"]
    assert (added.outcome, added.reward, added.metrics["steps"]) == (Completed(), 1.0, 2.0)
    assert isinstance(lost.outcome, Failed)
    assert lost.outcome.cause == "bug.environment"


async def test_a_server_that_does_not_answer_is_a_fault_of_the_infrastructure(tmp_path: Path) -> None:
    env = load_environment("openenv:http://127.0.0.1:9")
    async with ModelServer("unused") as server:
        ((rollout,),) = (await run_environment(env, server, tmp_path)).values()
    assert isinstance(rollout.outcome, Failed)
    assert (rollout.outcome.fault, rollout.outcome.cause) == ("infra", "tool.unreachable")


def test_a_reference_with_a_prefix_can_be_loaded_by_runners() -> None:
    env = load_environment("openenv:http://localhost:8000", max_steps=3)
    again = load_environment(make_reference(env))
    assert (again.title, again.max_steps) == ("openenv:http://localhost:8000", 3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("openenv:localhost", {}),
        ("openenv:http://x", {"reward": "mean"}),
        ("openenv:http://x", {"max_steps": 0}),
        ("openenv:http://x", {"reward_range": [1]}),
    ],
)
def test_wrong_arguments_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load_environment(name, **arguments)
