"""`rollout_func` with TRL on a CPU: a tiny Llama, trained through real rollouts."""

import asyncio
import json
import math
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rookery import Limits, Sampling, Task
from rookery.adapters.task_rows import find_task, make_task_rows
from rookery.adapters.trl import (
    RolloutFunc,
    dataset,
    embedded_tokenizer,
    push_weights,
    rollout_func,
)
from rookery.adapters.trl.settings import get_settings
from rookery.core import UsageError
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.embedded import Weights, chat
from tests.adapters.kit import ByteTokenizer, ScriptedEnvironment, make_task
from tests.adapters.trl_envs import (
    ByteEnvironment,
    FaultyEnvironment,
    LongSubCallEnvironment,
    MultiSegmentEnvironment,
)
from tests.adapters.trl_kit import (
    ONCE,
    Watched,
    Workers,
    bare,
    distance,
    one_thread,
    policy,
    trainer,
    workers,
)
from tests.engine_standins import standin

__all__ = ["one_thread", "policy", "workers"]
ROOT = Path(__file__).parents[2]


def opened(env: Any, policy: Path, **options: Any) -> RolloutFunc:
    settings = {"runners": 0, "retry": ONCE, "sandbox": "subprocess", "out": policy.parent / "runs", **options}
    return rollout_func(env, policy=f"embedded:{policy}", **settings)


def model_of(policy: Path) -> Any:
    return Weights.load(policy).to_model()


def test_trl_is_imported_only_when_used() -> None:
    code = "import sys, rookery.adapters.trl as t; t.rollout_func; t.RolloutWorker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"trl", "torch", "transformers", "datasets", "accelerate", "tokenizers", "pandas"}
    assert set(done.stdout.split()) & heavy == set()


# ------------------------------------------------------------------------------------------ GRPO, for real


@pytest.mark.long
def test_policy_learns_from_exactly_the_sampled_tokens(tmp_path: Path, policy: Path) -> None:
    first = model_of(policy)
    model = model_of(policy)
    with opened(ByteEnvironment(), policy) as rollouts:
        watched = Watched(rollouts)
        made = trainer(
            watched,
            model,
            tmp_path,
            max_steps=6,
            num_generations_eval=1,
            per_device_train_batch_size=16,
            num_generations=8,
            learning_rate=0.01,
        )
        made.train()
        measured = made.evaluate(watched.dataset())
    # TRL passes each prompt once for each member of its group, one after the other.
    assert [len(prompts) for prompts in watched.prompts] == [16] * 6 + [8]
    assert all(prompts[n] == prompts[n - n % 8] for prompts in watched.prompts[:6] for n in range(16))
    scores = [one["reward"] for one in watched.answers.pop()["rollout"]]
    assert measured["eval_rookery/reward"] == pytest.approx(np.mean(scores))
    assert measured["eval_reward"] == pytest.approx(np.mean(scores))
    # The engine's logprobs are those of the trainer's own weights, at every step; those of the first are not.
    assert max(watched.errors) < 1e-4
    assert distance(first, watched.answers[-1]) > 0.1
    for step, answer in enumerate(watched.answers):
        assert {tuple(one["versions"]) for one in answer["rollout"]} == {(step,)}
    means = [np.mean([one["reward"] for one in answer["rollout"]]) for answer in watched.answers]
    assert means[-1] > means[0] + 0.1, means
    history = [entry for entry in made.state.log_history if "loss" in entry]
    assert all(math.isfinite(entry["loss"]) and 0 < entry["grad_norm"] < 100 for entry in history)
    assert [entry["rookery/missing"] for entry in history] == [0.0] * 6
    assert [entry["reward"] for entry in history] == pytest.approx(means, abs=1e-5)
    _the_mask_is_right(watched.answers[0])


def _the_mask_is_right(answer: dict[str, Any]) -> None:
    """The output of the program, and all text around it, is in the completion and does not train."""
    for ids, mask, about in zip(answer["completion_ids"], answer["env_mask"], answer["rollout"], strict=True):
        spoken = [token for token, own in zip(ids, mask, strict=True) if own]
        given_back = [token for token, own in zip(ids, mask, strict=True) if not own]
        count = int(about["info"]["saw"]) if "saw" in about["info"] else 0
        assert mask[0] == 1
        assert mask[:count] == [1] * count
        around = [chat.USER, *f"{count}\n".encode(), chat.END, chat.ASSISTANT]
        assert given_back == ([] if spoken[count - 1] == chat.END else [chat.END]) + around


