"""Load a transformers causal language model and its tokenizer from a folder or a GGUF file.

Guarantees:
- a model that the sampler cannot run raises `ModelLoadError`, whose `reason` says why;
- nothing is downloaded: the path must exist on this machine;
- a GGUF file is dequantised into ordinary weights, so that it can be trained.
"""

import json
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from rookery.core import UsageError
from rookery.core.errors import describe

Reason: TypeAlias = Literal["missing_package", "not_found", "invalid", "unsupported", "mismatch", "memory"]

FAMILIES: Final = frozenset({"llama", "qwen2", "qwen3"})
"""Values of `model_type` in config.json that the sampler can run. SmolLM and SmolLM2 are of the type `llama`."""
ROPE_TYPES: Final = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary position embedding whose frequencies do not depend on the length of the sequence."""
_GGUF: Final = b"GGUF"


class ModelLoadError(UsageError):
    """A model cannot be loaded or cannot be sampled from. `reason` is one of the values of `Reason`."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class LoadedModel(NamedTuple):
    """A model and its tokenizer."""

    model: Any
    """A `PreTrainedModel` of transformers with a language modelling head."""
    tokenizer: Any
    """A `PreTrainedTokenizerBase` of transformers."""


def check_path(path: Path) -> None:
    """Raise `ModelLoadError` if there is no model of a supported architecture at `path`. Loads no weights."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != _GGUF:
                raise ModelLoadError(
                    f"{path} is not a GGUF file: name a GGUF file or a folder with a config.json", "invalid"
                )
        return
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"there is no model at {path}: name a GGUF file, or a folder with config.json, weights and tokenizer",
            "not_found",
        )
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path / 'config.json'} cannot be read: {describe(error)}", "invalid") from error
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in FAMILIES:
        raise ModelLoadError(
            f"the model in {path} has the type {str(family)[:80]!r}; the sampler supports "
            f"{', '.join(sorted(FAMILIES))}: serve other models with vLLM or SGLang",
            "unsupported",
        )


def load_model(path: str | Path, *, device: str = "cpu", dtype: str = "") -> LoadedModel:
    """Load a causal language model and its tokenizer.

    `path` is a folder in the format of transformers, or a GGUF file. `dtype` is the name of a floating-point type
    of torch, such as `bfloat16`; empty for bfloat16 on a GPU and float32 on a CPU. Raises `ModelLoadError`.
    """
    where = Path(path).expanduser()
    check_path(where)
    torch, transformers = import_packages(gguf=where.is_file())
    chosen = getattr(torch, dtype or default_dtype(device), None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ModelLoadError(
            f"{dtype!r} is not a floating-point type of torch: use bfloat16 or float32", "invalid"
        )
    tokenizer = load_tokenizer(where)
    folder, options = _source(where)
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=chosen, output_loading_info=True, **options
        )
        model = model.to(device).eval()
    except Exception as error:  # the libraries below raise errors of many types
        raise ModelLoadError(f"the model at {where} cannot be loaded: {describe(error)}", "invalid") from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    if missing := sorted(found["missing_keys"]):  # transformers would use random values
        raise ModelLoadError(
            f"the weights at {where} are incomplete: {len(missing)} tensors are missing, such as {missing[0]}",
            "invalid",
        )
    check_model(model)
    check_tokenizer(model, tokenizer)
    return LoadedModel(model, tokenizer)


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a model in a folder or a GGUF file. Raises `ModelLoadError`."""
    check_path(path)
    _, transformers = import_packages(gguf=path.is_file())
    folder, options = _source(path)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # the libraries below raise errors of many types
        raise ModelLoadError(
            f"the tokenizer of the model at {path} cannot be loaded: {describe(error)}", "invalid"
        ) from error


def _source(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the options with which transformers loads a model without downloads."""
    if path.is_file():
        return path.parent, {"local_files_only": True, "gguf_file": path.name}
    return path, {"local_files_only": True}


def import_packages(*, gguf: bool = False) -> tuple[Any, Any]:
    """Import torch and transformers and return them. Raises `ModelLoadError` if a package is not installed.

    With `gguf`, the packages that transformers needs to read GGUF files must be installed too.
    """
    try:
        import torch
        import transformers

        if gguf:
            import accelerate  # noqa: F401
            import gguf as _  # noqa: F401
    except ImportError as error:
        raise ModelLoadError(
            f"sampling from a torch model needs optional packages ({describe(error)}): pip install "
            "'rookery-rl[train]'",
            "missing_package",
        ) from error
    return torch, transformers


def default_dtype(device: str) -> str:
    """Return the name of the floating-point type that is used on a device unless another one is chosen."""
    return "float32" if device == "cpu" else "bfloat16"


def check_model(model: Any) -> None:
    """Raise `ModelLoadError` if the architecture of a transformers model has parts that the sampler lacks."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    missing = [
        text
        for text, found in (
            (f"the model type {config.model_type!r}", config.model_type not in FAMILIES),
            (f"the position embedding {rope!r}", rope not in ROPE_TYPES),
            ("sliding window attention", sliding),
            (f"the activation {config.hidden_act!r}", config.hidden_act != "silu"),
        )
        if found
    ]
    if missing:
        raise ModelLoadError(
            f"the sampler does not support {', '.join(missing)}: serve this model with vLLM or SGLang",
            "unsupported",
        )


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raise `ModelLoadError` if a tokenizer cannot belong to a model.

    Every token ID must have a row in the embedding. The embedding may have more rows, because many models pad it,
    but not more than twice as many.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if not rows // 2 <= highest + 1 <= rows:
        raise ModelLoadError(
            f"the tokenizer does not match the model: its highest token ID is {highest}, and the model has "
            f"{rows} token embeddings",
            "mismatch",
        )


def find_end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the token IDs that end a reply: those of the generation config, the config and the tokenizer."""
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    found = (getattr(source, "eos_token_id", None) for source in sources)
    ids = [entry for entry in found if entry is not None]
    return frozenset(token for entry in ids for token in (entry if isinstance(entry, list | tuple) else (entry,)))
