"""Transfer the trainer's weights to the policy.

Guarantees:
- Weights are replaced while nothing is sampled, and later samples carry their version.
- If a push raises, the policy continues with the previous version.
- A policy that receives no weights is rejected, unless requested.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rookery.core import UsageError
from rookery.engine.preflight import build_upstream_config
from rookery.upstreams.protocol import UpstreamConfig

if TYPE_CHECKING:
    from rookery.training.trl.rollout_worker import RolloutWorker

Push: TypeAlias = Callable[[Mapping[str, Any], int], object]
"""Called with the trainer's tensors by name and their version."""
_EMBEDDED_PREFIX = "embedded:"


def push_weights(path: str | Path) -> Push:
    """Return a push to the embedded policy with weights at `path`; every process that serves it loads the new
    file.

    The existing file defines the shape of the model.
    """
    from rookery.upstreams.embedded import Weights

    target = Path(path).expanduser()

    def push(tensors: Mapping[str, Any], version: int) -> None:
        arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}
        Weights(Weights.load(target).shape, arrays, version=version).save(target)

    return push


def resolve_push(policy: str | Sequence[str] | UpstreamConfig, push: Push | bool | None) -> Push | None:
    """Return the push passed by the user, or the default of an embedded policy with its own path."""
    if push is True:
        raise UsageError("push must be a function of the tensors and their version, or False")
    if push is not None:
        return push or None
    urls = build_upstream_config(policy, "").urls
    return (
        push_weights(urls[0].removeprefix(_EMBEDDED_PREFIX))
        if urls and urls[0].startswith(_EMBEDDED_PREFIX)
        else None
    )


class WeightTransfer:
    """A `weight_transfer` for `AsyncGRPOTrainer`: pause the worker's model calls, push, resume."""

    def __init__(self, worker: "RolloutWorker", push: Push) -> None:
        self._worker = worker
        self._push = push
        self._paused = False

    def init_weight_transfer(self) -> None:
        """Do nothing: no set-up is needed."""

    def pause(self) -> None:
        """Pause sampling; return when no model call is running."""
        self._worker.pause()
        self._paused = True

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Push all weights, as the next version of the worker."""
        try:
            self._push(dict(iterator), self._worker.version + 1)
        except BaseException:
            self._resume(None)
            raise

    def resume(self) -> None:
        """Resume sampling; turns carry the new version from now on."""
        self._resume(self._worker.version + 1)

    def destroy(self) -> None:
        """End a pause that is still active."""
        self._resume(None)

    def _resume(self, version: int | None) -> None:
        if self._paused:
            self._paused = False
            self._worker.resume(version)