@pytest.mark.long
@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_failed_rollouts_leave_no_trace_in_the_gradient(tmp_path: Path, policy: Path, loss: str) -> None:
    import torch

    tasks = [
        {"id": "one", "prompt": "a", "fail": [1]},
        {"id": "all", "prompt": "b", "fail": [0, 1, 2, 3]},
        {"id": "none", "prompt": "c"},
        {"id": "lone", "prompt": "d", "fail": [0, 1, 2]},
    ]
    model, before = model_of(policy), model_of(policy)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
    with opened(ByteEnvironment(), policy, tasks=tasks) as rollouts:
        watched = Watched(rollouts)
        trainer(
            watched,
            model,
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=16,
            num_generations=4,
            loss_type=loss,
            max_grad_norm=0.0,
            optimizers=(sgd, constant),
        ).train()
    (answer,) = watched.answers
    rewards = [one["reward"] for one in answer["rollout"]]
    assert [n for n, reward in enumerate(rewards) if reward is None] == [1, 4, 5, 6, 7, 12, 13, 14]
    assert {one["outcome"] for one in answer["rollout"] if one["reward"] is None} == {"sandbox.lost"}
    assert [answer["env_mask"][n] for n in (1, 4, 12)] == [[0]] * 3
    # By hand: each valid member against the mean of the other valid ones; nothing else is counted anywhere.
    total = torch.zeros(())
    valid = [n for n, reward in enumerate(rewards) if reward is not None]
    trained = sum(sum(answer["env_mask"][n]) for n in valid)
    for n in valid:
        others = [rewards[m] for m in range(n - n % 4, n - n % 4 + 4) if m != n and rewards[m] is not None]
        gain = rewards[n] - sum(others) / len(others) if others else 0.0
        prompt, completion = answer["prompt_ids"][n], answer["completion_ids"][n]
        logits = before(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        chances = torch.log_softmax(logits, -1)[torch.arange(len(completion)), completion]
        spoken = (chances * torch.tensor(answer["env_mask"][n])).sum()
        weight = {"dapo": trained, "grpo": len(valid) * sum(answer["env_mask"][n]), "dr_grpo": len(valid) * 10}
        total = total - gain * spoken / weight[loss]
    total.backward()
    for (name, now), then in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.allclose(then - now, then.grad, atol=1e-6), name
        assert then.grad.abs().max() > 0


@pytest.mark.long
def test_documented_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "trainers" / "trl.md").read_text()
    (example, *_) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    program = (ROOT / "examples" / "train_with_trl.py").read_text()
    assert example[example.index("weights = ") :] == program[program.index("weights = ") :]
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "docs", "exec"), space)
    history = [entry for entry in space["trainer"].state.log_history if "loss" in entry]
    assert history
    for entry in history:
        assert entry["rookery/missing"] == 0.0
        assert entry["rookery/tool_calls"] > 0.5
        assert math.isfinite(entry["loss"])


def updated_between_two_calls(rollouts: RolloutFunc, model: Any, folder: Path) -> None:
    """Every call is answered with the trainer's current weights and carries their version."""
    import torch

    with rollouts:
        made = trainer(rollouts, model, folder, per_device_train_batch_size=2, num_generations=2)
        asked = [rollouts.dataset()[0]["prompt"]] * 2
        made.model.train()
        was = rollouts(asked, made)
        assert distance(model, was) < 1e-4
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        made.state.global_step = 5
        now = rollouts(asked, made)
    assert distance(model, was) > 0.01
    assert distance(model, now) < 1e-4
    assert [one["versions"] for one in (*was["rollout"], *now["rollout"])] == [[0], [0], [5], [5]]


ONE = [{"id": "t", "prompt": "x", "conversations": 1}]


def test_weights_reach_runners_in_other_processes(tmp_path: Path, policy: Path) -> None:
    rollouts = opened("tests.adapters.trl_envs:MultiSegmentEnvironment", policy, tasks=ONE, runners=1)
    updated_between_two_calls(rollouts, model_of(policy), tmp_path)


