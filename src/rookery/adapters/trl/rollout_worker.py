"""`RolloutWorker`: a `rollout_worker` for `AsyncGRPOTrainer` that runs any Rookery environment.

Guarantees, besides those of `rookery.adapters.background_rollouts`:
- All samples of a group are queued one after the other, with the oldest policy version of the group's tokens. A
  group in which all rollouts failed gives no samples.
- With the trainer's `args`, sampling parameters that contradict them raise `UsageError` at construction.
  Parameters that the trainer changes after `start` end the worker, and `check_health` raises.
"""

import logging
import queue
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from rookery.adapters.background_rollouts import BackgroundRollouts
from rookery.adapters.compatibility import TrainerSettings, check_choice
from rookery.adapters.embedded import Push, resolve_push
from rookery.adapters.trainer_engine import ThreadedTrainerEngine
from rookery.adapters.trl.samples import MetricValue, make_samples
from rookery.adapters.trl.settings import TESTED, dataset, get_settings
from rookery.adapters.trl.weight_transfer import WeightTransfer
from rookery.core import Group, Sampling, Task
from rookery.engine.group_channel import GroupFilter
from rookery.environments import Environment
from rookery.training.advantages import Baseline
from rookery.upstreams.protocol import UpstreamConfig

MAX_METRICS: Final = 4096

log = logging.getLogger("rookery.adapters.trl")


class RolloutWorker(BackgroundRollouts):
    """Runs rollouts for TRL's `AsyncGRPOTrainer` in a thread of the trainer's process.

    Use it as `AsyncGRPOTrainer(…, rollout_worker=worker, weight_transfer=worker.weight_transfer)`.
    """

    def __init__(
        self,
        env: Environment | str,
        *,
        policy: str | Sequence[str] | UpstreamConfig,
        k: int,
        args: Any = None,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        push: Push | bool | None = None,
        baseline: Baseline = "leave_one_out",
        keep: GroupFilter | str | None = None,
        queue_size: int | None = None,
        buffer: int = 2,
        sampling: Sampling | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        """Create a worker; `start` starts it.

        `k` is the trainer's `num_generations`, and `args` its `AsyncGRPOConfig`, whose sampling parameters are
        used and compared with `sampling`. `push` transfers weights to the policy; see `rollout_func`. `keep`
        selects the groups to train on. `queue_size` is the maximum number of samples in the queue (default: 8 *
        k), and `buffer` that of finished groups waiting for the queue. `tokenizer` is the trainer's, to check that
        the policy has the same. `options` are arguments of `Engine`.
        """
        check_choice("baseline", baseline, ("leave_one_out", "mean"))
        rollouts = ThreadedTrainerEngine(
            env,
            trainer="TRL",
            tested=TESTED,
            policy=policy,
            tasks=tasks,
            sampling=sampling,
            tokenizer=tokenizer,
            **options,
        )
        super().__init__(
            rollouts,
            _assume_settings(sampling) if args is None else get_settings(args),
            k=k,
            keep=keep,
            buffer=buffer,
            queue_size=8 * k if queue_size is None else queue_size,
        )
        self.metrics_queue: queue.Queue[dict[str, MetricValue]] = queue.Queue(maxsize=MAX_METRICS)
        chosen = resolve_push(policy, push)
        self.weight_transfer = None if chosen is None else WeightTransfer(self, chosen)
        """Value for the trainer's argument `weight_transfer`; None if Rookery transfers no weights, for example
        because TRL transfers them to its vLLM server."""
        self._baseline: Baseline = baseline
        self._args = args

    def start(self) -> None:
        """Open the engine with the trainer's current settings, and start to produce groups."""
        if self._args is not None:
            self._settings = get_settings(self._args)
        super().start()

    def dataset(self) -> Any:
        """Return a `datasets.Dataset` of the tasks, from which the trainer derives the length of an epoch."""
        return dataset(self.tasks)

    def update_model_version(self, model_version: int) -> None:
        """Set the policy version that tokens sampled from now on carry."""
        if model_version != self.version:
            self.resume(model_version)

    async def deliver(self, group: Group) -> None:
        """Put the samples of a group into the queue, waiting while the queue is full.

        Raise `UsageError` if the trainer's sampling parameters have changed since `start`.
        """
        if self._args is not None:
            now = get_settings(self._args)
            self._rollouts.check_unchanged(msgspec.structs.replace(now, context=self._settings.context))
        samples, figures = make_samples(
            group, baseline=self._baseline, version=self.version, context=self._settings.context
        )
        try:
            self.metrics_queue.put_nowait(figures)
        except queue.Full:
            log.debug("the trainer does not read metrics; dropping %s", sorted(figures))
        for sample in samples:
            await self.put(sample)


def _assume_settings(sampling: Sampling | None) -> TrainerSettings:
    """Return settings of a trainer that is not known: those of `sampling`, and TRL's defaults for the others."""
    given = sampling or Sampling()
    named = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k")}
    return TrainerSettings(**{name: value for name, value in named.items() if value is not None})
