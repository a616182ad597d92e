"""The agent server of `--protocol nemo-gym`: the contract of NeMo Gym 0.7 and the assertion of NeMo RL."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rookery.adapters.nemo_gym import ContiguityError, NemoGymServer, check_contiguous
from rookery.adapters.rollout_service import RolloutService
from rookery.core import UsageError
from rookery.training.advantages import compute_advantages
from tests.adapters.envs import TwoTurns
from tests.adapters.kit import bigram_gradient
from tests.adapters.service_kit import get_tasks, make_policy, read_segments, serving
from tests.waiting import wait_until


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The rows that `--package` writes, by task, with the sampling parameters that NeMo RL adds."""
    NemoGymServer.write_package(list(get_tasks().values()), tmp_path, "two turns", "http://127.0.0.1:8600")
    found = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    for row in found:
        row["responses_create_params"] |= {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": 5}
    return {row["rookery"]["id"]: row for row in found}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[RolloutService, aiohttp.ClientSession]]:
    async with (
        serving(NemoGymServer(), tmp_path / "runs", make_policy(tmp_path)) as (service, url),
        aiohttp.ClientSession(url) as http,
    ):
        yield service, http


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(path, **body) as answer:
        return answer.status, await answer.json()


def read_message_log(output: list[dict[str, Any]]) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, mask and log probabilities as NeMo RL assembles them from the output items."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for item in output:
        if item.get("generation_token_ids"):
            assert item["prompt_token_ids"][: len(tokens)] == tokens
            new = item["prompt_token_ids"][len(tokens) :]
            tokens += new + item["generation_token_ids"]
            mask += [0] * len(new) + [1] * len(item["generation_token_ids"])
            logprobs += [0.0] * len(new) + item["generation_log_probs"]
    return tokens, mask, logprobs


async def test_output_items_are_a_segment_of_the_journal(
    served: tuple[RolloutService, aiohttp.ClientSession], rows: dict[str, dict[str, Any]]
) -> None:
    _, http = served
    for name, segments, reward in (("plain", 1, 1.0), ("fork", 2, 0.25)):
        status, answer = await post(http, "/run", json=rows[name])
        assert status == 200, answer
        assert (answer["reward"], answer["responses_create_params"]) == (
            reward,
            rows[name]["responses_create_params"],
        )
        recorded = read_segments(answer["rookery"]["run"], answer["rookery"]["rollout"])
        assert len(recorded) == segments
        sent = max(recorded, key=lambda segment: segment.trained)
        assert read_message_log(answer["response"]["output"]) == (
            memoryview(sent.tokens).cast("i").tolist(),
            list(sent.mask),
            memoryview(sent.logprobs).cast("f").tolist(),
        )
        assert answer["rookery"]["tokens_left_out"] == sum(one.trained for one in recorded) - sent.trained
        assert [item.get("role") for item in answer["response"]["output"]] == ["assistant", "user", "assistant"]
        sampled = [len(item.get("generation_token_ids", [])) for item in answer["response"]["output"]]
        assert all(count <= 5 for count in sampled)


async def test_only_failures_of_the_infrastructure_are_5xx(
    served: tuple[RolloutService, aiohttp.ClientSession], rows: dict[str, dict[str, Any]]
) -> None:
    _, http = served
    status, answer = await post(http, "/run", json=rows["lose"])
    assert (status, answer["error"]["cause"]) == (503, "sandbox.lost")
    status, answer = await post(http, "/run", json=rows["raise"])
    assert (status, answer["error"]["cause"]) == (422, "bug.environment")
    for body, expected in (
        (b"{", 400),
        (b"[]", 422),
        (b'{"responses_create_params": {}}', 422),
        (b'{"responses_create_params": {}, "rookery": {"id": 1}}', 422),
        (b'{"responses_create_params": {"temperature": "hot"}, "rookery": {"id": "x"}}', 422),
    ):
        status, _ = await post(http, "/run", data=body)
        assert status == expected, body
    assert (await post(http, "/verify", json={}))[0] == 404
    website = {"Origin": "https://example.com"}
    assert (await post(http, "/run", json=rows["plain"], headers=website))[0] == 403
    async with http.get("/run") as refused:
        assert refused.status == 405


