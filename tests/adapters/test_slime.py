"""The adapter for slime against slime's documented contract, with real rollouts of the embedded policy."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rookery.adapters import slime
from rookery.adapters.slime.rollout_function import get_rollouts
from rookery.core import UsageError
from rookery.training.advantages import compute_advantages
from tests.adapters.kit import ByteTokenizer, bigram_gradient, make_task, save_model
from tests.adapters.slime_contract import (
    check_convert_samples,
    check_data_source,
    check_eval_output,
    check_reward_post_process,
    check_rollout_function,
    check_train_output,
    installed_contract,
    reduce_loss,
)

TASKS = [
    make_task("whole", [1.0, 0.0, 0.5], conversations=2),
    make_task("broken", [1.0, None, 0.25]),
    make_task("lost", [None, None, None]),
]
K = 3


@pytest.fixture
def args(tmp_path: Path) -> Iterator[Any]:
    save_model(tmp_path / "model")
    settings = {
        "env": "tests.adapters.kit:ScriptedEnvironment",
        "tasks": TASKS,
        "eval_tasks": ["whole", "broken"],
        "policy": f"embedded:{tmp_path / 'model'}",
        "runners": 0,
        "retry": {"attempts": 1},
        "out": str(tmp_path / "runs"),
    }
    made = SimpleNamespace(
        rookery=settings,
        rollout_batch_size=len(TASKS),
        n_samples_per_prompt=K,
        n_samples_per_eval_prompt=K,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=8,
        rollout_max_context_len=128,
        hf_checkpoint=str(tmp_path / "model"),
        save=str(tmp_path / "checkpoint"),
        load=str(tmp_path / "checkpoint"),
        calculate_per_token_loss=False,
        custom_reward_post_process_path="rookery.adapters.slime.post_process_rewards",
    )
    with installed_contract():
        yield made
        slime.close_rollouts()


def flatten(groups: list[list[Any]]) -> list[Any]:
    return [sample for group in groups for sample in group]


@pytest.mark.long
def test_failed_rollouts_are_removed_and_count_in_no_baseline(args: Any) -> None:
    source = slime.RookeryDataSource(args)
    output = slime.generate_rollout(args, 0, source)
    check_train_output(output, [2 * K, K, K])
    by_name = dict(zip(["whole", "broken", "lost"], output.samples, strict=True))
    assert [sample.rollout_id for sample in by_name["whole"]] == [0, 0, 1, 1, 2, 2]
    assert [sample.remove_sample for sample in by_name["broken"]] == [False, True, False]
    assert [sample.status.value for sample in by_name["lost"]] == ["failed"] * K
    assert output.metrics["rookery/missing/sandbox.lost"] == pytest.approx(4 / 9)

    # Advantages over valid rollouts; the log's mean counts valid rollouts only.
    raw, rewards = slime.post_process_rewards(args, by_name["broken"])
    assert raw == pytest.approx([1.0, 0.625, 0.25])
    weight = 3 / 2  # slime divides by three rollouts, one of which is missing
    wanted = compute_advantages([1.0, None, 0.25])
    assert rewards == pytest.approx((weight * wanted).tolist())

    # The loss is that of the group without the failed member, with and without its row.
    values = [[0.1 * (at + 1)] * sample.response_length for at, sample in enumerate(by_name["broken"])]
    kept = [sample for sample in by_name["broken"] if not sample.remove_sample]
    alone = slime.convert_samples(args, kept)
    expected = reduce_loss(alone, [values[0], values[2]])
    dropped = slime.convert_samples(args, by_name["broken"])
    assert dropped["rollout_ids"] == alone["rollout_ids"]
    assert reduce_loss(dropped, [values[0], values[2]]) == pytest.approx(expected)
    masked = {
        "loss_masks": [
            [0] * len(sample.loss_mask) if sample.remove_sample else sample.loss_mask
            for sample in by_name["broken"]
        ],
        "rewards": rewards,
        "rollout_ids": [sample.rollout_id for sample in by_name["broken"]],
        "rollout_mask_sums": [sum(sample.loss_mask) for sample in by_name["broken"]],
    }
    assert reduce_loss(masked, values) == pytest.approx(expected)
    rows = [
        (sample.tokens, [0] * (len(sample.tokens) - sample.response_length) + sample.loss_mask, reward)
        for sample, reward in zip(by_name["broken"], rewards, strict=True)
    ]
    without = [
        (tokens, mask, gain) for (tokens, mask, _), gain in zip([rows[0], rows[2]], wanted[[0, 2]], strict=True)
    ]
    full, part = bigram_gradient(rows), bigram_gradient(without)
    np.testing.assert_allclose(full / np.linalg.norm(full), part / np.linalg.norm(part), atol=1e-12)
    assert slime.convert_samples(args, by_name["lost"])["rewards"] == [0.0] * K

    evaluated = slime.generate_rollout(args, 0, source, evaluation=True)
    check_eval_output(evaluated)
    ((name, data),) = evaluated.data.items()
    assert name == "scripted"
    assert sorted(data["rewards"]) == [0.0, 0.25, 0.5, 1.0, 1.0]
    assert len(data["samples"]) == len(data["truncated"]) == 5

    # Settings that slime changes later are noticed.
    args.rollout_temperature = 0.7
    with pytest.raises(UsageError):
        slime.generate_rollout(args, 1, source)


def test_functions_pass_the_rules_of_slimes_contract_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass arguments without any option, so the settings are in the file that `ROOKERY_SLIME` names."""
    save_model(tmp_path / "model")
    settings = {
        "env": "tests.adapters.kit:ScriptedEnvironment",
        "policy": f"embedded:{tmp_path / 'model'}",
        "runners": 0,
        "out": str(tmp_path / "runs"),
        "limits": {"tokens": 8},
    }
    (tmp_path / "rookery.json").write_text(json.dumps(settings))
    monkeypatch.setenv("ROOKERY_SLIME", str(tmp_path / "rookery.json"))
    with installed_contract():
        try:
            check_reward_post_process(slime.post_process_rewards)
            check_convert_samples(slime.convert_samples)
            check_data_source(slime.RookeryDataSource)
        finally:
            slime.close_rollouts()
    with installed_contract():
        try:
            check_rollout_function(slime.generate_rollout)
        finally:
            slime.close_rollouts()


