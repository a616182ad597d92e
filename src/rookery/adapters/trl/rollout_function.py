"""`rollout_func`: the function that `GRPOTrainer` calls instead of generating completions itself.

Guarantees:
- The function returns one row per prompt, in order. Adjacent prompts of the same task are a group.
- The policy has the weights of the current training step before the first rollout starts, unless `push=False`.
- A failed rollout is a row that does not train and has no reward. All rollouts of a group may fail.
- An error or Ctrl-C cancels running rollouts and leaves the Rookery engine usable. `close` closes that engine.
- Invalid combinations of settings raise `UsageError` before anything is sampled.
"""

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rookery.adapters.compatibility import RolloutChecks, TrainerSettings, check_version
from rookery.adapters.embedded import Push
from rookery.adapters.engine_holder import EngineHolder
from rookery.adapters.group_requests import run_groups
from rookery.adapters.task_rows import find_task, get_tasks, make_task_rows
from rookery.adapters.trl.weight_transfer import resolve_push
from rookery.core import Group, Sampling, Task, UsageError, derive_seed
from rookery.core.lifetimes import ClosesOnExit
from rookery.engine import SyncEngine
from rookery.environments import Environment, load_environment
from rookery.tasks import tasks_from
from rookery.training.advantages import Baseline
from rookery.training.config import BatchConfig
from rookery.training.rows import (
    Row,
    describe_row,
    fill_row,
    keep_one_row,
    make_rows,
    shape_rewards,
    split_by_rollout,
)
from rookery.upstreams.protocol import UpstreamConfig

TESTED = ("1.16.0", "1.17")
STREAM = "trl"
LOSSES_DIVIDED_BY_ROWS = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
"""Values of TRL's `loss_type` whose loss is divided by the number of rows, including rows that do not train."""

COLUMNS = {
    "prompt_ids": "prompt_ids",
    "completion_ids": "response_ids",
    "logprobs": "response_logprobs",
    "env_mask": "response_mask",
}
"""TRL's names of the columns, and the attributes of a row."""

log = logging.getLogger("rookery.adapters.trl")


def dataset(tasks: Iterable[Task | dict[str, Any] | str]) -> Any:
    """Return a `datasets.Dataset` with a row for each valid task, for the trainer's `train_dataset`."""
    from datasets import Dataset

    return Dataset.from_list(make_task_rows(tasks_from(tasks, "the dataset")))


