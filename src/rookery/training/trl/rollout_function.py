"""`rollout_func`: the function that `GRPOTrainer` calls instead of generating completions itself.

Guarantees:
- The function returns one row per prompt, in order. Adjacent prompts of the same task are a group.
- The policy has the weights of the current training step before the first rollout starts, unless `push=False`.
- A failed rollout is a row that does not train and has no reward. All rollouts of a group may fail.
- An error or Ctrl-C cancels running rollouts and leaves the Rookery engine usable. `close` closes that engine.
- Invalid combinations of settings raise `UsageError` before anything is sampled.
"""

import atexit
import logging
import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import Any, Literal

from rookery.core import Rollout, RookeryError, Sampling, Task, UsageError, derive_seed
from rookery.core.lifetimes import ClosesOnExit
from rookery.engine import SyncEngine
from rookery.environments import Environment, load_environment
from rookery.training.trl.prompts import dataset, find_task, get_tasks
from rookery.training.trl.rows import (
    Baseline,
    TrlRow,
    describe_rollout,
    fail_unusable_rollouts,
    find_most_trained,
    get_trained_segments,
    make_missing_row,
    row_from_segment,
    shape_rewards,
)
from rookery.training.trl.weight_transfer import Push, resolve_push
from rookery.upstreams.protocol import UpstreamConfig

STREAM = "trl"
LOSSES_DIVIDED_BY_ROWS = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
"""Values of TRL's `loss_type` whose loss is divided by the number of rows, including rows that do not train."""

log = logging.getLogger("rookery.training.trl")


class _EngineHolder:
    """Holds the open Rookery engine of a `RolloutFunc`.

    It is a separate object, so that the engine can be closed after the `RolloutFunc` was garbage-collected.
    """

    def __init__(self) -> None:
        self.engine: SyncEngine | None = None

    def open(self, engine: SyncEngine) -> SyncEngine:
        engine.__enter__()
        self.engine = engine
        _open_holders.add(self)
        _register_close()
        return engine

    def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.__exit__(None, None, None)

    def close_in_thread(self) -> None:
        """Close the engine in a new thread.

        Garbage collection may run in the engine's thread, which would deadlock.
        """
        if self.engine is not None:
            threading.Thread(target=self.close, name="rookery-trl-close").start()


_open_holders: "weakref.WeakSet[_EngineHolder]" = weakref.WeakSet()


@cache
def _register_close() -> None:
    """Arrange that open Rookery engines are closed at interpreter exit; their threads do not end on their own."""
    # `atexit` handlers run too late: thread pools are already shut down, and closing an engine needs one.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


