"""Decode steps of a fixed shape, so that a GPU can replay them as CUDA graphs.

A step of a small model consists of hundreds of short kernels, and starting them one by one takes longer than
running them. A CUDA graph starts all of them at once, but has a fixed shape and fixed addresses. So a step
computes the first slots of the KV cache, as many as the next power of two, and reads a power of two of cached
positions. Slots without a token to compute get a dummy token whose result is ignored and whose keys and values
go to the padding position.

On a CPU the same steps run without a graph, which tests use.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rookery.upstreams.torch.decoder import Decoder

WARM_UP: Final = 2
"""Runs before a capture, in which libraries allocate their workspaces."""

Forward: TypeAlias = Callable[[], Any]
"""A function that computes a step from the static inputs and returns its logits."""


class CapturedStep(NamedTuple):
    """A decode step of one shape, with fixed memory for its inputs and its output."""

    inputs: Tensor
    """Tokens, positions and write positions, each with one row per slot."""
    logits: Tensor
    replay: Callable[[], None]
    """Compute the logits from the inputs."""


class BucketedDecode:
    """Runs decode steps in buckets of batch size and attention span. Each bucket is captured when it is first
    used."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._captured: dict[tuple[int, int], CapturedStep] = {}
        on_gpu = decoder.device.type == "cuda"
        self._capture = GraphCapture() if on_gpu else capture_without_graph
        self._host = torch.empty(3 * decoder.slots, dtype=torch.int64, pin_memory=on_gpu)
        self._first = torch.zeros(decoder.slots, dtype=torch.int64, device=decoder.device)

    def run(self, slots: list[int], positions: list[int], tokens: list[int], span: int) -> Tensor:
        """Compute one token of each given slot, and return the logits after it, in the order of `slots`.

        The logits are valid until the next call.
        """
        decoder = self._decoder
        rows = min(decoder.slots, 1 << max(slots).bit_length())
        host = self._host[: 3 * rows].view(3, rows, 1)
        host[:2] = 0
        host[2] = decoder.context
        host[:, slots, 0] = torch.tensor((tokens, positions, positions), dtype=torch.int64)
        step = self._captured.get((rows, span)) or self._prepare(rows, span)
        step.inputs.copy_(host, non_blocking=True)
        step.replay()
        if slots == list(range(rows)):
            return step.logits
        return step.logits[torch.tensor(slots).to(decoder.device)]

    def _prepare(self, rows: int, span: int) -> CapturedStep:
        """Capture the step of a bucket. Runs during the capture write to the padding position only."""
        decoder = self._decoder
        inputs = torch.zeros((3, rows, 1), dtype=torch.int64, device=decoder.device)
        inputs[2] = decoder.context
        tokens, positions, writes = inputs
        logits, replay = self._capture(
            lambda: decoder.forward(tokens, positions, writes, self._first[:rows], None, span)
        )
        step = self._captured[rows, span] = CapturedStep(inputs, logits, replay)
        return step


class GraphCapture:
    """Captures steps as CUDA graphs that share one memory pool, because only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward) -> tuple[Any, Callable[[], None]]:
        """Return the memory for the logits, and a function that replays the captured step."""
        for _ in range(WARM_UP):
            forward()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a trainer's, may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = forward()
        return logits, graph.replay


def capture_without_graph(forward: Forward) -> tuple[Any, Callable[[], None]]:
    """Return the memory for the logits, and a function that computes the step into it, as a graph would."""
    logits = forward()

    def replay() -> None:
        logits.copy_(forward())

    return logits, replay