class RolloutFunc(ClosesOnExit):
    """A `rollout_func` for TRL's `GRPOTrainer` that runs rollouts in a Rookery engine.

    `push` is the function that transfers the trainer's weights to the policy. It is not needed for a policy
    `embedded:PATH`, or with the trainer's `use_vllm`, where TRL transfers them; `push=False` means that the policy
    does not change. `segments` says what happens to a rollout with several segments: `most` trains only the one
    with the most trained tokens, `error` raises `UsageError`. Without `sampling`, the trainer's sampling
    parameters are used. `options` are arguments of `Engine`.

    The engine is opened on the first call. Call `close`, or use this object as a context manager, to close it.
    """

    def __init__(
        self,
        env: Environment | str,
        *,
        policy: str | Sequence[str] | UpstreamConfig,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        push: Push | bool | None = None,
        baseline: Baseline = "leave_one_out",
        segments: Literal["most", "error"] = "most",
        sampling: Sampling | None = None,
        **options: Any,
    ) -> None:
        if baseline not in ("leave_one_out", "mean"):
            raise UsageError(f"unknown baseline {baseline!r}: choose leave_one_out or mean")
        if segments not in ("most", "error"):
            raise UsageError(f"segments must be 'most' or 'error', not {segments!r}")
        self.environment = (
            env if isinstance(env, Environment) else load_environment(env, **options.get("arguments", {}))
        )
        self.tasks = get_tasks(self.environment, tasks)
        self._known = {task.id: task for task in self.tasks}
        self._push = resolve_push(policy, push)
        self._fixed_weights = push is False
        self._baseline: Baseline = baseline
        self._segments = segments
        self._sampling = sampling
        self._options = {"env": env, "policy": policy, **options}
        self._warned: set[str] = set()
        self._holder = EngineHolder()
        self._version: int | None = None
        self._checks: RolloutChecks | None = None
        check_version("trl", *TESTED)
        weakref.finalize(self, EngineHolder.close_in_thread, self._holder).atexit = False

    def dataset(self) -> Any:
        """Return a `datasets.Dataset` of the tasks, for the trainer's `train_dataset`."""
        return dataset(self.tasks)

    # ---- life

    def close(self) -> None:
        """Close the Rookery engine and cancel running rollouts.

        May be called twice. If the rollout function is called again later, it opens a new engine.
        """
        self._version = None
        self._holder.close()

    @property
    def engine(self) -> SyncEngine | None:
        """The open Rookery engine; None before the first call of the rollout function and after `close`."""
        return self._holder.engine

    def _open_engine(self, trainer: Any) -> SyncEngine:
        settings = _get_settings(trainer)
        if self._holder.engine is None or self._checks is None:
            options = {"seed": trainer.args.seed, **self._options}
            # Without this, parallel and resumed trainings would sample with the same seeds.
            salt = trainer.accelerator.process_index, int(trainer.state.global_step)
            options["seed"] = derive_seed(options["seed"], *salt)
            sampling = settings.settle_sampling(self._sampling)
            if self._sampling is None:
                extra = {"min_p": trainer.min_p, "repetition_penalty": trainer.repetition_penalty}
                extra = {name: value for name, value in extra.items() if value not in (None, 1.0)}
                sampling = Sampling(extra=extra).over(sampling)
            self._checks = RolloutChecks("TRL", settings, getattr(trainer, "processing_class", None))
            return self._holder.open(SyncEngine(sampling=sampling, **options))
        self._checks.check_unchanged(settings)
        return self._holder.engine

    # ---- a call

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Run one rollout per prompt and return the columns that TRL expects.

        The additional columns `rookery_reward` and `rollout` are for reward functions.
        """
        self._check(trainer)
        tasks = [find_task(prompt, self._known) for prompt in prompts]
        k = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        engine = self._open_engine(trainer)
        self._push_weights(engine, trainer)
        began = time.monotonic()
        groups, order = _run_tasks(engine, tasks, k)
        assert self._checks is not None
        self._checks.check_groups(groups, engine.folder)
        # TRL computes log probabilities that are missing.
        rollouts = split_by_rollout(make_rows(groups, BatchConfig(without_logprob="train", extras=())))
        rollouts = [part for _, part in sorted(zip(order, rollouts, strict=True), key=lambda item: item[0])]
        _log_rollouts([part[0] for part in rollouts], time.monotonic() - began)
        return self._make_columns(rollouts, trainer, k)

    def _check(self, trainer: Any) -> None:
        if trainer.tools or trainer.environment_factories is not None:
            raise UsageError(
                "the trainer has its own tools or environment_factory: with rollout_func, tools belong "
                "to the Rookery environment"
            )
        if self._push is None and not self._fixed_weights and not trainer.use_vllm:
            raise UsageError(
                "the trainer's weights do not reach the policy: use a policy embedded:PATH, pass "
                "push=… (a function that takes the tensors by name and their version), or push=False for a policy "
                "that does not change"
            )

    def _push_weights(self, engine: SyncEngine, trainer: Any) -> None:
        """Transfer the weights of the current training step to the policy, once per step."""
        version = int(trainer.state.global_step)
        if self._fixed_weights or version == self._version:
            return
        push = self._push
        if push is None:  # TRL has already pushed them to its vLLM; nothing is sampled meanwhile
            engine.resume(version)
        else:
            # Every process takes part in gathering a sharded model; only one pushes.
            tensors = trainer.accelerator.get_state_dict(trainer.model)
            first = trainer.accelerator.is_main_process
            with engine.sync(version, load=lambda: push(tensors, version) if first else None):
                trainer.accelerator.wait_for_everyone()
        self._version = version

    def _make_columns(self, rollouts: Sequence[list[Row]], trainer: Any, k: int) -> dict[str, list[Any]]:
        kept = keep_one_row([row for part in rollouts for row in part])
        for part in rollouts:
            self._check_segments(part)
        all_rewards, first = _gather_rewards([row.reward for row in kept], trainer)
        weight = self._weight(all_rewards, trainer)
        shaped = [
            reward
            for start in range(0, len(all_rewards), k)
            for reward in shape_rewards(all_rewards[start : start + k], baseline=self._baseline, weight=weight)
        ]
        rows = [fill_row(row, trainer.eos_token_ids[0]) for row in kept]
        return {
            **{name: [getattr(row, attribute) for row in rows] for name, attribute in COLUMNS.items()},
            "rookery_reward": shaped[first : first + len(kept)],
            "rollout": [_describe(part, row) for part, row in zip(rollouts, kept, strict=True)],
        }

    def _check_segments(self, part: list[Row]) -> None:
        if len(part) == 1:
            return
        if self._segments == "error":
            raise UsageError(
                f"rollout {part[0].rollout} of task {part[0].task} has {len(part)} segments, but GRPOTrainer "
                "takes one row per rollout: use RolloutWorker with AsyncGRPOTrainer, or segments='most'"
            )
        self._warn_once(
            "segments",
            (
                "rollout %s has %d segments: only the one with the most trained tokens is used "
                "(rookery/tokens_left_out counts the others)"
            ),
            part[0].rollout,
            len(part),
        )

    def _weight(self, rewards: Sequence[float | None], trainer: Any) -> float:
        """Return the factor for advantages that compensates for rows that do not train.

        It differs from 1 only if TRL divides the loss by the number of rows and some rollouts have no reward.
        """
        valid = sum(reward is not None for reward in rewards)
        if trainer.loss_type not in LOSSES_DIVIDED_BY_ROWS or valid in (0, len(rewards)):
            return 1.0
        if trainer.scale_rewards != "none":
            self._warn_once(
                "rows",
                (
                    "rollouts are missing and loss_type=%s divides by rows: with scale_rewards=%s the "
                    "other rollouts weigh too little; use scale_rewards='none', or a token-level loss such "
                    "as 'dapo'"
                ),
                trainer.loss_type,
                trainer.scale_rewards,
            )
            return 1.0
        return len(rewards) / valid

    def _warn_once(self, once: str, message: str, *values: object) -> None:
        if once not in self._warned:
            self._warned.add(once)
            log.warning(message, *values)


rollout_func = RolloutFunc
"""Return a rollout function for `GRPOTrainer`; the arguments are those of `RolloutFunc`."""


def _gather_rewards(rewards: Sequence[float | None], trainer: Any) -> tuple[list[float | None], int]:
    """Return the rewards of all trainer processes in order, and the index of the first reward of this process.

    They are gathered because a group may span two processes.
    """
    processes = trainer.accelerator.num_processes
    if processes == 1:
        return list(rewards), 0
    import torch

    own = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    gathered = trainer.accelerator.gather(own.to(trainer.accelerator.device)).tolist()
    all_rewards = [None if math.isnan(reward) else reward for reward in gathered]
    return all_rewards, trainer.accelerator.process_index * len(rewards)


def _get_settings(trainer: Any) -> TrainerSettings:
    return TrainerSettings(
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k or -1,
        max_tokens=trainer.max_completion_length,
    )


def _run_tasks(engine: SyncEngine, tasks: Sequence[Task], k: int) -> tuple[list[Group], list[int]]:
    """Run one rollout per entry of `tasks`. Up to k consecutive entries of the same task form a group.

    Return the groups, and for each of their rollouts in order the index in `tasks`.
    """
    runs: list[tuple[Task, list[int]]] = []
    for index, task in enumerate(tasks):
        if runs and runs[-1][0].id == task.id and len(runs[-1][1]) < k:
            runs[-1][1].append(index)
        else:
            runs.append((task, [index]))
    groups: list[Group] = []
    order: list[int] = []
    for size in sorted({len(indexes) for _, indexes in runs}, reverse=True):
        same_size = [(task, indexes) for task, indexes in runs if len(indexes) == size]
        groups += run_groups(engine, [task for task, _ in same_size], size, STREAM)
        order += [index for _, indexes in same_size for index in indexes]
    return groups, order


def _describe(part: list[Row], kept: Row) -> dict[str, Any]:
    """Return the data of a rollout that TRL passes to reward functions in the column `rollout`."""
    left = sum(row.trained for row in part) - kept.trained
    versions = sorted({int(version) for row in part for version in row.versions[row.mask]})
    count = sum(bool(len(row)) for row in part)
    return {**describe_row(kept), "versions": versions, "segments": count, "tokens_left_out": left}


def _log_rollouts(rollouts: Sequence[Row], seconds: float) -> None:
    missing = Counter(row.outcome for row in rollouts if not row.valid)
    valid = [row.reward for row in rollouts if row.reward is not None]
    log.log(
        logging.WARNING if missing else logging.INFO,
        "%d rollouts in %.1f s, mean reward %s, missing: %s",
        len(rollouts),
        seconds,
        f"{math.fsum(valid) / len(valid):.3f}" if valid else "-",
        ", ".join(f"{count} {cause}" for cause, count in missing.most_common()) or "none",
    )


def reward(
    *,
    rookery_reward: Sequence[float | None],
    rollout: Sequence[Mapping[str, Any]],
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Reward function for `GRPOTrainer`: return the adjusted rewards of Rookery's rollouts, None for failed ones.

    The rewards are adjusted so that TRL computes the requested advantages. `log_metric` receives metrics.
    """
    if log_metric is not None:
        for name, value in summarize_rollouts(rollout).items():
            log_metric(name, value)
    return list(rookery_reward)


def summarize_rollouts(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return metrics for the trainer's log: shares of missing rollouts by cause, and means over the valid
    rollouts.
    """
    valid = [rollout for rollout in rollouts if rollout["reward"] is not None]
    found = {"rookery/missing": 1.0 - len(valid) / len(rollouts)}
    for cause, count in Counter(one["outcome"] for one in rollouts if one["reward"] is None).items():
        found[f"rookery/missing/{cause}"] = count / len(rollouts)
    if valid:
        for name in ("reward", "turns", "tool_calls", "tokens_left_out"):
            found[f"rookery/{name}"] = math.fsum(one[name] for one in valid) / len(valid)
        for name in sorted({name for one in valid for name in one["metrics"]}):
            values = [one["metrics"][name] for one in valid if name in one["metrics"]]
            found[f"rookery/metrics/{name}"] = math.fsum(values) / len(values)
    return found
