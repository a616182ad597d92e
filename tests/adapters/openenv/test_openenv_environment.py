"""`openenv:URL` with the sample environment of openenv's template, and openenv's client with Rookery's server."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.adapters.openenv_server import OpenEnvServer
from rookery.core import Completed
from rookery.environments import load_environment
from tests.adapters.foreign_kit import run_environment
from tests.adapters.service_kit import make_config, serving_config
from tests.servers import Answer, ModelServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.needs("openenv"), pytest.mark.timeout(600)]  # several processes of the peer start

ACTIONS = [{"message": "hello"}, {"message": "a longer message"}, {"message": "hi"}]
NAMES = {"__ENV_NAME__": "echo", "__ENV_CLASS_NAME__": "Echo", "__ENV_TITLE_NAME__": "Echo"}


@asynccontextmanager
async def serve(app: Any) -> AsyncIterator[str]:
    """Serve an application of FastAPI, as openenv's own servers are."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    try:
        await wait_until(lambda: server.started, 300)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
async def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The environment that `openenv init echo` writes, served."""
    import openenv
    from openenv.core.env_server.http_server import create_fastapi_app

    template = Path(openenv.__file__).parent / "cli/templates/openenv_env"
    files = {"models.py": "models.py", "server/echo_environment.py": "server/__ENV_NAME___environment.py"}
    (tmp_path / "echo/server").mkdir(parents=True)
    for package in ("echo/__init__.py", "echo/server/__init__.py"):
        (tmp_path / package).touch()
    for name, original in files.items():
        text = (template / original).read_text()
        for placeholder, value in NAMES.items():
            text = text.replace(placeholder, value)
        (tmp_path / "echo" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    models = importlib.import_module("echo.models")
    module = importlib.import_module("echo.server.echo_environment")
    app = create_fastapi_app(
        module.EchoEnvironment, models.EchoAction, models.EchoObservation, max_concurrent_envs=8
    )
    async with serve(app) as url:
        yield url
    for name in [name for name in sys.modules if name.partition(".")[0] == "echo"]:
        del sys.modules[name]


async def test_rewards_equal_those_of_openenvs_own_client(url: str, tmp_path: Path) -> None:
    from openenv import GenericEnvClient

    async with GenericEnvClient(base_url=url) as client:
        await client.reset()
        own = [(await client.step(action)).reward for action in ACTIONS]
    env = load_environment(f"openenv:{url}", max_steps=3, reward_range=[0, 3])
    async with ModelServer("unused") as server:
        invalid = Answer('{"massage": "x"}')  # the server's schema refuses it, and the policy reads why
        server.then(Answer("hello"), invalid, *(Answer(msgspec.json.encode(one).decode()) for one in ACTIONS[1:]))
        ((rollout,),) = (await run_environment(env, server, tmp_path)).values()
    assert (rollout.outcome, rollout.reward, rollout.usage.turns) == (Completed(), sum(own), 4)
    assert own == [0.5, 1.0, 0.2]


async def test_tools_of_an_mcp_environment_are_tools_of_the_policy(tmp_path: Path) -> None:
    from fastmcp import FastMCP
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation, State
    from openenv.core.mcp_client import MCPToolClient

    class Adder(MCPEnvironment):  # type: ignore[misc]  # without type hints
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server: Any = FastMCP("adder")

            @server.tool
            def add(a: int, b: int) -> int:
                """Adds two numbers."""
                return a + b

            super().__init__(server)

        def reset(self, **_: Any) -> Any:
            return Observation(done=False, reward=0.0)

        async def step_async(self, action: Any, **more: Any) -> Any:
            found = await super().step_async(action, **more)
            if isinstance(action, CallToolAction):
                found.reward = float(found.error is None)
                found.done = action.arguments.get("a") == 3
            return found

        def _step_impl(self, action: Any, **_: Any) -> Any:
            raise NotImplementedError

        @property
        def state(self) -> Any:
            return State()

    app = create_fastapi_app(Adder, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    async with serve(app) as url:
        async with MCPToolClient(base_url=url) as client:
            await client.reset()
            own = [tool.name for tool in await client.list_tools()]
            assert await client.call_tool("add", a=1, b=2) == 3
        env = load_environment(f"openenv:{url}", reward_range=[0, 3])
        calls = [("add", '{"a": 1, "b": 2}'), ("add", "no JSON"), ("add", '{"a": 3, "b": 4}')]
        async with ModelServer("unused") as server:
            server.then(*(Answer(None, calls=[one], finish="tool_calls") for one in calls))
            ((rollout,),) = (await run_environment(env, server, tmp_path)).values()
            tools = server.requests[0].body["tools"]
            results = [one["content"] for one in server.requests[-1].body["messages"] if one["role"] == "tool"]
    assert [tool["function"]["name"] for tool in tools] == own == ["add"]
    assert set(tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    assert (rollout.outcome, rollout.reward, rollout.metrics["steps"]) == (Completed(), 2.0, 2.0)
    assert "3" in results[0]


async def test_answers_over_http_are_valid_for_openenvs_types(tmp_path: Path) -> None:
    import httpx
    from openenv.core.env_server.types import ResetResponse, State, StepResponse

    config = msgspec.structs.replace(make_config(""), environment="arithmetic", concurrency=4)
    async with (
        serving_config(OpenEnvServer(), tmp_path / "runs", config) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        (name,) = (await client.get("/list_environments")).json()
        (split,) = (await client.get(f"/{name}/splits")).json()
        task = (await client.post(f"/{name}/task", json={"split": split["name"], "index": 3})).json()["task"]
        reset = ResetResponse(**(await client.post("/reset", json={"split": split["name"], "index": 3})).json())
        assert reset.observation["messages"][-1]["content"] == task["prompt"]
        assert State(**(await client.get("/state")).json()).episode_id == task["id"]
        step = StepResponse(**(await client.post("/step", json={"action": {"message": "?"}})).json())
        assert (step.done, step.reward) == (True, 0.0)


async def test_openenvs_client_runs_a_served_environment(tmp_path: Path) -> None:
    from openenv import GenericEnvClient

    config = msgspec.structs.replace(make_config(""), environment="arithmetic", concurrency=4)
    async with serving_config(OpenEnvServer(), tmp_path / "runs", config) as (service, url):
        task = next(iter(service.environment.tasks()))
        found = task if isinstance(task, dict) else msgspec.to_builtins(task)
        async with GenericEnvClient(base_url=url) as client:
            first = await client.reset(task=found["id"])
            assert (first.done, first.reward) == (False, None)
            assert first.observation["messages"]
            result = await client.step({"message": "I do not know."})
            assert (result.done, result.reward) == (True, 0.0)
            state = await client.state()
        assert state == {"episode_id": found["id"], "step_count": 1}
