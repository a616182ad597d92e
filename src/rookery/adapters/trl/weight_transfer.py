"""Transfer the weights of a TRL trainer to the policy, the model that rollouts sample from.

Guarantees:
- Weights are replaced while nothing is sampled, and tokens sampled later carry the new version.
- If a push (the function that transfers the weights) raises, sampling continues with the previous version number.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rookery.adapters.embedded import Push, push_weights
from rookery.core import UsageError
from rookery.engine.preflight import build_upstream_config
from rookery.upstreams.protocol import UpstreamConfig

if TYPE_CHECKING:
    from rookery.adapters.trl.rollout_worker import RolloutWorker

_EMBEDDED_PREFIX = "embedded:"


def resolve_push(policy: str | Sequence[str] | UpstreamConfig, push: Push | bool | None) -> Push | None:
    """Return the function that transfers weights to the policy, or None if Rookery does not transfer them.

    That is `push` if the user passed a function. For `push=None` and a policy `embedded:PATH`, it is
    `push_weights(PATH)`. For `push=False`, it is None.
    """
    if push is True:
        raise UsageError(
            "push=True is not valid: pass a function that takes the tensors by name and their version, or False "
            "or None"
        )
    if push is not None:
        return push or None
    urls = build_upstream_config(policy, "").urls
    return (
        push_weights(urls[0].removeprefix(_EMBEDDED_PREFIX))
        if urls and urls[0].startswith(_EMBEDDED_PREFIX)
        else None
    )


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
