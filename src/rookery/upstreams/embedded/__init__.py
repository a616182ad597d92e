"""Upstream `embedded`: a small language model that runs in this process, without a server and without a GPU.

It is a byte-level Llama in NumPy with a KV cache, a prefix cache and continuous batching. Batching does not change
results: a sequence gets the same tokens and log probabilities as alone, bit for bit. The same prompt, seed and
weights give the same reply, in the library and through the server. Log probabilities agree with PyTorch to 1e-4.
Weights can be replaced at run time; a sequence uses one version from its first token to its last.
"""

from rookery.upstreams.embedded.upstream import EmbeddedUpstream, load_builtin_weights
from rookery.upstreams.embedded.weights import LlamaShape, Weights

__all__ = ["EmbeddedUpstream", "LlamaShape", "Weights", "load_builtin_weights"]
