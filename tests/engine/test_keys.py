"""API keys are sent only to their server and written to no file."""

from pathlib import Path

import pytest

from rookery import Engine
from rookery.upstreams.protocol import UpstreamConfig
from tests.servers import ModelServer


@pytest.mark.parametrize("runners", [0, 1])
async def test_api_key_is_sent_to_its_server_and_written_to_no_file(
    tmp_path: Path, runners: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_API_KEY", "sk-policy-secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-secret")
    monkeypatch.setenv("JUDGE_KEY", "sk-judge-secret")
    async with ModelServer("ok") as model, ModelServer("yes") as judge, ModelServer("no") as user:
        roles = {
            "judge": UpstreamConfig(urls=(judge.url,), key_env="JUDGE_KEY"),
            "user": UpstreamConfig(urls=(user.url,), key_env="NOT_SET"),
        }
        env = "tests.engine.envs:Judged"
        async with Engine(env, policy=model.url, roles=roles, runners=runners, out=tmp_path / "runs") as engine:
            groups = [group async for group in engine.groups(["a"])]
        assert groups[0].rewards == [1.0]
        keys = [server.requests[0].headers.get("Authorization") for server in (model, judge, user)]
    assert keys == ["Bearer sk-policy-secret", "Bearer sk-judge-secret", None]
    for path in (tmp_path / "runs").rglob("*"):
        if path.is_file():
            assert b"secret" not in path.read_bytes(), path
