"""Trainable policies: a torch model, and how its weights reach the sampler.

A policy is named by an address: `embedded`, `embedded:PATH` or `hf:PATH`.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rookery.core import Sampling, UsageError
from rookery.trainer.config import TrainConfig
from rookery.trainer.errors import TrainingError, write_error
from rookery.trainer.weight_push import ServerKind, check_server, push_weights, save_weights


class TrainablePolicy(Protocol):
    """A model in the trainer's process, and the upstream that samples from its weights."""

    model: Any
    """The torch module that is trained."""
    upstream: dict[str, Any]
    """The fields of `UpstreamConfig` with which the engine reaches the sampler."""
    tokenizer: str
    """Path of the model's tokenizer; empty if the chat format is built in."""
    in_process: bool
    """Whether the sampler is in this process, so that the engine must run rollouts here (`runners=0`)."""

    def push(self, version: int) -> None:
        """Send the current weights to the sampler. Called while nothing is sampled."""
        ...

    def save(self, folder: Path) -> None:
        """Write the current weights to a new directory that transformers loads."""
        ...

    def close(self) -> None:
        """Free the sampler."""
        ...


class EmbeddedPolicy:
    """The embedded policy. The sampler reads new weights from a directory before each call."""

    in_process = False

    def __init__(self, source: str, folder: Path) -> None:
        """Load the bundled weights if `source` is empty, else the weights at that path.

        `folder` is the directory to which `push` writes.
        """
        from rookery.upstreams.embedded import Weights, load_builtin_weights

        weights = Weights.load(Path(source).expanduser()) if source else load_builtin_weights()
        self.model = weights.to_model()
        self.upstream = {"urls": (f"embedded:{folder}",)}
        self.tokenizer = ""
        self._folder = folder
        self._version = 0

    def push(self, version: int) -> None:
        self._version = version
        self.save(self._folder)

    def save(self, folder: Path) -> None:
        from rookery.upstreams.embedded.weights import LlamaShape, Weights

        tensors = {name: value.float().cpu().numpy() for name, value in merged_state(self.model).items()}
        shape = LlamaShape.from_config(self.model.config.to_dict())
        try:
            Weights(shape, tensors, version=self._version).save(folder)
        except OSError as error:
            raise write_error(folder, error) from error

    def close(self) -> None:
        """Do nothing: the runners hold the samplers."""


class TorchPolicy:
    """A causal language model of transformers. The sampler is in this process and gets new weights from memory.

    The trained weights are float32; the sampler has its own copy, by default in bfloat16 on a GPU.
    """

    in_process = True

    def __init__(self, address: str) -> None:
        """Load the model at `hf:PATH` twice: to sample from, and to train."""
        from rookery.upstreams.torch import SharedSampler, load_model

        self._handle = SharedSampler(address)
        self._sampler = self._handle.open()
        self._base, self._loaded_tokenizer = load_model(self._handle.address.path, dtype="float32")
        self.model = self._base
        self.upstream = {"urls": (address,)}
        self.tokenizer = str(self._handle.address.path)

    def push(self, version: int) -> None:
        self._sampler.load_weights(merged_state(self.model), version)

    def save(self, folder: Path) -> None:
        save_weights(self._base, merged_state(self.model), self._loaded_tokenizer, folder)

    def close(self) -> None:
        asyncio.run(self._handle.close())


class ServedPolicy:
    """A causal language model of transformers that vLLM or SGLang servers sample from.

    The weights are written to a directory, from which the servers load them.
    """

    in_process = False

    def __init__(self, address: str, folder: Path, kind: ServerKind, servers: Sequence[str]) -> None:
        """Load the model at `hf:PATH` to train it. `folder` is the directory to which `push` writes."""
        from rookery.upstreams.torch import load_model
        from rookery.upstreams.torch.shared_sampler import parse_address

        path = parse_address(address).path
        if "?" in address:
            raise UsageError(
                f"{address!r:.200} has options of the sampler in this process: remove them with --push"
            )
        self._kind, self._servers, self._folder = kind, [check_server(url) for url in servers], folder
        self._pushed = False
        self._base, self._loaded_tokenizer = load_model(path, dtype="float32")
        self.model = self._base
        self.upstream = {
            "kind": kind,
            "urls": tuple(f"{url}/v1" for url in self._servers),
            # Without these, a server may use other values from the model's generation_config.json.
            "sampling": Sampling(temperature=1.0, top_p=1.0, top_k=0),
        }
        self.tokenizer = str(path)

    def save(self, folder: Path) -> None:
        save_weights(self._base, merged_state(self.model), self._loaded_tokenizer, folder)

    def push(self, version: int) -> None:
        self.save(self._folder)
        try:
            push_weights(self._kind, self._servers, self._folder, version)
        except TrainingError as error:
            if self._pushed:
                raise
            raise UsageError(str(error)) from error  # training has not started
        self._pushed = True

    def close(self) -> None:
        """Do nothing: the servers keep the last weights."""


def add_adapters(model: Any, rank: int, alpha: int) -> Any:
    """Return the model with LoRA adapters on all linear layers. Only the adapters are trained. Needs peft."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"))


def merged_state(model: Any) -> dict[str, Any]:
    """Return the tensors of a model by name, detached. LoRA adapters are merged into the weights they adapt.

    Raise `TrainingError` if a weight is not finite.
    """
    if not hasattr(model, "merge_adapter"):
        return _check_finite({name: value.detach() for name, value in model.state_dict().items()})
    model.merge_adapter()
    try:
        return _check_finite(
            {
                name.removeprefix("base_model.model.").replace(".base_layer.", "."): value.detach().clone()
                for name, value in model.state_dict().items()
                if ".lora_" not in name
            }
        )
    finally:
        model.unmerge_adapter()


def _check_finite(state: dict[str, Any]) -> dict[str, Any]:
    import torch

    if not torch.stack([value.isfinite().all() for value in state.values()]).all():
        raise TrainingError(
            "the weights are not finite after the last update, so they were not pushed. Lower the learning rate, "
            "then continue with --resume",
            reason="nan",
        )
    return state


def check_address(address: str, config: TrainConfig) -> None:
    """Raise `UsageError` if the policy with this address cannot be trained with these settings."""
    kind = address.partition(":")[0]
    if kind not in ("embedded", "hf"):
        raise UsageError(
            f"{address!r:.200} cannot be trained: use embedded, embedded:PATH or hf:PATH. To sample from a "
            "server, name the model that it serves with hf:PATH, and the server with --push and --server"
        )
    if config.push is not None and kind != "hf":
        raise UsageError(f"push={config.push} needs the policy hf:PATH with the model that the server serves")


def open_policy(address: str, folder: Path, config: TrainConfig) -> TrainablePolicy:
    """Load the policy with this address, with LoRA adapters if the settings ask for them.

    `folder` is a directory for the weights that the sampler reads.
    """
    kind, _, path = address.partition(":")
    policy: TrainablePolicy
    if config.push is not None:
        policy = ServedPolicy(address, folder, config.push, config.server)
    else:
        policy = EmbeddedPolicy(path, folder) if kind == "embedded" else TorchPolicy(address)
    if config.lora_rank:
        policy.model = add_adapters(policy.model, config.lora_rank, config.lora_alpha)
    return policy
