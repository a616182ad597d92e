"""Upstream `torch`: sample from a transformers model in this process, on a GPU or a CPU, and replace its weights.

It has continuous batching over a KV cache with fixed slots, a prefix cache across turns, chunked prompts and, on a
GPU, CUDA graphs. The address is `hf:PATH`. A trainer in the same process replaces the weights from memory:

    handle = SharedSampler("hf:PATH")
    sampler = handle.open()
    async with engine.upstream.sync(version, lambda: sampler.load_weights(model.state_dict(), version)):
        pass

Importing this package does not import torch, which is part of the extra `train`.
"""

from rookery.upstreams.torch.loading import LoadedModel, ModelLoadError, load_model
from rookery.upstreams.torch.shared_sampler import SharedSampler
from rookery.upstreams.torch.upstream import TorchUpstream

__all__ = ["LoadedModel", "ModelLoadError", "SharedSampler", "TorchUpstream", "load_model"]
