"""Upstream `embedded`: a small language model that runs in this process, without a server and without a GPU.

It is a byte-level Llama in NumPy with a KV cache, a prefix cache and continuous batching. Batching does not change
results: a sequence gets the same tokens and log probabilities as if it were alone, bit for bit. The same prompt,
seed and weights give the same reply, in the library and through the server (`rookery serve-embedded`). Log
probabilities agree with PyTorch to 1e-4. Weights can be replaced at run time; all tokens of a sequence are sampled
by the same version of the weights.
"""

from rookery.upstreams.embedded.upstream import EmbeddedUpstream, load_builtin_weights
from rookery.upstreams.embedded.weights import LlamaShape, Weights

__all__ = ["EmbeddedUpstream", "LlamaShape", "Weights", "load_builtin_weights"]
