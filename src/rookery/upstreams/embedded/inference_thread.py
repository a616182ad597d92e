"""The thread that samples from the embedded model.

Guarantees, in addition to those of `sampling_thread`:
- `swap` affects only sequences that start later: one version of the weights samples a sequence from its first
  token to its last; old weights are freed when their last sequence has ended.
"""

from collections.abc import Callable
from weakref import WeakValueDictionary

from rookery.upstreams.embedded.batch import SLOTS, Batch, SamplingJob
from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.weights import Weights
from rookery.upstreams.sampling_thread import SamplingThread


class InferenceThread(SamplingThread[SamplingJob, Batch]):
    """Sample sequences in a thread. At most `slots` are sampled at a time."""

    def __init__(self, llama: Llama, *, slots: int = SLOTS) -> None:
        super().__init__("embedded policy")
        self._slots = slots
        self.batch = self.new_batch(llama)
        """The batch of new sequences."""
        self._old_batches: WeakValueDictionary[Llama, Batch] = WeakValueDictionary()
        """Batches that use replaced weights, by model. They exist for as long as they have sequences."""

    def new_batch(self, llama: Llama) -> Batch:
        return Batch(llama, slots=self._slots)

    @property
    def llama(self) -> Llama:
        """The model that serves new sequences."""
        return self.batch.llama

    def swap(self, weights: Weights) -> None:
        """Use these weights for sequences that start from now on.

        Preparing the weights is slow: do not call this on an event loop.
        """
        fresh = self.new_batch(Llama(weights))
        with self._lock:
            self._old_batches[self.batch.llama] = self.batch
            self.batch = fresh

    async def run(
        self,
        job: SamplingJob,
        on_tokens: Callable[[SamplingJob], None] | None = None,
        *,
        llama: Llama | None = None,
    ) -> int:
        """Sample a sequence with `sample`, and return the version of the weights that sampled it.

        `llama` is the model to use; None for the newest.
        """
        with self._lock:
            batch = self._batch_of(llama)
        version = batch.llama.version
        await self.sample(job, batch, on_tokens)
        return version

    def _batch_of(self, llama: Llama | None) -> Batch:
        if llama is None or llama is self.batch.llama:
            return self.batch
        batch = self._old_batches.get(llama)
        if batch is None:
            batch = self._old_batches[llama] = self.new_batch(llama)
        return batch

    # ---- on the thread

    def _batches(self) -> set[Batch]:
        # A batch with old weights continues beside the new one.
        return {pending.batch for pending in self._pending.values()}

    def _recover(self, batch: Batch, failed: list[SamplingJob]) -> None:  # noqa: ARG002  (they go with the batch)
        """Replace the batch, because its state may be inconsistent."""
        with self._lock:
            self._old_batches.pop(batch.llama, None)
            if self.batch is batch:
                self.batch = self.new_batch(batch.llama)
