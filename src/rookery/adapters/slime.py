"""slime 0.3: a rollout function, a reward post-processing function, a conversion of samples, and a data source.

    --rollout-function-path rookery.adapters.slime.generate_rollout
    --custom-reward-post-process-path rookery.adapters.slime.post_process_rewards
    --data-source-path rookery.adapters.slime.RookeryDataSource
    --custom-config-path rookery.yaml      # rookery: {env: my_env.py, concurrency: 256}

The functions run in slime's rollout manager. slime and torch are imported only when they are used.

Guarantees:
- A failed rollout is a sample that slime removes from the loss (`remove_sample`). No baseline counts it.
- Advantages are those of `rookery.training`: over the valid rollouts of a group, each of which counts once.
- All segments of a rollout are samples with the same `rollout_id`, so that slime counts them as one rollout.
- After `load`, the data source continues with the group that was next when `save` was called.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from rookery.adapters.compatibility import RolloutChecks, TrainerSettings, check_version
from rookery.adapters.engine_holder import EngineHolder
from rookery.adapters.group_requests import run_groups
from rookery.adapters.task_rows import TASK_KEY, find_task, get_tasks, make_task_rows
from rookery.core import Group, Task, UsageError, derive_seed
from rookery.engine import SyncEngine
from rookery.environments import Environment, load_environment
from rookery.training.config import BatchConfig
from rookery.training.rows import Row, fill_row, make_rows, split_by_rollout, summarize_rows
from rookery.upstreams.protocol import UpstreamConfig

log = logging.getLogger("rookery.adapters.slime")
TESTED = ("0.3.0", "0.4")
FILE_VARIABLE = "ROOKERY_SLIME"
"""Environment variable that names a JSON file with the settings, if `args.rookery` is not set."""
ABOUT = "rookery"
"""Key of a sample's metadata that has the advantage and the validity of its rollout."""


class SlimeRollouts:
    """The environment and the engines of slime's rollout manager: one for training, one for evaluation."""

    def __init__(self, args: Any) -> None:
        check_version("slime", *TESTED)
        options = dict(_read_settings(args))
        _get_trainer_settings(args, evaluation=False)
        paths = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
        if args is not None and not any(getattr(args, path, None) for path in paths):
            raise UsageError(
                "slime's own normalisation counts failed rollouts in its baseline: set "
                "--custom-reward-post-process-path rookery.adapters.slime.post_process_rewards"
            )
        self.environment: Environment = load_environment(options.pop("env"), **options.get("arguments", {}))
        self.tasks = {task.id: task for task in get_tasks(self.environment, options.pop("tasks", None))}
        self.eval_tasks = [self.tasks[name] for name in options.pop("eval_tasks", self.tasks)]
        self._options = options
        self._engines: dict[bool, tuple[EngineHolder, RolloutChecks]] = {}

    def run(self, args: Any, rollout_id: int, tasks: list[Task], k: int, *, evaluation: bool) -> list[Group]:
        """Run k rollouts of each task with slime's sampling parameters."""
        settings = _get_trainer_settings(args, evaluation=evaluation)
        if evaluation not in self._engines:
            self._engines[evaluation] = self._open(args, rollout_id, settings)
        holder, checks = self._engines[evaluation]
        engine = holder.engine
        assert engine is not None
        checks.check_unchanged(settings)
        groups = run_groups(engine, tasks, k, "slime")
        checks.check_groups(groups, engine.folder)
        return groups

    def _open(self, args: Any, rollout_id: int, settings: TrainerSettings) -> tuple[EngineHolder, RolloutChecks]:
        options = dict(self._options)
        if "policy" not in options:
            url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
            options["policy"] = UpstreamConfig(kind="sglang", urls=(url,))
            options |= {"record": "tokens", "rendering": {"tokenizer": args.hf_checkpoint}}
        # A resumed training must not repeat the seeds of the one before.
        seed = derive_seed(options.pop("seed", getattr(args, "rollout_seed", 0)), rollout_id)
        engine = SyncEngine(
            self.environment,
            sampling=settings.settle_sampling(options.pop("sampling", None)),
            limits=settings.settle_limits(options.pop("limits", None)),
            seed=seed,
            **options,
        )
        holder = EngineHolder()
        holder.open(engine)
        return holder, RolloutChecks("slime", settings, _load_tokenizer(args))

    def close(self) -> None:
        """Close the engines and cancel running rollouts."""
        while self._engines:
            self._engines.popitem()[1][0].close()


