"""The agent server of `--protocol nemo-gym`, driven by NeMo Gym's own rollout collection, which NeMo RL uses."""

import json
from pathlib import Path
from typing import Any

import pytest

from rookery.adapters.nemo_gym import NemoGymServer, check_contiguous
from rookery.core import SandboxSpec, Task
from rookery.engine import EngineConfig, RetryPolicy
from rookery.environments import load_environment
from rookery.tasks import tasks_from
from rookery.upstreams import UpstreamConfig
from tests.adapters.service_kit import get_tasks, make_config, make_policy, serving_config

pytestmark = [pytest.mark.needs("nemo_gym"), pytest.mark.timeout(300)]


async def collect(
    tasks: list[Task], config: EngineConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Run the rows of the generated package with Gym's collection code.

    Return the results by task, and the response of `/aggregate_metrics` to the results with a reward.
    """
    from nemo_gym import server_utils
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
    from nemo_gym.rollout_collection import RolloutCollectionHelper
    from omegaconf import OmegaConf

    monkeypatch.setattr(server_utils, "_GLOBAL_AIOHTTP_CLIENT", None)
    settings = server_utils.GlobalAIOHTTPAsyncClientConfig()
    async with (
        serving_config(NemoGymServer(), folder / "runs", config) as (_, url),
        server_utils.set_global_aiohttp_client(settings),
    ):
        NemoGymServer.write_package(tasks, folder, "the environment", url)
        paths = OmegaConf.create({"config_paths": [str(folder / "rookery.yaml")]})
        parsed = GlobalConfigDictParser().parse(
            GlobalConfigDictParserConfig(
                initial_global_config_dict=OmegaConf.merge(
                    GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT, paths
                ),
                skip_load_from_cli=True,
                skip_load_from_dotenv=True,
            )
        )
        client = server_utils.ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1),  # not asked: the settings are given
            global_config_dict=parsed,
        )
        monkeypatch.setattr(RolloutCollectionHelper, "setup_server_client", lambda *_: client)
        rows = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
        for row in rows:
            row["responses_create_params"] |= {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": 200}
        found: dict[str, dict[str, Any]] = {}
        for future in RolloutCollectionHelper().run_examples(rows, route_failures_to_sidecar=True):
            row, result = await future
            found[row["rookery"]["id"]] = result
        scored = [result for result in found.values() if "reward" in result]
        body = {"verify_responses": scored}
        answer = await client.post("rookery_environment_server", "/aggregate_metrics", json=body)
        return found, await server_utils.get_response_json(answer)


async def test_gym_collects_rewards_and_tokens_and_keeps_failures_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_gym.base_resources_server import BaseVerifyResponse

    tasks = [get_tasks()[name] for name in ("plain", "fork", "lose", "raise")]
    found, metrics = await collect(tasks, make_config(make_policy(tmp_path)), tmp_path, monkeypatch)
    for name, reward in (("plain", 1.0), ("fork", 0.25)):
        checked = BaseVerifyResponse.model_validate(found[name])
        assert (checked.reward, checked.mask_sample) == (reward, False)
        replies = [item for item in checked.response.output if getattr(item, "generation_token_ids", None)]
        assert len(replies) == 2  # Gym's types for training keep the tokens
        assert all(len(item.generation_token_ids) == len(item.generation_log_probs) for item in replies)
    # The class says whether the rollout ran. Neither has a reward, so no mean counts it.
    classes = {
        name: (one["_ng_failure_class"], one["_ng_failure_http_status"])
        for name, one in found.items()
        if "reward" not in one
    }
    assert classes == {"lose": ("agent_request_failed", 503), "raise": ("agent_run_error", 422)}
    assert metrics["key_metrics"]["mean/reward"] == 0.625


async def test_tool_calls_are_valid_items_of_the_responses_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_gym.base_resources_server import BaseVerifyResponse

    config = EngineConfig(
        environment="arithmetic",
        upstreams={"policy": UpstreamConfig(urls=("embedded",))},
        sandbox=SandboxSpec(provider="subprocess"),
        runners=0,
        retry=RetryPolicy(attempts=1),
        breaker=None,
    )
    tasks = [
        task
        for task, _ in zip(
            tasks_from(load_environment("arithmetic").tasks(), "arithmetic"), range(8), strict=False
        )
    ]
    found, _ = await collect(tasks, config, tmp_path, monkeypatch)
    kinds: set[str] = set()
    for result in found.values():
        checked = BaseVerifyResponse.model_validate(result)
        check_contiguous(result["response"]["output"])
        kinds |= {item.type for item in checked.response.output}
    assert kinds == {"message", "function_call", "function_call_output"}
