"""`rollout_func`: the function that `GRPOTrainer` calls instead of generating completions itself.

Guarantees:
- The function returns one row per prompt, in order. Adjacent prompts of the same task are a group.
- The policy has the weights of the current training step before the first rollout starts, unless `push=False`.
- A failed rollout is a row that does not train and has no reward. All rollouts of a group may fail.
- An error or Ctrl-C cancels running rollouts and leaves the Rookery engine usable. `close` closes that engine.
- Invalid combinations of settings raise `UsageError` before anything is sampled.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rookery.adapters.compatibility import check_choice, keep_one_segment
from rookery.adapters.embedded import Push, resolve_push
from rookery.adapters.group_requests import make_requests
from rookery.adapters.trainer_engine import ThreadedTrainerEngine
from rookery.adapters.trl.columns import is_scaled_wrongly, make_columns
from rookery.adapters.trl.settings import TESTED, dataset, get_settings
from rookery.core import Sampling, Task, UsageError
from rookery.core.lifetimes import ClosesOnExit
from rookery.engine import SyncEngine
from rookery.environments import Environment
from rookery.training.advantages import Baseline
from rookery.training.config import BatchConfig
from rookery.training.rows import Row, make_rows, split_by_rollout
from rookery.upstreams.protocol import UpstreamConfig

log = logging.getLogger("rookery.adapters.trl")


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
        check_choice("baseline", baseline, ("leave_one_out", "mean"))
        check_choice("segments", segments, ("most", "error"))
        self._rollouts = ThreadedTrainerEngine(
            env, trainer="TRL", tested=TESTED, policy=policy, tasks=tasks, sampling=sampling, **options
        )
        self.tasks = self._rollouts.tasks
        self._push = resolve_push(policy, push)
        self._fixed_weights = push is False
        self._baseline: Baseline = baseline
        self._segments = segments
        self._warned: set[str] = set()
        self._version: int | None = None

    def dataset(self) -> Any:
        """Return a `datasets.Dataset` of the tasks, for the trainer's `train_dataset`."""
        return dataset(self.tasks)

    def close(self) -> None:
        """Close the Rookery engine and cancel running rollouts.

        May be called twice. If the rollout function is called again later, it opens a new engine.
        """
        self._version = None
        self._rollouts.close()

    @property
    def engine(self) -> SyncEngine | None:
        """The open Rookery engine; None before the first call of the rollout function and after `close`."""
        return self._rollouts.engine

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Run one rollout per prompt and return the columns that TRL expects, and those for `reward`."""
        self._check(trainer)
        tasks = [self._rollouts.find_task(prompt) for prompt in prompts]
        k = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        self._rollouts.tokenizer = getattr(trainer, "processing_class", None)
        salt = trainer.accelerator.process_index, int(trainer.state.global_step)
        settings = self._rollouts.accept_longer_context(get_settings(trainer), self._warn_once)
        engine = self._rollouts.open(settings, seed=trainer.args.seed, salt=salt)
        self._push_weights(engine, trainer)
        began = time.monotonic()
        groups = self._rollouts.run_groups(make_requests(tasks, k))
        log.info("%d rollouts in %.1f s", len(prompts), time.monotonic() - began)
        # TRL computes log probabilities that are missing.
        rollouts = split_by_rollout(make_rows(groups, BatchConfig(without_logprob="train", extras=())))
        self._check_rows(rollouts, trainer)
        return make_columns(rollouts, trainer, k, self._baseline, settings.context)

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

    def _check_rows(self, rollouts: Sequence[list[Row]], trainer: Any) -> None:
        """Refuse what TRL cannot express, or say once that it trains with a loss of information."""
        rows = [row for part in rollouts for row in part]
        keep_one_segment(rows, self._segments, "GRPOTrainer", "use RolloutWorker with AsyncGRPOTrainer")
        if len(rows) > len(rollouts):
            self._warn_once(
                "some rollouts have several segments: only the one with the most trained tokens is used "
                "(rookery/tokens_left_out counts the others)"
            )
        if not all(row.valid for row in rows) and is_scaled_wrongly(trainer):
            self._warn_once(
                f"rollouts are missing and loss_type={trainer.loss_type} divides by rows: with scale_rewards="
                f"{trainer.scale_rewards} the other rollouts weigh too little; use scale_rewards='none', or a "
                "token-level loss such as 'dapo'"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)


rollout_func = RolloutFunc
"""Return a rollout function for `GRPOTrainer`; the arguments are those of `RolloutFunc`."""
