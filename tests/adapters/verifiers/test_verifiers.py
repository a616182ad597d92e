"""The environment server of `--protocol verifiers`, driven by the client of the real verifiers package."""

import asyncio
import importlib
import runpy
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rookery.adapters.compatibility import parse_sampling
from rookery.adapters.verifiers import VerifiersServer
from rookery.core import Sampling
from tests.adapters.kit import bigram_gradient
from tests.adapters.service_kit import get_tasks, make_policy, read_segments, serving
from tests.waiting import wait_until

pytestmark = pytest.mark.needs("verifiers")

SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "logprobs": True,
    "max_completion_tokens": 5,
    "extra_body": {"seed": 3},
}
"""The parameters that prime-rl sends with its default configuration, and a seed."""


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The generated package, loaded by verifiers as prime-rl's orchestrator does."""
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.utils.loaders import load_taskset

    VerifiersServer.write_package(list(get_tasks().values()), tmp_path / "package", "two turns", "tcp://x:1")
    monkeypatch.syspath_prepend(tmp_path / "package")
    importlib.invalidate_caches()
    yield load_taskset(EnvConfig(taskset={"id": "rookery-two-turns"}).taskset)
    del sys.modules["rookery_two_turns"]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Any, Any]]:
    from verifiers.v1.serve.client import EnvClient

    async with serving(VerifiersServer(), tmp_path / "runs", "") as (service, url):
        client = EnvClient(url)
        client.policy = make_policy(tmp_path)
        try:
            await client.wait_for_server_startup(timeout=60, interval=0.2)
            yield service, client
        finally:
            await client.close()


def run(client: Any, task: Any) -> Any:
    """Run a task as prime-rl's orchestrator does: it names the policy, the model and the sampling parameters."""
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.types import SamplingConfig

    policy = TrainClientConfig(base_url=client.policy, api_key_var="NONE")
    return client.run(policy, "policy.safetensors", SamplingConfig(**SAMPLING), task.data.model_dump(mode="json"))


async def test_branches_are_the_segments_of_the_journal_and_failures_have_no_trace(
    served: tuple[Any, Any], taskset: Any
) -> None:
    _, client = served
    tasks = {task.data.id: task for task in taskset}
    names = ["plain", "fork", "lose", "raise"]
    episodes = dict(zip(names, await asyncio.gather(*(run(client, tasks[name]) for name in names)), strict=True))
    for name, episode in episodes.items():  # the rule of prime-rl's dispatcher
        assert (episode.task.key, episode.task.hash) == (tasks[name].key, tasks[name].hash)
    for name, segments in (("plain", 1), ("fork", 2)):
        episode = episodes[name]
        (trace,) = episode.traces
        assert (episode.ok, trace.ok, trace.has_error, trace.num_branches) == (True, True, False, segments)
        info = trace.info["rookery"]
        recorded = read_segments(info["run"], info["rollout"])
        assert len(recorded) == segments
        for branch, segment in zip(trace.branches, recorded, strict=True):
            assert branch.token_ids == memoryview(segment.tokens).cast("i").tolist()
            assert branch.sampled_mask == [bool(one) for one in segment.mask]
            assert branch.logprobs == memoryview(segment.logprobs).cast("f").tolist()
            assert branch.num_total_tokens == len(segment)
        assert trace.reward == tasks[name].data.rookery["data"]["reward"]
        assert trace.num_turns == segments + 1
        assert all(sum(node.mask) <= SAMPLING["max_completion_tokens"] for node in trace.nodes)
        assert trace.task.key == name
    assert [message.role for message in episodes["plain"].traces[0].messages] == [
        *("user", "assistant", "user", "assistant")
    ]
    # prime-rl trains and normalises over traces without errors: a failed rollout has none.
    for name, cause in (("lose", "sandbox.lost"), ("raise", "bug.environment")):
        assert (episodes[name].ok, episodes[name].traces) == (False, [])
        assert [error.type for error in episodes[name].errors] == [cause]


