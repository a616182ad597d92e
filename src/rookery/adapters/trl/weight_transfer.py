"""Transfer the weights of a TRL trainer to the policy, the model that rollouts sample from.

Guarantees:
- Weights are replaced while nothing is sampled, and tokens sampled later carry the new version.
- If a push (the function that transfers the weights) raises, sampling continues with the previous version number.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rookery.adapters.embedded import Push

if TYPE_CHECKING:
    from rookery.adapters.trl.rollout_worker import RolloutWorker


class WeightTransfer:
    """The `weight_transfer` of an `AsyncGRPOTrainer`: pauses the worker's model calls, pushes weights, resumes."""

    def __init__(self, worker: "RolloutWorker", push: Push) -> None:
        self._worker = worker
        self._push = push
        self._paused = False

    def init_weight_transfer(self) -> None:
        """Do nothing. TRL calls this method, but no set-up is needed."""

    def pause(self) -> None:
        """Pause sampling; return when no model call is running."""
        self._worker.pause()
        self._paused = True

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Push all weights to the policy, as the version after the worker's current one.

        If that raises, sampling resumes with the current version.
        """
        try:
            self._push(dict(iterator), self._worker.version + 1)
        except BaseException:
            self._resume(None)
            raise

    def resume(self) -> None:
        """Resume sampling. Tokens sampled from now on carry the next version number."""
        self._resume(self._worker.version + 1)

    def destroy(self) -> None:
        """Resume sampling if it is still paused, without a new version."""
        self._resume(None)

    def _resume(self, version: int | None) -> None:
        if self._paused:
            self._paused = False
            self._worker.resume(version)