def _read_settings(args: Any) -> dict[str, Any]:
    settings = getattr(args, "rookery", None)
    if settings is None and FILE_VARIABLE in os.environ:
        settings = json.loads(Path(os.environ[FILE_VARIABLE]).read_text(encoding="utf-8"))
    if not isinstance(settings, dict) or not settings.get("env"):
        raise UsageError(
            "slime's arguments have no rookery.env: put `rookery: {env: NAME}` into the YAML file of "
            "--custom-config-path"
        )
    return settings


def _get_trainer_settings(args: Any, *, evaluation: bool) -> TrainerSettings:
    """Return what slime assumes: its arguments for rollouts, or those for evaluation if they are set."""

    def get(name: str, default: Any) -> Any:
        found = getattr(args, f"eval_{name}", None) if evaluation else None
        return (
            default if args is None else found if found is not None else getattr(args, f"rollout_{name}", default)
        )

    top_p = get("top_p", 1.0)
    if not evaluation and top_p != 1.0:
        raise UsageError(
            f"--rollout-top-p is {top_p:g}: slime then needs the token IDs of every nucleus, which Rookery does "
            "not record; set --rollout-top-p 1"
        )
    return TrainerSettings(
        temperature=get("temperature", 1.0),
        top_p=top_p,
        top_k=get("top_k", -1),
        max_tokens=get("max_response_len", None),
        context=get("max_context_len", None),
    )


def _load_tokenizer(args: Any) -> Any:
    path = getattr(args, "hf_checkpoint", None)
    if not path:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


_opened: dict[int, SlimeRollouts] = {}


