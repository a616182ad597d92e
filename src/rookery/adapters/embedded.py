"""Weights and tokenizer of the policy, for other trainers that train the embedded policy or another one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rookery.core import UsageError
from rookery.engine.preflight import build_upstream_config
from rookery.upstreams.embedded import Weights, chat
from rookery.upstreams.protocol import UpstreamConfig

Push: TypeAlias = Callable[[Mapping[str, Any], int], object]
"""Function that transfers weights to the policy. It receives the trainer's tensors by name, and their version."""
_EMBEDDED_PREFIX = "embedded:"


def push_weights(path: str | Path) -> Push:
    """Return a function that writes a trainer's weights to the weights file of an embedded policy.

    The embedded policy runs inside Rookery's processes; each of them then loads the new file. The file at `path`
    must exist, because it defines the shape of the model.
    """
    target = Path(path).expanduser()

    def push(tensors: Mapping[str, Any], version: int) -> None:
        arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}
        Weights(Weights.load(target).shape, arrays, version=version).save(target)

    return push


def resolve_push(policy: str | Sequence[str] | UpstreamConfig, push: Push | bool | None) -> Push | None:
    """Return the function that transfers weights to the policy, or None if Rookery does not transfer them.

    That is `push` if the user passed a function. For `push=None` and a policy `embedded:PATH`, it is
    `push_weights(PATH)`. For `push=False`, it is None.
    """
    if push is True:
        raise UsageError(
            "push=True is not valid: pass a function that takes the tensors by name and their version, or False "
            "or None"
        )
    if push is not None:
        return push or None
    urls = build_upstream_config(policy, "").urls
    return (
        push_weights(urls[0].removeprefix(_EMBEDDED_PREFIX))
        if urls and urls[0].startswith(_EMBEDDED_PREFIX)
        else None
    )


def embedded_tokenizer() -> Any:
    """Return a transformers tokenizer with the token IDs of the embedded policy.

    IDs 0 to 255 are bytes; the special tokens of the chat format follow.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = _byte_alphabet()
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    names = [chat.NAMES.get(number, f"<spare-{number}>") for number in range(256, chat.VOCAB)]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=chat.NAMES[chat.BEGIN],
        eos_token=chat.NAMES[chat.END],
        pad_token=chat.NAMES[chat.PAD],
        padding_side="left",
    )


def _byte_alphabet() -> list[str]:
    """Return the character that byte-level tokenizers use for each of the 256 bytes.

    Printable Latin-1 characters stand for themselves; other bytes are mapped to characters from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + place) for place in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
