"""A small language model inside of the process: real sampling, real token ids, no server and no GPU.

A byte-level Llama in numpy, with a cache of keys and values and continuous batching.

Promises:
- batching changes nothing: a sequence gets the tokens and logprobs it would get alone, to the last bit;
- same prompt, seed and weights, same answer, through the library and through the server;
- its logprobs are those that PyTorch computes from the same weights, to 1e-4;
- weights can be swapped at run time; a sequence is drawn by one version from its first token to its last.
"""

from rookery.upstreams.embedded.upstream import EmbeddedUpstream, builtin
from rookery.upstreams.embedded.weights import LlamaShape, Weights

__all__ = ["EmbeddedUpstream", "LlamaShape", "Weights", "builtin"]