def get_rollouts(args: Any) -> SlimeRollouts:
    """Return the rollouts of this process; they are created on the first call."""
    if not _opened:
        _opened[0] = SlimeRollouts(args)
    return _opened[0]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's rollout function: run the groups of a training step, or the evaluation tasks."""
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput

    rollouts = get_rollouts(args)
    if evaluation:
        k = getattr(args, "n_samples_per_eval_prompt", None) or 1
        groups = rollouts.run(args, rollout_id, rollouts.eval_tasks, k, evaluation=True)
        rows = make_rows(groups, _get_rules(args))
        samples = [make_sample(row, None) for part in split_by_rollout(rows) if (row := part[-1]).valid]
        data = {
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status is sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
        return RolloutFnEvalOutput(data={rollouts.environment.title: data}, metrics=summarize_rows(rows))
    asked = data_source.get_samples(getattr(args, "rollout_batch_size", None) or 1)
    tasks = [find_task(one[0].prompt, rollouts.tasks, (one[0].metadata or {}).get(TASK_KEY)) for one in asked]
    groups = rollouts.run(args, rollout_id, tasks, len(asked[0]), evaluation=False)
    rows = make_rows(groups, _get_rules(args))
    by_group = iter(split_by_rollout(rows))
    made = [[make_sample(row, member) for member in one for row in next(by_group)] for one in asked]
    return RolloutFnTrainOutput(samples=made, metrics=summarize_rows(rows))


def _get_rules(args: Any) -> BatchConfig:
    return BatchConfig(scale="std" if getattr(args, "grpo_std_normalization", False) else "none", extras=())


def make_sample(row: Row, asked: Any) -> Any:
    """Return a row as a `Sample` of slime. `asked` is the sample that the data source provided for the rollout."""
    from slime.utils.types import Sample

    status = Sample.Status.TRUNCATED if row.truncated else Sample.Status.COMPLETED
    filled = fill_row(row, 0)
    return Sample(
        group_index=getattr(asked, "group_index", row.group),
        index=getattr(asked, "index", row.member),
        rollout_id=getattr(asked, "index", row.member),
        prompt=getattr(asked, "prompt", ""),
        tokens=filled.prompt_ids + filled.response_ids,
        response_length=len(filled.response_ids),
        loss_mask=filled.response_mask,
        rollout_log_probs=filled.response_logprobs,
        reward=row.reward if row.reward is not None else 0.0,
        remove_sample=not row.valid,
        status=status if row.valid else Sample.Status.FAILED,
        weight_versions=[str(version) for version in sorted(set(row.versions[row.mask].tolist()))],
        metadata={
            **(getattr(asked, "metadata", None) or {}),
            ABOUT: {"advantage": row.advantage, "valid": row.valid, "outcome": row.outcome},
        },
    )


def post_process_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """slime's reward post-processing: return the raw rewards, and the advantages as normalised rewards.

    A missing rollout has the mean of the valid rewards as its raw reward, so that the mean in slime's log does not
    count it, and the advantage 0. Unless slime takes the mean over tokens, it divides the loss by the number of
    all rollouts; the advantages are multiplied to make up for the missing ones.
    """
    about = [sample.metadata[ABOUT] for sample in samples]
    valid = {sample.rollout_id: sample.reward for sample, one in zip(samples, about, strict=True) if one["valid"]}
    mean = sum(valid.values()) / len(valid) if valid else 0.0
    everyone = len({sample.rollout_id for sample in samples})
    by_tokens = getattr(args, "calculate_per_token_loss", False)
    weight = 1.0 if by_tokens or not valid else everyone / len(valid)
    raw = [sample.reward if one["valid"] else mean for sample, one in zip(samples, about, strict=True)]
    return raw, [weight * one["advantage"] for one in about]


def convert_samples(args: Any, samples: list[Any]) -> dict[str, Any]:
    """slime's conversion of samples to training data, without the rows of missing rollouts.

    For `--custom-convert-samples-to-train-data-path`, with settings under which the number of rollouts per step
    may vary, such as `--use-dynamic-global-batch-size`. If all rollouts are missing, they stay and train nothing.
    """
    raw, rewards = post_process_rewards(args, samples)
    kept = [at for at, sample in enumerate(samples) if not sample.remove_sample] or list(range(len(samples)))
    share = len({samples[at].rollout_id for at in kept}) / len({sample.rollout_id for sample in samples})
    by_tokens = getattr(args, "calculate_per_token_loss", False)
    chosen = [samples[at] for at in kept]
    sums: dict[int, int] = {}
    for sample in chosen:
        sums[sample.rollout_id] = sums.get(sample.rollout_id, 0) + sum(sample.loss_mask)
    return {
        "tokens": [sample.tokens for sample in chosen],
        "response_lengths": [sample.response_length for sample in chosen],
        "rewards": [rewards[at] if by_tokens else share * rewards[at] for at in kept],
        "raw_reward": [raw[at] for at in kept],
        "truncated": [int(sample.status is sample.Status.TRUNCATED) for sample in chosen],
        "sample_indices": [sample.index for sample in chosen],
        "rollout_ids": [sample.rollout_id for sample in chosen],
        "loss_masks": [sample.loss_mask for sample in chosen],
        "rollout_mask_sums": [sums[sample.rollout_id] for sample in chosen],
        "rollout_log_probs": [sample.rollout_log_probs for sample in chosen],
    }


class RookeryDataSource:
    """slime's data source over the tasks of the environment, in order and epoch after epoch."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self._rows = make_task_rows(get_rollouts(args).tasks.values())
        if not self._rows:
            raise UsageError("the environment has no valid tasks")
        self._groups = 0
        self._returned: list[list[Any]] = []

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Return the next groups: first those that `add_samples` got, then new ones."""
        groups, self._returned = self._returned[:num_samples], self._returned[num_samples:]
        return groups + [self._make_group() for _ in range(num_samples - len(groups))]

    def _make_group(self) -> list[Any]:
        from slime.utils.types import Sample

        k, number = self.args.n_samples_per_prompt, self._groups
        row = self._rows[number % len(self._rows)]
        self._groups += 1
        return [
            Sample(
                group_index=number,
                index=number * k + member,
                prompt=row["prompt"],
                metadata={TASK_KEY: row[TASK_KEY]},
            )
            for member in range(k)
        ]

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Take back groups that were not used."""
        self._returned += samples

    def save(self, rollout_id: int) -> None:
        """Write the position to a file in slime's checkpoint directory."""
        path = self._get_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        returned = [group[0].group_index for group in self._returned]
        path.write_text(json.dumps({"groups": self._groups, "returned": returned}), encoding="utf-8")

    def load(self, rollout_id: int | None = None) -> None:
        """Continue at the position that `save` wrote. Without a checkpoint, start at the first task."""
        if rollout_id is None or not getattr(self.args, "load", None):
            return
        path = self._get_path(self.args.load, rollout_id)
        if not path.exists():
            log.warning("there is no position of the tasks in %s: starting at the first task", path)
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        for number in state["returned"]:
            self._groups = number
            self._returned.append(self._make_group())
        self._groups = state["groups"]

    @staticmethod
    def _get_path(folder: str, rollout_id: int) -> Path:
        return Path(folder) / "rollout" / f"rookery_{rollout_id}.json"

    def __len__(self) -> int:
        return len(self._rows)
