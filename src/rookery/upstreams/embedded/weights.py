"""Load and save the weights of a Llama as safetensors files, with the tensor names of `LlamaForCausalLM`.

Saved weights can be loaded here and with `LlamaForCausalLM.from_pretrained`, and vice versa. A file is validated
before it is used: every tensor must be present, have the right shape and contain only finite numbers. Files are
replaced atomically, so that a process that watches a file never reads a partial one.
"""

import json
import math
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from rookery.core import UsageError

Floats: TypeAlias = npt.NDArray[np.float32]
CONFIG: Final = "config.json"
TENSORS: Final = "model.safetensors"
_MAX_HEADER: Final = 64 << 20
_DTYPES: Final[dict[str, Any]] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class LlamaShape(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters of a plain Llama model, with the names that `config.json` uses."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in self.__struct_fields__[:8]:
            if getattr(self, name) < 1:
                raise UsageError(f"a Llama needs a {name} of at least 1, not {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise UsageError(
                "a Llama's attention heads must be a multiple of its key-value heads, and its head_dim even"
            )
        if not (self.rms_norm_eps > 0 and self.rope_theta > 0):
            raise UsageError("a Llama's rms_norm_eps and rope_theta must be above 0")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the hyperparameters in the content of a `config.json`.

        Raises `UsageError` if one is missing, or for a feature that is not supported, which the message names.
        """
        found = dict(config)
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        unsupported = [
            name
            for name, plain in (
                ("model_type", found.get("model_type", "llama") == "llama"),
                ("hidden_act", found.get("hidden_act", "silu") == "silu"),
                ("attention_bias", not found.get("attention_bias")),
                ("mlp_bias", not found.get("mlp_bias")),
                ("rope_scaling", kind == "default"),
            )
            if not plain
        ]
        if unsupported:
            raise UsageError(
                f"the embedded upstream supports plain Llama models only; it does not support the model's "
                f"{', '.join(unsupported)}"
            )
        found.setdefault("rope_theta", rope.get("rope_theta", 10_000.0))
        found.setdefault("rms_norm_eps", 1e-6)
        found.setdefault("tie_word_embeddings", False)
        found.setdefault("max_position_embeddings", 2048)
        if not found.get("num_key_value_heads"):
            found["num_key_value_heads"] = found.get("num_attention_heads")
        if not found.get("head_dim") and found.get("num_attention_heads"):
            found["head_dim"] = found.get("hidden_size", 0) // found["num_attention_heads"]
        try:
            return msgspec.convert({name: found[name] for name in cls.__struct_fields__}, cls, strict=False)
        except KeyError as missing:
            raise UsageError(f"the configuration is not that of a Llama: {missing.args[0]} is missing") from None
        except msgspec.ValidationError as error:
            raise UsageError(f"the configuration is not that of a Llama: {error}") from None

    def config(self) -> dict[str, Any]:
        """Return the content of a `config.json` that old and new versions of `transformers` can read."""
        from rookery.upstreams.embedded import chat

        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **msgspec.to_builtins(self),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": chat.BEGIN,
            "eos_token_id": chat.END,
            "pad_token_id": chat.PAD,
            "torch_dtype": "float32",
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name. The output head is left out if it is tied to the
        embeddings."""
        width, heads, kv = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, width)}
        for number in range(self.num_hidden_layers):
            layer = f"model.layers.{number}"
            shapes |= {
                f"{layer}.self_attn.q_proj.weight": (heads * self.head_dim, width),
                f"{layer}.self_attn.k_proj.weight": (kv * self.head_dim, width),
                f"{layer}.self_attn.v_proj.weight": (kv * self.head_dim, width),
                f"{layer}.self_attn.o_proj.weight": (width, heads * self.head_dim),
                f"{layer}.mlp.gate_proj.weight": (self.intermediate_size, width),
                f"{layer}.mlp.up_proj.weight": (self.intermediate_size, width),
                f"{layer}.mlp.down_proj.weight": (width, self.intermediate_size),
                f"{layer}.input_layernorm.weight": (width,),
                f"{layer}.post_attention_layernorm.weight": (width,),
            }
        shapes["model.norm.weight"] = (width,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        return shapes

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors().values())


