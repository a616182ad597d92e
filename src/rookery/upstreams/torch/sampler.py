"""The thread that samples from a torch model, and the interface through which event loops and a trainer use it.

Guarantees, in addition to those of `sampling_thread`:
- `load_weights` replaces the weights between two steps, from memory. Running sequences continue with the new
  weights, unless they were aborted first; each token carries the policy version that sampled it;
- while the sampler is frozen, no token is sampled. Sequences stay in the KV cache, and new ones wait.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import msgspec
import torch

from rookery.upstreams.sampling_thread import SamplingThread
from rookery.upstreams.torch.batch import Batch, SampledSequence
from rookery.upstreams.torch.decoder import Decoder
from rookery.upstreams.torch.loading import LoadedModel, check_model, find_end_tokens

MAX_SLOTS: Final = 256
CPU_SLOTS: Final = 16
MAX_CONTEXT: Final = 4096
"""The default limit on the length of a sequence. The KV cache has this many positions for each slot."""
_MEMORY_SHARE: Final = 0.5
"""Share of the free GPU memory that the KV cache may use, unless the number of slots is given."""


class SamplerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a sampler since it started."""

    version: int
    slots: int
    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    """Prompt tokens that were computed."""
    reused_tokens: int
    """Prompt tokens that the prefix cache had."""
    sampled_tokens: int
    weight_updates: int
    frozen: bool


class Sampler(SamplingThread[SampledSequence, Batch]):
    """Samples sequences from a torch model in a thread."""

    def __init__(
        self, loaded: LoadedModel, *, slots: int | None = None, context: int | None = None, version: int = 0
    ) -> None:
        """Copy the weights of a loaded model. The model itself is not used afterwards.

        `slots` is how many sequences are sampled at a time, and `context` the maximum length of each. Their
        defaults depend on the model and the memory of the device.
        """
        super().__init__("torch sampler")
        model, self.tokenizer = loaded
        check_model(model)
        self.end_tokens = find_end_tokens(model, self.tokenizer)
        limit = int(model.config.max_position_embeddings)
        self.context = min(limit, context or MAX_CONTEXT)
        self.slots = slots or _default_slots(model, self.context)
        self.batch = Batch(Decoder(model, slots=self.slots, context=self.context), version=version)
        self._weight_updates = 0
        self._frozen_since: float | None = None
        self._frozen_seconds = 0.0

    # ---- state, from any thread

    @property
    def version(self) -> int:
        """The policy version of the weights. Setting it renames the version of the current weights."""
        return self.batch.version

    @version.setter
    def version(self, version: int) -> None:
        self.batch.version = version

    @property
    def vocabulary(self) -> int:
        """Number of token IDs."""
        return self.batch.decoder.vocabulary

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights that one step reads."""
        return self.batch.decoder.weight_bytes

    def stats(self) -> SamplerStats:
        """Return the current counters."""
        batch = self.batch
        return SamplerStats(
            version=batch.version,
            slots=self.slots,
            running=len(batch.running),
            waiting=len(batch.waiting),
            steps=batch.steps,
            prompt_tokens=batch.prompt_tokens,
            reused_tokens=batch.reused_tokens,
            sampled_tokens=batch.sampled_tokens,
            weight_updates=self._weight_updates,
            frozen=self._frozen_since is not None,
        )

    def frozen_seconds(self) -> float:
        """Return for how many seconds the sampler has been frozen since it started."""
        since = self._frozen_since
        return self._frozen_seconds + (0.0 if since is None else time.monotonic() - since)

    # ---- calls

    async def run(
        self, sequence: SampledSequence, on_tokens: Callable[[SampledSequence], None] | None = None
    ) -> None:
        """Sample a sequence to its end, as `sample` does."""
        await self.sample(sequence, self.batch, on_tokens)

    async def freeze(self, *, abort: bool = False) -> None:
        """Stop sampling before the next step. With `abort`, end all sequences with the tokens sampled so far."""
        await asyncio.wrap_future(self.call(lambda: self._freeze(abort)))

    async def thaw(self) -> None:
        """Continue sampling after `freeze`. Has no effect if the sampler is not frozen."""
        await asyncio.wrap_future(self.call(self._thaw))

    def load_weights(self, state: Mapping[str, Any], version: int) -> None:
        """Replace the weights by those of a `state_dict` of the transformers model, between two steps.

        Tokens sampled from then on carry `version`. Returns when the weights are copied, so that the caller may
        change its own again. Raises `WeightsError` and changes nothing if they do not fit. Do not call this on an
        event loop.
        """
        event = None
        device = self.batch.decoder.device
        if device.type == "cuda":
            event = torch.cuda.current_stream(device).record_event()  # the caller may still be computing them
        self.call(lambda: self._load(state, version, event)).result()

    # ---- on the thread

    @contextmanager
    def _context(self) -> Iterator[None]:
        device = self.batch.decoder.device
        # A stream of its own: the sampler does not wait for a trainer's work on the same GPU.
        stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
        with torch.inference_mode(), stream:
            yield

    @property
    def _busy(self) -> bool:
        return self._frozen_since is None and self.batch.busy

    def _batches(self) -> tuple[Batch]:
        return (self.batch,)

    def _recover(self, batch: Batch, failed: list[SampledSequence]) -> None:
        for sequence in failed:
            batch.discard(sequence)
        batch.clear_prefix_cache()

    def _freeze(self, abort: bool) -> None:
        if self._frozen_since is None:
            self._frozen_since = time.monotonic()
        if abort:
            self.abort(self.sequences)

    def _thaw(self) -> None:
        if self._frozen_since is not None:
            self._frozen_seconds += time.monotonic() - self._frozen_since
            self._frozen_since = None

    def _load(self, state: Mapping[str, Any], version: int, ready: Any) -> None:
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        self.batch.load(state, version)
        if ready is not None:
            torch.cuda.current_stream().synchronize()
        self._weight_updates += 1


def _default_slots(model: Any, context: int) -> int:
    """Return how many sequences to sample at a time: on a GPU, as many as fit into a share of its free memory."""
    config, weight = model.config, model.get_input_embeddings().weight
    if weight.device.type != "cuda":
        return CPU_SLOTS
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * weight.element_size()
    free, _ = torch.cuda.mem_get_info(weight.device)
    return max(1, min(MAX_SLOTS, int(_MEMORY_SHARE * free / (position * (context + 1)))))