def _close_all() -> None:
    for holder in list(_open_holders):
        holder.close()


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
        self._holder = _EngineHolder()
        self._version: int | None = None
        weakref.finalize(self, _EngineHolder.close_in_thread, self._holder).atexit = False

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
        if self._holder.engine is None:
            options = {"seed": trainer.args.seed, **self._options}
            # Without this, parallel and resumed trainings would sample with the same seeds.
            salt = trainer.accelerator.process_index, int(trainer.state.global_step)
            options["seed"] = derive_seed(options["seed"], *salt)
            return self._holder.open(SyncEngine(sampling=self._get_sampling(trainer), **options))
        return self._holder.engine

    def _get_sampling(self, trainer: Any) -> Sampling:
        """Return the user's sampling parameters, or else the trainer's.

        Raise `UsageError` if the user's temperature differs from that of the trainer.
        """
        if self._sampling is not None:
            temperature = self._sampling.temperature
            if temperature is not None and not math.isclose(temperature, trainer.temperature):
                raise UsageError(
                    f"the policy would sample at temperature {temperature:g}, but the trainer computes at "
                    f"{trainer.temperature:g}: use the same for both"
                )
            return self._sampling.over(Sampling(temperature=trainer.temperature))
        extra = {"min_p": trainer.min_p, "repetition_penalty": trainer.repetition_penalty}
        return Sampling(
            temperature=trainer.temperature,
            top_p=trainer.top_p if trainer.top_p < 1.0 else None,
            top_k=trainer.top_k if trainer.top_k and trainer.top_k > 0 else None,
            max_tokens=trainer.max_completion_length,
            extra={name: value for name, value in extra.items() if value not in (None, 1.0)},
        )

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
        rollouts = _collect_rollouts(engine, tasks, k)
        _log_rollouts(rollouts, time.monotonic() - began)
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

    def _make_columns(self, rollouts: Sequence[Rollout], trainer: Any, k: int) -> dict[str, list[Any]]:
        filler = trainer.eos_token_ids[0]
        rows = [self._row(rollout, filler) for rollout in rollouts]
        rewards = [rollout.reward if rollout.valid else None for rollout in rollouts]
        all_rewards, first = _gather_rewards(rewards, trainer)
        weight = self._weight(all_rewards, trainer)
        shaped = shape_rewards(all_rewards, k, baseline=self._baseline, weight=weight)[
            first : first + len(rewards)
        ]
        return {
            **{name: [getattr(row, name) for row in rows] for name in TrlRow._fields},
            "rookery_reward": shaped,
            "rollout": [describe_rollout(rollout) for rollout in rollouts],
        }

    def _row(self, rollout: Rollout, filler: int) -> TrlRow:
        segments = get_trained_segments(rollout)
        if not segments:
            return make_missing_row(filler)
        if len(segments) > 1:
            if self._segments == "error":
                raise UsageError(
                    f"rollout {rollout.id} of task {rollout.task} has {len(segments)} segments, but "
                    "GRPOTrainer takes one row per rollout: use RolloutWorker with AsyncGRPOTrainer, "
                    "or segments='most'"
                )
            self._warn_once(
                "segments",
                (
                    "rollout %s has %d segments: only the one with the most trained tokens is used "
                    "(rookery/tokens_left_out counts the others)"
                ),
                rollout.id,
                len(segments),
            )
        return row_from_segment(find_most_trained(segments))

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


def _collect_rollouts(engine: SyncEngine, tasks: Sequence[Task], k: int) -> list[Rollout]:
    """Run one rollout per entry of `tasks` and return them in order.

    Up to k consecutive entries of the same task form a group.
    """
    runs: list[tuple[Task, list[int]]] = []
    for index, task in enumerate(tasks):
        if runs and runs[-1][0].id == task.id and len(runs[-1][1]) < k:
            runs[-1][1].append(index)
        else:
            runs.append((task, [index]))
    rollouts: dict[int, Rollout] = {}
    for size in sorted({len(indexes) for _, indexes in runs}, reverse=True):
        same_size = [(task, indexes) for task, indexes in runs if len(indexes) == size]
        waiting: dict[str, deque[list[int]]] = {}
        for task, indexes in same_size:
            waiting.setdefault(task.id, deque()).append(indexes)
        # An iterator, because a list must not contain a task twice.
        groups = engine.groups(
            iter([task for task, _ in same_size]),
            k=size,
            name=STREAM,
            restart=True,
            buffer=max(1, len(same_size)),
            need_tokens=True,
        )
        with closing(groups):
            for group in groups:
                indexes = waiting[group.task.id].popleft()
                rollouts.update(zip(indexes, fail_unusable_rollouts(group).rollouts, strict=True))
    if len(rollouts) != len(tasks):
        raise RookeryError(
            f"the Rookery engine returned {len(rollouts)} rollouts, but {len(tasks)} were requested"
        )
    return [rollouts[index] for index in range(len(tasks))]


def _log_rollouts(rollouts: Sequence[Rollout], seconds: float) -> None:
    missing = Counter(describe_rollout(rollout)["outcome"] for rollout in rollouts if not rollout.valid)
    valid = [rollout.reward for rollout in rollouts if rollout.valid and rollout.reward is not None]
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