def compute_gradient(episodes: list[Any]) -> np.ndarray[Any, Any]:
    """Return the gradient of a group by the rules of prime-rl's orchestrator at commit 559b447.

    It trains the traces of trainable agents that have no error and have sampled tokens. GRPO subtracts the mean of
    their rewards. Each branch is a sample, in which a node that branches share trains once.
    """
    traces = [trace for episode in episodes for trace in episode.traces]
    traces = [one for one in traces if not one.has_error and one.agent.trainable and any(map(has_mask, one.nodes))]
    mean = sum(trace.reward for trace in traces) / len(traces)
    rows = []
    for trace in traces:
        trained: set[int] = set()
        for branch in trace.branches:
            mask: list[bool] = []
            for node in branch.nodes:
                mask += [False] * len(node.mask) if id(node) in trained else node.mask
                if node.sampled and has_mask(node):
                    trained.add(id(node))
            rows.append((branch.token_ids, mask, trace.reward - mean))
    return bigram_gradient(rows)


def has_mask(node: Any) -> bool:
    return any(node.mask)


async def test_a_group_with_a_failed_member_has_the_gradient_of_the_group_without_it(
    served: tuple[Any, Any], taskset: Any
) -> None:
    _, client = served
    tasks = {task.data.id: task for task in taskset}
    names = ("plain", "fork", "lose")
    whole = await asyncio.gather(*(run(client, tasks[name]) for name in names))
    found, expected = compute_gradient(whole), compute_gradient(whole[:2])
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_other_sampling_parameters_reach_the_inference_engine() -> None:
    from verifiers.v1.types import SamplingConfig

    config = SamplingConfig(**SAMPLING, stop="END", cache_salt="policy-3")
    assert parse_sampling(config.model_dump(mode="json")) == Sampling(
        temperature=1.0, top_p=1.0, max_tokens=5, seed=3, stop=("END",), extra={"cache_salt": "policy-3"}
    )


async def test_cancelling_a_request_cancels_its_rollout(served: tuple[Any, Any], taskset: Any) -> None:
    service, client = served
    hanging = asyncio.create_task(run(client, next(task for task in taskset if task.data.id == "hang")))
    await wait_until(lambda: service.unfinished == 1)
    hanging.cancel()
    await wait_until(lambda: service.unfinished == 0)
    assert await client.health(timeout=60)


@pytest.mark.parametrize(
    ("method", "payload"),
    [
        (b"dance", {}),
        (b"run", {"task_data": {}}),
        (
            b"run",
            {"task_data": {"id": "x"}, "client": {"base_url": "embedded"}, "model": "embedded", "sampling": {}},
        ),
        (b"run", {"task_data": {"rookery": {"id": 1}}, "client": {}, "model": "embedded", "sampling": {}}),
        (b"cancel", {}),
        (b"run", None),
    ],
)
async def test_malformed_requests_are_answered_and_the_server_continues(
    served: tuple[Any, Any], method: bytes, payload: dict[str, Any] | None
) -> None:
    _, client = served
    future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    client._pending["one"] = future
    body = b"\xc1" if payload is None else msgspec.msgpack.encode(payload)
    await client.socket.send_multipart([b"one", method, body])
    answer = msgspec.msgpack.decode(await asyncio.wait_for(future, 60))
    assert answer["success"] is False
    assert answer["error"]
    assert await client.health(timeout=60)


async def test_example_runs_a_group(
    served: tuple[Any, Any], taskset: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, client = served
    path = Path(__file__).parents[3] / "examples" / "verifiers_client.py"
    arguments = ["rookery-two-turns", "--address", client.address, "--policy", client.policy, "-k", "2"]
    monkeypatch.setattr(sys, "argv", ["verifiers_client.py", *arguments, "--model", "policy.safetensors"])
    await asyncio.to_thread(runpy.run_path, str(path), run_name="__main__")
    assert capsys.readouterr().out.count("trained tokens per branch") == 2