async def test_a_group_with_a_repeated_row_has_the_gradient_of_the_group_without_a_failure(
    served: tuple[RolloutService, aiohttp.ClientSession],
    rows: dict[str, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NeMo RL repeats a row after 5xx, and drops the whole group if it fails again and again."""
    _, http = served
    TwoTurns.lost.clear()
    answers, statuses = [], []
    for name in ("plain", "fork", "lose once"):
        status, answer = await post(http, "/run", json=rows[name])
        statuses.append(status)
        if status == 503:
            status, answer = await post(http, "/run", json=rows[name])
            statuses.append(status)
        answers.append(answer)
    assert statuses == [200, 200, 503, 200]
    gains = compute_advantages([1.0, 0.25, 0.5])  # the rewards of the tasks: no failure has a reward
    found = compute_advantages([answer["reward"] for answer in answers])
    rollouts = [read_message_log(answer["response"]["output"])[:2] for answer in answers]
    whole, expected = (
        bigram_gradient((*row, float(gain)) for row, gain in zip(rollouts, some, strict=True))
        for some in (found, gains)
    )
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(whole, expected, atol=1e-12)
    # Sampling parameters that the trainer changes are used, and reported once.
    rows["plain"]["responses_create_params"]["temperature"] = 0.5
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rookery.adapters"):
        for _ in range(2):
            assert (await post(http, "/run", json=rows["plain"]))[0] == 200
    assert [record.args for record in caplog.records if record.name == "rookery.adapters"] == [(0.5, 1.0, -1)]


async def test_a_client_that_disconnects_cancels_its_rollout_and_a_full_queue_is_429(
    served: tuple[RolloutService, aiohttp.ClientSession], rows: dict[str, dict[str, Any]]
) -> None:
    service, http = served
    service.queue = 1
    hanging = asyncio.create_task(post(http, "/run", json=rows["hang"]))
    await wait_until(lambda: service.unfinished == 1)
    assert (await post(http, "/run", json=rows["plain"]))[0] == 429
    hanging.cancel()
    await wait_until(lambda: service.unfinished == 0)
    assert (await post(http, "/run", json=rows["plain"]))[0] == 200


async def test_aggregate_metrics_are_means_over_unmasked_responses(
    served: tuple[RolloutService, aiohttp.ClientSession],
) -> None:
    _, http = served
    responses = [
        {"_ng_task_index": 0, "reward": 1.0, "steps": 2},
        {"_ng_task_index": 0, "reward": 0.0, "steps": 4},
        {"_ng_task_index": 1, "reward": 0.5},
        {"_ng_task_index": 1, "reward": 0.0, "mask_sample": True},
    ]
    status, answer = await post(http, "/aggregate_metrics", json={"verify_responses": responses})
    assert status == 200
    assert answer["agent_metrics"] == {"mean/reward": 0.5, "mean/steps": 3.0, "masked_samples": 1}
    assert answer["group_level_metrics"] == [
        {"_ng_task_index": 0, "mean/reward": 0.5, "mean/steps": 3.0},
        {"_ng_task_index": 1, "mean/reward": 0.5},
    ]
    assert (await post(http, "/aggregate_metrics", json={"verify_responses": 1}))[0] == 422


@pytest.mark.parametrize("change", [{"prompt_token_ids": [1, 9, 3, 4]}, {"generation_log_probs": []}])
def test_a_prompt_that_does_not_continue_the_tokens_before_it_is_refused(change: dict[str, Any]) -> None:
    first = {"prompt_token_ids": [1], "generation_token_ids": [2, 3], "generation_log_probs": [-1.0, -1.0]}
    second = {"prompt_token_ids": [1, 2, 3, 4], "generation_token_ids": [5], "generation_log_probs": [-1.0]}
    check_contiguous([first, {"role": "user"}, second])
    with pytest.raises(ContiguityError):
        check_contiguous([first, {"role": "user"}, second | change])


async def test_a_server_without_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        async with serving(NemoGymServer(), tmp_path, ""):
            pass