async def test_user_function_pushes_weights_to_a_server(tmp_path: Path, policy: Path) -> None:
    async with standin("vllm", weights=policy) as server:

        def push(tensors: Mapping[str, Any], version: int) -> None:
            path = tmp_path / f"version-{version}.safetensors"
            shutil.copy(policy, path)
            push_weights(path)(tensors, version)
            body = json.dumps({"update_info": {"path": str(path)}}).encode()
            request = urllib.request.Request(
                f"{server.root}/update_weights", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == 200

        rollouts = rollout_func(
            MultiSegmentEnvironment(),
            policy=UpstreamConfig(kind="vllm", urls=(server.root,)),
            tasks=ONE,
            push=push,
            runners=0,
            record="tokens",
            rendering={"name": "embedded"},
            out=tmp_path / "runs",
        )
        await asyncio.to_thread(updated_between_two_calls, rollouts, model_of(policy), tmp_path)


# ------------------------------------------------------------------------------------- a call, and its ends


def test_most_trained_segment_becomes_the_row_and_others_are_counted(
    tmp_path: Path, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [{"id": "five", "prompt": "x", "conversations": 5}]
    with opened(MultiSegmentEnvironment(), policy, tasks=tasks) as rollouts:
        made = trainer(rollouts, model_of(policy), tmp_path, per_device_train_batch_size=2, num_generations=2)
        made.model.train()
        answer = rollouts([rollouts.dataset()[0]["prompt"]] * 2, made)
        assert distance(made.model, answer) < 1e-4
    for mask, about in zip(answer["env_mask"], answer["rollout"], strict=True):
        assert about["segments"] == 5
        assert 0 < about["tokens_left_out"] <= 4 * sum(mask)
    assert sum("tokens_left_out" in record.message for record in caplog.records) == 1
    strict = opened(MultiSegmentEnvironment(), policy, tasks=tasks, segments="error")
    with strict, pytest.raises(UsageError, match=r"\b5\b.*RolloutWorker"):
        strict([strict.dataset()[0]["prompt"]] * 2, made)


def test_invalid_settings_are_rejected_before_sampling(tmp_path: Path, policy: Path) -> None:
    tasks = [{"id": "t", "prompt": "x"}]
    made = trainer(
        opened(FaultyEnvironment(), policy, tasks=tasks), model_of(policy), tmp_path, per_device_train_batch_size=8
    )
    out = tmp_path / "refused"

    def refused(named: str, prompt: Any = None, **options: Any) -> None:
        settings = {"policy": f"embedded:{policy}", "tasks": tasks, "out": out, **options}
        with rollout_func(FaultyEnvironment(), **settings) as rollouts, pytest.raises(UsageError, match=named):
            rollouts([prompt or make_task_rows(rollouts.tasks)[0]["prompt"]], made)

    refused("push=False", policy="embedded")
    refused(r"\b0\.5\b.*\b1\b", sampling=Sampling(temperature=0.5))
    refused("'other'", [{"role": "user", "content": "x", "task": "other"}])
    refused("prompt", [{"role": "user", "content": ""}])
    made.tools = [print]
    refused("environment_factory")
    for options, named in (({"baseline": "median"}, "'median'"), ({"segments": "all"}, "'most'.*'error'")):
        with pytest.raises(UsageError, match=named):
            opened(FaultyEnvironment(), policy, tasks=tasks, **options)
    assert not out.exists()


def test_changed_temperature_and_another_tokenizer_are_refused_and_a_longer_context_is_reported(
    tmp_path: Path, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [make_task("t", [1.0, 0.0])]
    model = model_of(policy)
    longest = model.config.max_position_embeddings
    with opened(ScriptedEnvironment(), policy, tasks=tasks, limits=Limits(context=longest + 1)) as rollouts:
        made = trainer(rollouts, model, tmp_path, per_device_train_batch_size=2, num_generations=2)
        prompts = [rollouts.dataset()[0]["prompt"]] * 2
        for _ in range(2):
            assert len(rollouts(prompts, made)["prompt_ids"]) == 2
        assert sum(str(longest + 1) in record.message for record in caplog.records) == 1
    with opened(ScriptedEnvironment(), policy, tasks=tasks) as rollouts:
        assert len(rollouts(prompts, made)["prompt_ids"]) == 2
        made.temperature = 0.7
        with pytest.raises(UsageError, match=r"temperature.*\b1\.0\b.*\b0\.7\b"):
            rollouts(prompts, made)
        made.temperature = 1.0
        rollouts.close()
        made.processing_class = ByteTokenizer(shift=1)
        with pytest.raises(UsageError, match="tokenizer"):
            rollouts(prompts, made)


def test_sub_call_longer_than_the_model_takes_is_clipped_and_counted(tmp_path: Path, policy: Path) -> None:
    model = model_of(policy)
    model.config.max_position_embeddings = 60
    with opened(LongSubCallEnvironment(), policy, tasks=[{"id": "t", "prompt": "x" * 40}]) as rollouts:
        made = trainer(rollouts, model, tmp_path, per_device_train_batch_size=2, num_generations=2)
        columns = rollouts([rollouts.dataset()[0]["prompt"]] * 2, made)
    lengths = [len(columns["prompt_ids"][at]) + len(columns["completion_ids"][at]) for at in range(2)]
    assert max(lengths) <= 60
    assert all(one["reward"] is not None and one["tokens_left_out"] > 0 for one in columns["rollout"])


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"max_position_embeddings": 10, "text_config": SimpleNamespace(max_position_embeddings=100)}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default"}}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": YARN}, 400),
        ({"max_position_embeddings": 100, "rope_scaling": YARN}, 400),
        ({"max_position_embeddings": 500, "rope_parameters": YARN}, 500),
        ({"max_position_embeddings": 100, "rope_parameters": {"full": YARN, "sliding": {}}}, 400),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}, None),
        ({}, None),
    ],
)
def test_context_is_the_usable_length_of_the_text_model(config: dict[str, Any], context: int | None) -> None:
    made = bare()
    made.model.config = SimpleNamespace(**config)
    assert get_settings(made).context == context


