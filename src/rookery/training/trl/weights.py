"""How the trainer's weights come to the policy.

Promises:
- weights are replaced while nothing is sampled, and what is sampled afterwards carries their version;
- a push that raises leaves the policy going on with the version before;
- a policy that nobody pushes weights to is refused, unless that was asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rookery.core import UsageError
from rookery.engine.checks import upstream_of
from rookery.upstreams.protocol import UpstreamConfig

if TYPE_CHECKING:
    from rookery.training.trl.worker import RolloutWorker

Push: TypeAlias = Callable[[Mapping[str, Any], int], object]
"""Called with the trainer's tensors by name and the version that they are."""
_EMBEDDED = "embedded:"


def push_weights(path: str | Path) -> Push:
    """A push to the embedded policy whose weights are at `path`: every process that serves it takes them up.

    The file that is there says the model's shape.
    """
    from rookery.upstreams.embedded import Weights

    target = Path(path).expanduser()

    def push(tensors: Mapping[str, Any], version: int) -> None:
        arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}
        Weights(Weights.load(target).shape, arrays, version=version).save(target)

    return push


def settled_push(policy: str | Sequence[str] | UpstreamConfig, push: Push | bool | None) -> Push | None:
    """The push that was given, or the one that an embedded policy with a path of its own has."""
    if push is True:
        raise UsageError("push is a function of the tensors and their version, or False for none")
    if push is not None:
        return push or None
    urls = upstream_of(policy, "").urls
    return push_weights(urls[0].removeprefix(_EMBEDDED)) if urls and urls[0].startswith(_EMBEDDED) else None


class WeightTransfer:
    """What `AsyncGRPOTrainer` takes as its `weight_transfer`: pauses the worker's model calls, pushes, resumes."""

    def __init__(self, worker: "RolloutWorker", push: Push) -> None:
        self._worker = worker
        self._push = push
        self._paused = False

    def init_weight_transfer(self) -> None:
        """There is nothing to set up."""

    def pause(self) -> None:
        """Returns when nothing is sampled any more."""
        self._worker.pause()
        self._paused = True

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Pushes all of them at once, as the version after the worker's."""
        try:
            self._push(dict(iterator), self._worker.version + 1)
        except BaseException:
            self._resume(None)
            raise

    def resume(self) -> None:
        """From now on the policy's turns carry the new version."""
        self._resume(self._worker.version + 1)

    def destroy(self) -> None:
        """Ends a pause that is still held."""
        self._resume(None)

    def _resume(self, version: int | None) -> None:
        if self._paused:
            self._paused = False
            self._worker.resume(version)
