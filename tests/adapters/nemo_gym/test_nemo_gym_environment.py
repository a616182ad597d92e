"""`nemo-gym:URL` with a resources server of NeMo Gym: the rewards of rollouts that NeMo Gym itself recorded."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Completed, Failed
from rookery.environments import load_environment
from rookery.journal import RunReader, find_run
from rookery.journal.export import export
from tests.adapters.foreign_kit import last_user_text, run_environment
from tests.servers import Answer, ModelServer, Request
from tests.waiting import wait_until

pytestmark = [pytest.mark.needs("nemo_gym"), pytest.mark.timeout(600)]  # several processes of the peer start

HOST = "127.0.0.1"


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, Path]]:
    """The server `example_session_state_mgmt`, a counter for each session: its URL and the folder of its data."""
    import resources_servers.example_session_state_mgmt.app as module
    import uvicorn
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    head = BaseServerConfig(host=HOST, port=11000)
    counter = module.StatefulCounterResourcesServer(
        config=module.StatefulCounterResourcesServerConfig(name="counter", host=HOST, port=1, entrypoint="app.py"),
        server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
    )
    web = uvicorn.Server(uvicorn.Config(counter.setup_webserver(), host=HOST, port=0, log_level="error"))
    serving = asyncio.create_task(web.serve())
    try:
        await wait_until(lambda: web.started, 300)
        port = web.servers[0].sockets[0].getsockname()[1]
        yield f"http://{HOST}:{port}", Path(module.__file__).parent / "data"
    finally:
        web.should_exit = True
        await serving


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def get_prompt(row: dict[str, Any]) -> str:
    return str(row["responses_create_params"]["input"][-1]["content"])


class Replay:
    """Gives the replies of a recorded rollout, chosen by its prompt. `skip` leaves out the calls of that tool."""

    def __init__(self, rows: list[dict[str, Any]], skip: str = "") -> None:
        self._outputs = {get_prompt(row): row["response"]["output"] for row in rows}
        self._skip = skip

    def __call__(self, request: Request) -> Answer:
        messages = request.body["messages"]
        items = self._outputs[last_user_text(request.body)]
        turns: list[list[dict[str, Any]]] = [[]]
        for item in items:  # a reply ends where the outputs of its calls begin
            if item["type"] == "function_call_output":
                turns += [[]] if turns[-1] else []
            else:
                turns[-1].append(item)
        turn = turns[sum(message["role"] == "assistant" for message in messages)]
        calls = [(one["name"], one["arguments"]) for one in turn if one["type"] == "function_call"]
        text = "".join(part["text"] for one in turn if one["type"] == "message" for part in one["content"])
        kept = [one for one in calls if one[0] != self._skip]
        if calls and not kept:
            kept = [("get_counter_value", "{}")]
        return Answer(text or None, calls=kept, finish="tool_calls" if kept else "stop")


def check_trajectories(runs: Path) -> None:
    """Check that NeMo Gym's reader of ATIF accepts the export of the only run in `runs`."""
    from nemo_gym.atif_v1_7 import AtifTrajectoryV1_7

    with RunReader(find_run("latest", runs)) as reader:
        export(reader, runs / "atif.jsonl", kind="atif", tokens=True)
    rows = read_rows(runs / "atif.jsonl")
    assert [AtifTrajectoryV1_7.model_validate(row).extra["reward"] for row in rows] == [1.0] * 10


async def test_recorded_rollouts_get_the_rewards_that_nemo_gym_recorded(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    url, folder = server
    recorded = read_rows(folder / "example_rollouts.jsonl")
    expected = {get_prompt(row): row["reward"] for row in recorded}
    env = load_environment(f"nemo-gym:{url}", dataset=str(folder / "example.jsonl"))
    prompts = {task.id: task.text for task in env.tasks()}
    async with ModelServer(Replay(recorded)) as policy:
        rollouts = await run_environment(env, policy, tmp_path, k=2)
    assert len(rollouts) == len(recorded) == 5
    for task, members in rollouts.items():  # each member has a session of its own
        assert [(one.outcome, one.reward) for one in members] == [(Completed(), expected[prompts[task]])] * 2
        assert members[0].usage.turns == 3
    check_trajectories(tmp_path)
    async with ModelServer(Replay(recorded, skip="increment_counter")) as policy:
        rollouts = await run_environment(env, policy, tmp_path)
    assert {one.reward for (one,) in rollouts.values()} == {0.0}


async def test_failures_of_the_server_are_faults(server: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = server
    row = read_rows(folder / "example.jsonl")[0]
    broken = {key: value for key, value in row.items() if key != "initial_count"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(broken)}\n{{}}\n")
    causes = {}
    async with ModelServer("done") as policy:
        for name, where in (("refused", url), ("closed", f"http://{HOST}:9")):
            env = load_environment(f"nemo-gym:{where}", dataset=str(tmp_path / "rows.jsonl"))
            for task, (one,) in (await run_environment(env, policy, tmp_path)).items():
                assert isinstance(one.outcome, Failed)
                causes[name, task] = (one.outcome.fault, one.outcome.cause)
    assert causes == {
        ("refused", "rows-0"): ("task", "task.setup"),
        ("refused", "rows-1"): ("task", "task.invalid"),
        ("closed", "rows-0"): ("infra", "tool.unreachable"),
        ("closed", "rows-1"): ("task", "task.invalid"),
    }
