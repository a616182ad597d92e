"""slime's rollout function, and the engines in which its rollouts run: one for training, one for evaluation."""

import json
import os
from pathlib import Path
from typing import Any, Final

from rookery.adapters.compatibility import TrainerSettings
from rookery.adapters.slime.samples import make_sample
from rookery.adapters.task_rows import TASK_KEY
from rookery.adapters.trainer_engine import TRAINING, ThreadedTrainerEngine
from rookery.core import Task, UsageError
from rookery.training.config import BatchConfig
from rookery.training.rows import Row, clip_rows, make_rows, split_by_rollout, summarize_rows
from rookery.upstreams.protocol import UpstreamConfig

TESTED: Final = ("slime", "0.3.1", "0.4")
EVALUATION: Final = "evaluation"
FILE_VARIABLE: Final = "ROOKERY_SLIME"
"""Environment variable that names a JSON file with the settings, if `args.rookery` is not set."""

_opened: dict[str, ThreadedTrainerEngine] = {}
"""The engines of this process, which is slime's rollout manager."""


def get_rollouts(args: Any) -> ThreadedTrainerEngine:
    """Return the engines of this process. The first call creates them from slime's arguments."""
    if not _opened:
        _opened[TRAINING] = _make_rollouts(args)
    return _opened[TRAINING]


def close_rollouts() -> None:
    """Cancel running rollouts and close the engines of this process. The end of the interpreter does it, too."""
    while _opened:
        _opened.popitem()[1].close()


def _make_rollouts(args: Any) -> ThreadedTrainerEngine:
    options = dict(_read_settings(args))
    options.pop("eval_tasks", None)
    _get_trainer_settings(args, TRAINING)  # refuses what slime cannot express
    paths = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    if not any(getattr(args, path, "") for path in paths) and hasattr(args, paths[0]):
        raise UsageError(
            "slime's own normalisation counts failed rollouts in its baseline: set "
            "--custom-reward-post-process-path rookery.adapters.slime.post_process_rewards"
        )
    if "policy" not in options:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        options["policy"] = UpstreamConfig(kind="sglang", urls=(url,))
        options |= {"record": "tokens", "rendering": {"tokenizer": args.hf_checkpoint}}
    tokenizer = None
    if getattr(args, "hf_checkpoint", None):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    return ThreadedTrainerEngine(
        options.pop("env"), trainer="slime", tested=TESTED, tokenizer=tokenizer, **options
    )


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


def _get_trainer_settings(args: Any, purpose: str) -> TrainerSettings:
    """Return what slime assumes: its arguments for rollouts, or those for evaluation if they are set."""

    def get(name: str, default: Any) -> Any:
        found = getattr(args, f"eval_{name}", None) if purpose == EVALUATION else None
        return found if found is not None else getattr(args, f"rollout_{name}", default)

    top_p = get("top_p", 1.0)
    if purpose == TRAINING and top_p != 1.0:
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


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's rollout function: run the groups of a training step, or the evaluation tasks."""
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput

    rollouts = get_rollouts(args)
    if evaluation:
        k = getattr(args, "n_samples_per_eval_prompt", None) or 1
        names = _read_settings(args).get("eval_tasks") or [task.id for task in rollouts.tasks]
        tasks = [rollouts.find_task(None, name) for name in names]
        rows = _run(args, rollout_id, [(task, k) for task in tasks], EVALUATION)
        samples = [make_sample(row, None) for part in split_by_rollout(rows) if (row := part[-1]).valid]
        data = {
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status is sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
        return RolloutFnEvalOutput(data={rollouts.environment.title: data}, metrics=summarize_rows(rows))
    asked = data_source.get_samples(getattr(args, "rollout_batch_size", None) or 1)
    requests = [
        (rollouts.find_task(one[0].prompt, (one[0].metadata or {}).get(TASK_KEY)), len(one)) for one in asked
    ]
    rows = _run(args, rollout_id, requests, TRAINING)
    by_rollout = iter(split_by_rollout(rows))
    made = [[make_sample(row, member) for member in one for row in next(by_rollout)] for one in asked]
    return RolloutFnTrainOutput(samples=made, metrics=summarize_rows(rows))


def _run(args: Any, rollout_id: int, requests: list[tuple[Task, int]], purpose: str) -> list[Row]:
    rollouts, settings = get_rollouts(args), _get_trainer_settings(args, purpose)
    # The salt is the number of the first step, so that a resumed training does not repeat the seeds.
    rollouts.open(settings, purpose=purpose, seed=getattr(args, "rollout_seed", 0), salt=(rollout_id,))
    groups = rollouts.run_groups(requests, purpose=purpose)
    return clip_rows(make_rows(groups, BatchConfig(extras=())), settings.context)
