"""`push` trains a model from which a server samples: weights reach the server, wrong combinations are refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery import UsageError
from rookery.trainer import TrainConfig, TrainingError, read_metrics, resume_training
from rookery.trainer.weight_push import push_weights
from rookery.upstreams.embedded import Weights, load_builtin_weights
from tests.engine_standins import standin
from tests.servers import Answer, ModelServer
from tests.trainer.environments import Parity, options

pytest.importorskip("torch", reason="[probed] this machine has no torch")
pytest.importorskip("transformers", reason="[probed] this machine has no transformers")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder in the format of transformers, with the weights of the embedded policy."""
    from rookery.adapters.embedded import embedded_tokenizer

    folder = tmp_path / "model"
    load_builtin_weights().save(folder)
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def build(model: Path, kind: Any, *urls: str, **settings: Any) -> Any:
    from rookery.trainer import Trainer

    config = TrainConfig(
        **{
            "steps": 3,
            "groups": 2,
            "group_size": 4,
            "eval_tasks": 0,
            "warmup": 0,
            "learning_rate": 1e-3,
            **settings,
        },
        push=kind,
        server=urls,
    )
    return Trainer(Parity(), policy=f"hf:{model}", config=config, out=model.parent / "runs", **options())


@pytest.mark.long
async def test_sglang_standin_samples_from_the_weights_of_the_trainer(model: Path) -> None:
    async with standin("sglang", weights=model) as first, standin("sglang", weights=model) as second:
        trainer = await asyncio.to_thread(build, model, "sglang", first.root, f"{second.root}/v1", lag=0)
        assert trainer.engine.config.recording == "tokens"
        await asyncio.to_thread(trainer.train)
        rows = read_metrics(trainer.folder.path)
        assert [row["staleness_max"] for row in rows] == [0, 0, 0]
        assert max(row["sampler_ratio"] for row in rows) < 1.001
        assert all(row["grad_norm"] > 0 for row in rows)
        for server in (first, second):
            status, info = await server.get("/model_info")
            assert (status, info["weight_version"]) == (200, "3")
    name = "model.norm.weight"
    pushed = Weights.load(trainer.folder.path / "policy").tensors[name]
    assert (pushed == trainer.policy.model.state_dict()[name].numpy()).all()
    assert (pushed != load_builtin_weights().tensors[name]).any()


@pytest.mark.long
async def test_server_that_is_lost_during_training_keeps_the_last_checkpoint(model: Path) -> None:
    async with standin("sglang", weights=model) as server:
        trainer = await asyncio.to_thread(build, model, "sglang", server.root, lag=0, checkpoint_every=1)
        push = trainer.policy.push

        def fail_at_two(version: int) -> None:
            if version == 2:
                trainer.policy._servers = ["http://127.0.0.1:1"]
            push(version)

        trainer.policy.push = fail_at_two
        with pytest.raises(TrainingError) as caught:
            await asyncio.to_thread(trainer.train)
        assert caught.value.reason == "push"
        resumed = await asyncio.to_thread(resume_training, trainer.folder.path, env=Parity())
        assert resumed.progress.step == 1
        assert (await asyncio.to_thread(resumed.train)).steps == 3


async def test_redirect_of_a_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOKERY_API_KEY", "secret")
    async with ModelServer() as other, ModelServer(Answer(status=302, headers={"Location": other.url})) as server:
        with pytest.raises(TrainingError):
            await asyncio.to_thread(push_weights, "sglang", [server.url], tmp_path, 1)
    assert len(server.requests) == 1
    assert not other.requests


async def test_server_without_the_endpoint_is_refused_before_training(model: Path) -> None:
    async with standin("vllm", weights=model) as server:  # without the endpoints of vLLM's development mode
        with pytest.raises(UsageError):
            await asyncio.to_thread(build, model, "vllm", server.root)
    with pytest.raises(UsageError):
        build(model, "sglang", "http://127.0.0.1:1")
    assert not list((model.parent / "runs").iterdir())


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("embedded", {"push": "vllm", "server": ("http://127.0.0.1:1",)}),
        ("hf:MODEL?slots=4", {"push": "vllm", "server": ("http://127.0.0.1:1",)}),
        ("hf:MODEL", {"push": "vllm", "server": ("127.0.0.1:1",)}),
        ("hf:MODEL", {"push": "vllm"}),
        ("hf:MODEL", {"server": ("http://127.0.0.1:1",)}),
        ("hf:MODEL", {"push": "llamacpp", "server": ("http://127.0.0.1:1",)}),
        ("http://127.0.0.1:1", {"push": "vllm", "server": ("http://127.0.0.1:1",)}),
    ],
)
def test_wrong_combinations_are_refused(model: Path, policy: str, settings: dict[str, Any]) -> None:
    from rookery.trainer import Trainer

    with pytest.raises(UsageError):
        Trainer(
            Parity(),
            policy=policy.replace("MODEL", str(model)),
            config=TrainConfig(steps=1, **settings),
            out=model.parent / "runs",
            **options(),
        )
    assert not (model.parent / "runs").exists() or not list((model.parent / "runs").iterdir())
