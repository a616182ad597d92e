"""Single rollouts on request: policies that requests name, and replies that cannot train."""

import asyncio
import contextlib
import logging
from pathlib import Path

import msgspec
import pytest

from rookery.adapters.rollout_service import RolloutService
from rookery.core import Limits, RookeryError, Sampling, Truncated, UsageError
from rookery.core.errors import BatchError
from rookery.upstreams.token_function import TokenCall, TokenResult, serve_function
from tests.adapters.kit import ByteTokenizer
from tests.adapters.service_kit import get_tasks, make_config, make_policy
from tests.servers import ModelServer


async def test_each_policy_has_its_own_run_and_the_idle_engine_is_closed_for_another(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    policies = make_policy(tmp_path), make_policy(tmp_path / "other")
    task = get_tasks()["plain"]
    runs = []
    async with RolloutService(make_config(""), out=tmp_path / "runs", max_engines=1) as service:
        for policy in (*policies, policies[0]):
            found = await service.run(task, policy=policy, sampling=Sampling(max_tokens=3))
            assert found.rollout.valid
            assert all(len(turn.sampled) <= 3 * 4 for turn in found.turns.values())
            runs.append(found.run)
        # Two requests that wait for a free slot at the same time open one engine.
        both = await asyncio.gather(*(service.run(task, policy=policies[1]) for _ in range(2)))
        runs += [found.run for found in both]
        with pytest.raises(UsageError):
            await service.run(task)
        assert service.unfinished == 0
    assert len(set(runs)) == 4
    assert len([path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]) == 4


async def test_api_key_is_not_sent_to_a_policy_that_a_request_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_API_KEY", "secret")
    async with ModelServer() as named, RolloutService(make_config(""), out=tmp_path) as service:
        with contextlib.suppress(RookeryError):  # the reply has no log probabilities
            await service.run(get_tasks()["plain"], policy=named.url)
    async with ModelServer() as configured, RolloutService(make_config(configured.url), out=tmp_path) as service:
        with contextlib.suppress(RookeryError):
            await service.run(get_tasks()["plain"])
    assert {"Bearer secret"} == {request.headers.get("Authorization") for request in configured.requests}
    assert {None} == {request.headers.get("Authorization") for request in named.requests}


async def test_rollouts_are_compared_with_the_tokenizer_and_context_length_of_the_trainer(tmp_path: Path) -> None:
    config = make_config(make_policy(tmp_path))
    task = get_tasks()["plain"]
    sampling = Sampling(max_tokens=8)
    limited = msgspec.structs.replace(config, limits=Limits(context=200))
    with pytest.raises(UsageError):
        RolloutService(limited, context=199)
    for shift in (0, 1):
        tokenizer = ByteTokenizer(shift=shift)
        async with RolloutService(config, out=tmp_path, tokenizer=tokenizer, context=30) as service:
            if shift:
                with pytest.raises(UsageError):
                    await service.run(task, sampling=sampling)
                continue
            found = await service.run(task, sampling=sampling)
            assert found.rollout.outcome == Truncated("context")


async def test_changed_sampling_parameters_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with RolloutService(make_config(make_policy(tmp_path)), out=tmp_path) as service:
        with caplog.at_level(logging.INFO, "rookery.adapters"):
            for temperature, top_p in ((None, None), (1.0, 1.0), (0.7, None), (0.7, 1.0), (None, 0.9)):
                sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=4)
                await service.run(get_tasks()["plain"], sampling=sampling)
    assert [(record.levelname, record.args) for record in caplog.records if "temperature" in record.message] == [
        ("INFO", (1.0, 1.0, -1)),
        ("WARNING", (0.7, 1.0, -1)),
        ("WARNING", (1.0, 0.9, -1)),
    ]


async def test_replies_without_log_probabilities_are_refused(tmp_path: Path) -> None:
    async def generate(call: TokenCall) -> TokenResult:
        return TokenResult(tokens=[97, 257], logprobs=None)

    with serve_function(generate) as policy:
        config = msgspec.structs.replace(
            make_config(""), upstreams={"policy": policy}, record="tokens", rendering={"name": "embedded"}
        )
        async with RolloutService(config, out=tmp_path) as service:
            with pytest.raises(BatchError):
                await service.run(get_tasks()["plain"])
