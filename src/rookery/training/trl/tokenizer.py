"""A transformers tokenizer with the vocabulary of the embedded policy. TRL needs it for padding and logging."""

from typing import Any

from rookery.upstreams.embedded import chat


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