class Weights:
    """Weights of a Llama model: hyperparameters, float32 tensors by name, and the policy version.

    The constructor raises `UsageError` if a tensor is missing, has a wrong shape or is not finite.
    """

    def __init__(self, shape: LlamaShape, tensors: Mapping[str, npt.ArrayLike], *, version: int = 0) -> None:
        self.shape = shape
        self.version = version
        self.tensors: dict[str, Floats] = {}
        for name, expected in shape.tensors().items():
            if name not in tensors:
                raise UsageError(f"the weights have no tensor {name}")
            found = np.ascontiguousarray(tensors[name], dtype=np.float32)
            if found.shape != expected:
                raise UsageError(f"the tensor {name} has the shape {found.shape}, but it should be {expected}")
            if not np.isfinite(found).all():
                raise UsageError(f"the tensor {name} has values that are not finite")
            self.tensors[name] = found

    @classmethod
    def random(cls, shape: LlamaShape, *, seed: int = 0, scale: float = 0.02, version: int = 0) -> Self:
        """Return random weights, as at the start of training. `scale` is the standard deviation of the
        matrices."""
        rng = np.random.default_rng(seed)
        tensors = {
            name: np.ones(size) if len(size) == 1 else rng.normal(0.0, scale, size)
            for name, size in shape.tensors().items()
        }
        return cls(shape, tensors, version=version)

    @classmethod
    def from_model(cls, model: Any, *, version: int = 0) -> Self:
        """Copy the weights of a `LlamaForCausalLM` on any device and in any precision."""
        state = {name: value.detach().float().cpu().numpy() for name, value in model.state_dict().items()}
        return cls(LlamaShape.from_config(model.config.to_dict()), state, version=version)

    def to_model(self) -> Any:
        """Return a `LlamaForCausalLM` with these weights. Needs torch and transformers."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**self.shape.config())).float().eval()
        state = {name: torch.from_numpy(value.copy()) for name, value in self.tensors.items()}
        left = model.load_state_dict(state, strict=False)
        if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
            raise UsageError(f"these weights do not fit a LlamaForCausalLM: {left}")
        model.tie_weights()
        return model

    # -------------------------------------------------------------------------------------------- files

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load weights from a directory with `config.json` and `model.safetensors`, or from one file written by
        `save`.

        Raises `UsageError` if they cannot be read or are invalid.
        """
        found = Path(path)
        file = found / TENSORS if found.is_dir() else found
        try:
            data = file.read_bytes()
            config = (found / CONFIG).read_bytes() if found.is_dir() else None
        except OSError as error:
            raise UsageError(f"the weights {found} cannot be read: {error.strerror}") from error
        try:
            return cls.from_bytes(data, config)
        except UsageError as error:
            raise UsageError(f"the weights {found} cannot be used: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes, config: bytes | None = None) -> Self:
        """Parse the content of a safetensors file. `config` is the content of `config.json`, or None if the file
        contains it, as one written by `save` does."""
        tensors, about = _parse_safetensors(data)
        if config is None and "config" not in about:
            raise UsageError(
                "the file contains no model configuration: use a directory with config.json and model.safetensors"
            )
        try:
            settings = json.loads(config if config is not None else about["config"])
        except ValueError as error:
            raise UsageError(f"the model configuration is not valid JSON: {error}") from None
        version = about.get("version", "0")
        if not (version.isascii() and version.isdecimal() and len(version) < 19):
            raise UsageError(f"the policy version in the file is {version[:40]!r}, not a number")
        return cls(LlamaShape.from_config(settings), tensors, version=int(version))

    def to_bytes(self, dtype: str = "F32") -> bytes:
        """Return the content of a safetensors file with the tensors, the configuration and the policy version.

        `dtype` is the type of the stored tensors: F32 or F16.
        """
        config = json.dumps(self.shape.config(), sort_keys=True)
        arrays = {name: value.astype(_DTYPES[dtype]) for name, value in sorted(self.tensors.items())}
        header: dict[str, Any] = {"__metadata__": {"config": config, "format": "pt", "version": str(self.version)}}
        at = 0
        for name, array in arrays.items():
            header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        return b"".join((struct.pack("<Q", len(head)), head, *(array.tobytes() for array in arrays.values())))

    def save(self, path: str | Path, dtype: str = "F32") -> None:
        """Save to one file if the path has a suffix such as `.safetensors`, else to a directory that
        `from_pretrained` reads."""
        target = Path(path)
        if target.suffix:
            _write_atomically(target, self.to_bytes(dtype))
            return
        target.mkdir(parents=True, exist_ok=True)
        _write_atomically(target / CONFIG, json.dumps(self.shape.config(), indent=2, sort_keys=True).encode())
        _write_atomically(target / TENSORS, self.to_bytes(dtype))


def _write_atomically(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)  # noqa: PTH101  (mkstemp's is for the owner alone)
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _parse_safetensors(data: bytes) -> tuple[dict[str, Floats], dict[str, str]]:
    """Parse the content of a safetensors file into tensors and metadata. It is validated, because it is
    untrusted."""
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else 0
    if not 2 <= size <= min(len(data) - 8, _MAX_HEADER):
        raise UsageError("the file is not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        raise UsageError("the file is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise UsageError("the file is not a safetensors file: its header is not an object")
    about = header.pop("__metadata__", {})
    body = memoryview(data)[8 + size :]
    tensors: dict[str, Floats] = {}
    for name, entry in header.items():
        try:
            first, last = map(int, entry["data_offsets"])
            kind, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            if not 0 <= first <= last <= len(body):
                raise ValueError("the file is truncated")
            array = np.frombuffer(body[first:last], dtype=kind).reshape(shape)
        except KeyError as error:
            raise UsageError(f"the tensor {name[:80]!r} has an unsupported type: {error}") from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"the tensor {name[:80]!r} is broken: {error}") from None
        tensors[name] = _to_float32(array, entry["dtype"])
    return tensors, {str(key): str(value) for key, value in dict(about).items()}


def _to_float32(array: npt.NDArray[Any], dtype: str) -> Floats:
    if dtype == "BF16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