def test_groups_whose_rollouts_have_the_same_ids_keep_their_own_advantages() -> None:
    with installed_contract():
        from slime.utils.types import Sample

        shared = {"response_length": 1, "loss_mask": [1], "tokens": [1, 2]}
        samples = [
            Sample(group_index=group, index=member, reward=reward, status=Sample.Status.COMPLETED, **shared)
            for group, rewards in enumerate([(0.0, 1.0), (4.0, 0.0)])
            for member, reward in enumerate(rewards)
        ]
        alone = slime.post_process_rewards(SimpleNamespace(), samples[:2])[1]
        raw, rewards = slime.post_process_rewards(SimpleNamespace(), samples)
        assert rewards[:2] == alone
        assert (rewards[2] > 0, rewards[3] < 0) == (True, True)
        data = slime.convert_samples(SimpleNamespace(), samples)
        assert data["rewards"] == rewards
        assert data["raw_reward"] == raw
        assert data["rollout_mask_sums"] == [1] * 4
        samples[0].index = None
        with pytest.raises(UsageError):
            slime.post_process_rewards(SimpleNamespace(), samples)


def test_data_source_continues_after_load(args: Any) -> None:
    source = slime.RookeryDataSource(args)
    assert len(source) == 3
    first = source.get_samples(2)
    source.add_samples([first[1]])
    source.save(7)
    again = slime.RookeryDataSource(args)
    again.load(7)
    for groups in (source.get_samples(4), again.get_samples(4)):
        assert [group[0].metadata["task"] for group in groups] == ["broken", "lost", "whole", "broken"]
        assert [sample.index for sample in flatten(groups)] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    fresh = slime.RookeryDataSource(args)
    fresh.load(8)
    assert fresh.get_samples(1)[0][0].index == 0


def test_settings_that_slime_cannot_express_are_refused(args: Any) -> None:
    source = slime.RookeryDataSource(args)
    args.rollout_top_p = 0.9
    with pytest.raises(UsageError):
        slime.generate_rollout(args, 0, source)
    slime.close_rollouts()
    for name, value in (("rollout_top_p", 0.9), ("custom_reward_post_process_path", None), ("rookery", {})):
        with pytest.raises(UsageError):
            slime.RookeryDataSource(SimpleNamespace(**{**vars(args), "rollout_top_p": 1.0, name: value}))


def test_another_tokenizer_and_a_longer_context_are_refused(args: Any) -> None:
    args.rookery |= {"limits": {"context": 129}}
    with pytest.raises(UsageError):  # slime takes 128 tokens
        slime.generate_rollout(args, 0, slime.RookeryDataSource(args))
    slime.close_rollouts()
    args.rookery |= {"limits": {"context": 128}}
    source = slime.RookeryDataSource(args)
    get_rollouts(args).tokenizer = ByteTokenizer(shift=1)
    with pytest.raises(UsageError):
        slime.generate_rollout(args, 0, source)


TRAIN = """
import argparse, importlib, json, sys, yaml
parser = argparse.ArgumentParser()
for name in ("custom-config-path", "rollout-function-path", "custom-reward-post-process-path", "data-source-path"):
    parser.add_argument(f"--{name}", required=True)
args, others = parser.parse_known_args()
for path in (args.rollout_function_path, args.custom_reward_post_process_path, args.data_source_path):
    module, _, name = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
settings = yaml.safe_load(open(args.custom_config_path))
print(json.dumps([settings["rookery"]["env"], others[-1]]))
"""


def test_example_names_functions_that_exist(tmp_path: Path) -> None:
    """A stand-in for slime's `train.py` resolves the paths of the command as slime does."""
    (tmp_path / "train.py").write_text(TRAIN)
    script = Path(__file__).parents[2] / "examples" / "train_with_slime.sh"
    folder = os.path.dirname(sys.executable)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(script), "--last-option"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == ["arithmetic", "--last-option"]