def test_rollout_function_stays_usable_after_an_interrupt_or_error(tmp_path: Path, policy: Path) -> None:
    tasks = [{"id": "calm", "prompt": "x"}, {"id": "interrupt", "prompt": "y", "action": "interrupt"}]
    pushed: list[int] = []

    def push(_: Any, version: int) -> None:
        pushed.append(version)
        if len(pushed) == 1:
            raise OSError("the disk is full")

    with opened(FaultyEnvironment(), policy, tasks=tasks, push=push) as rollouts:
        made = trainer(rollouts, model_of(policy), tmp_path, per_device_train_batch_size=2, num_generations=2)
        made.model.train()
        calm, bad = (row["prompt"] for row in rollouts.dataset())
        with pytest.raises(OSError, match="the disk is full"):
            rollouts([calm] * 2, made)
        with pytest.raises(KeyboardInterrupt):
            rollouts([bad] * 2, made)
        answer = rollouts([calm] * 2, made)
        assert rollouts.engine is not None
        assert rollouts.engine.status()["in_flight"] == 0
    assert pushed == [0, 0]  # called again after a failure, once after a success
    assert [one["reward"] is None for one in answer["rollout"]] == [False, False]
    assert rollouts.engine is None


def test_program_without_close_exits(tmp_path: Path, policy: Path) -> None:
    code = f"""
from rookery.adapters.trl import rollout_func
from tests.adapters.trl_kit import Workers, workers, bare
rollouts = rollout_func("tests.adapters.trl_envs:FaultyEnvironment",
                        tasks=[{{"id": "t", "prompt": "x"}}], push=False,
                        policy="embedded:{policy}", runners=1, out={str(tmp_path / "runs")!r})
rollouts([[{{"role": "user", "content": "x", "task": "t"}}]] * 2, bare())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not list((tmp_path / "runs" / "latest").glob("*-wal"))  # its journal was closed


def test_garbage_collected_rollout_function_closes_its_engine(policy: Path, workers: Workers) -> None:
    rollouts = opened(FaultyEnvironment(), policy, tasks=[{"id": "t", "prompt": "x"}], push=False)
    rollouts([[{"role": "user", "content": "x", "task": "t"}]] * 2, bare())
    assert workers()
    del rollouts
    for thread in workers():
        thread.join(60)
    assert workers() == []


# ------------------------------------------------------------------------------------------------ the parts


def test_every_dataset_row_leads_back_to_its_task() -> None:
    tasks = [
        Task(id="a", prompt=(), data={"n": 1}),
        *SAME,
        Task(id="broken", invalid="it is none"),
    ]
    made = dataset(tasks)
    assert made["task"] == ["a", "b", "c"]
    known = {task.id: task for task in tasks}
    assert [find_task(row["prompt"], known) for row in made] == tasks[:3]
    bare = [find_task(prompt, known) for prompt in ("hello", "hello", [{"role": "user", "content": "hello"}])]
    assert bare[0] == bare[1]
    assert [task.text for task in bare] == ["hello"] * 3


SAME = [
    Task(id=name, prompt=tuple(find_task("the same words", {}).prompt), data={"answer": name})
    for name in ("b", "c")
]


def test_embedded_tokenizer_has_the_ids_of_the_policy() -> None:
    tokenizer = embedded_tokenizer()
    assert len(tokenizer) == chat.VOCAB
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (chat.END, chat.PAD)
    text = "".join(map(chr, range(1, 0x300))) + "é漢\n"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert {tokenizer.convert_ids_to_tokens(number) for number in chat.NAMES} == set(chat.NAMES.values())
