"""SkyRL: a generator that runs the rollouts of a training batch in Rookery.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            url = inference_engine_client.get_endpoint_url()
            return RookeryGenerator("arithmetic", config=cfg, policy=url, tokenizer=tokenizer)

Guarantees:
- In training, the sampling parameters of a batch are those of the configuration, with which SkyRL computes log
  probabilities. Others raise `UsageError`, and so does another temperature in `trainer.algorithm`.
- The output has the order of the input. Token IDs, masks and log probabilities are those of the journal.
- SkyRL counts the reward of every row in the baseline, also that of a masked row. So a group with a missing
  rollout is masked as a whole and counted in a metric (`missing="mask"`), or the missing rollout gets the mean of
  the valid rewards (`missing="mean"`), which is allowed only without division by the standard deviation.
- A rollout with several segments needs step-wise trajectories. Otherwise it raises `UsageError`, or only the
  segment with the most trained tokens is kept (`segments="most"`).
"""

import asyncio
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final, Literal

import msgspec

from rookery.adapters.compatibility import TrainerSettings, check_choice, keep_one_segment, parse_sampling
from rookery.adapters.trainer_engine import TrainerEngine
from rookery.core import Group, UsageError
from rookery.environments import Environment
from rookery.training.rows import (
    Row,
    clip_rows,
    count_left_out_tokens,
    fill_row,
    make_rows,
    mask_incomplete_groups,
    shape_rewards,
    split_by_group,
    split_by_rollout,
    summarize_rows,
)
from rookery.upstreams import UpstreamConfig

TESTED: Final = ("skyrl", "0.4", "0.5")


class RookeryGenerator:
    """Implements SkyRL's `GeneratorInterface`.

    `config` is SkyRL's configuration; it decides whether several segments and missing members can be expressed.
    `tokenizer` is SkyRL's; with the first rollouts it is compared with the policy's.
    """

    def __init__(
        self,
        env: Environment | str,
        *,
        config: Any,
        policy: str | Sequence[str] | UpstreamConfig,
        missing: Literal["mask", "mean"] = "mask",
        segments: Literal["error", "most"] = "error",
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        check_choice("missing", missing, ("mask", "mean"))
        check_choice("segments", segments, ("error", "most"))
        algorithm = config.trainer.algorithm
        if missing == "mean" and (algorithm.advantage_estimator != "grpo" or algorithm.grpo_norm_by_std):
            raise UsageError(
                "missing='mean' changes the standard deviation of a group: set "
                "trainer.algorithm.advantage_estimator=grpo and trainer.algorithm.grpo_norm_by_std=false, or use "
                "missing='mask'"
            )
        self._step_wise = bool(config.generator.step_wise_trajectories)
        self._missing, self._segments = missing, segments
        self._filler = int(getattr(tokenizer, "eos_token_id", None) or 0)
        self._settings = _get_settings(config)
        if algorithm.temperature not in (None, self._settings.temperature):
            raise UsageError(
                f"trainer.algorithm.temperature is {algorithm.temperature:g}, but SkyRL samples with "
                f"generator.sampling_params.temperature {self._settings.temperature:g}: use the same for both"
            )
        options["limits"] = self._settings.settle_limits(options.get("limits"))
        self.rollouts = TrainerEngine(
            env, trainer="SkyRL", tested=TESTED, policy=policy, tokenizer=tokenizer, **options
        )

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        """Run the rollouts of a batch and return SkyRL's `GeneratorOutput`."""
        prompts = input_batch["prompts"]
        extras = input_batch.get("env_extras") or [{}] * len(prompts)
        ids = input_batch.get("trajectory_ids")
        params = input_batch.get("sampling_params") or {}
        sampling = parse_sampling(params)
        metadata = input_batch.get("batch_metadata")
        evaluates = metadata is not None and metadata.training_phase == "eval"
        if not evaluates:
            self._settings.settle_sampling(sampling)
        keys = [str(at) for at in range(len(prompts))] if ids is None else [one.instance_id for one in ids]
        pending: list[asyncio.Task[Group]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for _, part in groupby(range(len(prompts)), key=keys.__getitem__):
                    members = list(part)
                    task = self.rollouts.find_task(prompts[members[0]], extras[members[0]].get("task"))
                    task = msgspec.structs.replace(task, sampling=sampling)
                    pending.append(tasks.create_task(self.rollouts.run(task, len(members))))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        rows = clip_rows(make_rows([one.result() for one in pending]), self._settings.context)
        return self._make_output(rows, ids)

    def _make_output(self, rows: list[Row], ids: Sequence[Any] | None) -> dict[str, Any]:
        metrics = summarize_rows(rows)
        advice = "set generator.step_wise_trajectories=true"
        kept = rows if self._step_wise else keep_one_segment(rows, self._segments, "SkyRL", advice)
        metrics["rookery/tokens_left_out"] = float(count_left_out_tokens(rows, kept))
        if self._missing == "mask":
            complete = sum(row.valid for row in kept)
            kept = mask_incomplete_groups(kept)
            metrics["rookery/masked_rows"] = float(complete - sum(row.valid for row in kept))
        rewards = [
            reward
            for part in split_by_group(kept)
            for reward in shape_rewards(
                [one[0].reward for one in split_by_rollout(part)], baseline="mean", fill_missing=True
            )
        ]
        output: dict[str, Any] = {
            **{name: [] for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks")},
            **{name: [] for name in ("stop_reasons", "rollout_logprobs", "is_last_step", "trajectory_ids")},
            "rollout_metrics": metrics,
        }
        for number, (part, reward) in enumerate(zip(split_by_rollout(kept), rewards, strict=True)):
            for at, row in enumerate(part):
                filled = fill_row(row, self._filler)
                last = at == len(part) - 1
                output["prompt_token_ids"].append(filled.prompt_ids)
                output["response_ids"].append(filled.response_ids)
                output["loss_masks"].append(filled.response_mask)
                output["rollout_logprobs"].append(filled.response_logprobs)
                output["rewards"].append(reward if last else 0.0)
                output["stop_reasons"].append("length" if row.truncated else "stop")
                output["is_last_step"].append(last)
                output["trajectory_ids"].append(None if ids is None else ids[number])
        if not self._step_wise:
            del output["is_last_step"]
        if ids is None:
            del output["trajectory_ids"]
        return output


def _get_settings(config: Any) -> TrainerSettings:
    """Return what SkyRL assumes about rollouts for training."""
    params = config.generator.sampling_params
    prompt = config.generator.max_input_length or config.trainer.max_prompt_length
    context = prompt + params.max_generate_length
    return TrainerSettings(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, context=context)
