"""Decode steps of a fixed shape, so that a GPU can replay them as CUDA graphs.

A step of a small model consists of hundreds of short kernels, and starting them one by one takes longer than
running them. A CUDA graph starts all of them at once, but has a fixed shape and fixed addresses. So a step
computes the first slots of the KV cache, as many as the next power of two, and reads a power of two of cached
positions. Slots without a token to compute get a dummy token whose result is ignored and whose keys and values
go to the padding position.

On a CPU the same steps run without a graph, which tests use.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rookery.upstreams.torch.decoder import Decoder

WARM_UP = 2
"""Runs before a capture, in which libraries allocate their workspaces."""


class CapturedStep(NamedTuple):
    """A decode step of one shape: its inputs (tokens, positions, write positions), its output and its graph."""

    inputs: Tensor
    logits: Tensor
    graph: Any


class BucketedDecode:
    """Runs decode steps in buckets of batch size and attention span. Each bucket is captured when it is first
    used."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._captured: dict[tuple[int, int], CapturedStep] = {}
        self._pool: Any = None
        on_gpu = decoder.device.type == "cuda"
        self._host = torch.empty(3 * decoder.slots, dtype=torch.int64, pin_memory=on_gpu)
        self._first = torch.zeros(decoder.slots, dtype=torch.int64, device=decoder.device)

    def run(self, slots: list[int], positions: list[int], tokens: list[int], span: int) -> Tensor:
        """Compute one token of each given slot, and return the logits after it, in the order of `slots`."""
        decoder = self._decoder
        rows = min(decoder.slots, 1 << max(slots).bit_length())
        values = torch.tensor((tokens, positions, positions), dtype=torch.int64)
        host = self._host[: 3 * rows].view(3, rows, 1)
        host[:2] = 0
        host[2] = decoder.context
        host[:, slots, 0] = values
        if decoder.device.type == "cuda":
            step = self._captured.get((rows, span)) or self._capture(rows, span)
            step.inputs.copy_(host, non_blocking=True)
            step.graph.replay()
            logits = step.logits
        else:
            logits = self._forward(host, span)
        if slots == list(range(rows)):
            return logits
        return logits[torch.tensor(slots).to(decoder.device)]

    def _forward(self, inputs: Tensor, span: int) -> Tensor:
        tokens, positions, writes = inputs
        return self._decoder.forward(tokens, positions, writes, self._first[: len(tokens)], None, span)

    def _capture(self, rows: int, span: int) -> CapturedStep:
        """Capture a step. Its runs during the capture write to the padding position only."""
        inputs = torch.zeros((3, rows, 1), dtype=torch.int64, device=self._decoder.device)
        inputs[2] = self._decoder.context
        for _ in range(WARM_UP):
            self._forward(inputs, span)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads, such as a trainer's, may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._forward(inputs, span)
        step = self._captured[rows, span] = CapturedStep(inputs, logits, graph)
        return step
