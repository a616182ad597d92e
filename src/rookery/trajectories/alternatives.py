"""Store the most likely tokens at each position of a turn (top log probabilities) as per-token extras.

The extras `top_ids` (int32) and `top_logprobs` (float32) have the same number of entries for every token. Missing
entries have the ID -1. All turns of a run have them, so that they can share segments.
"""

from collections.abc import Sequence
from typing import Final

from rookery.core import Extra, floats, ints

TOP_IDS: Final = "top_ids"
TOP_LOGPROBS: Final = "top_logprobs"
MAX_ALTERNATIVES: Final = 20
"""Maximum number of alternatives per token, as in OpenAI's API."""


def pack_alternatives(tops: Sequence[Sequence[tuple[int, float]]], tokens: int, width: int) -> dict[str, Extra]:
    """Return the extras with the `width` most likely tokens at each of `tokens` positions.

    `tops` is what an upstream returned. If it does not describe every position, all entries are missing.
    """
    if len(tops) != tokens:
        tops = ((),) * tokens
    pairs = [pair for row in tops for pair in (*row[:width], *((-1, 0.0),) * (width - len(row)))]
    return {
        TOP_IDS: Extra("<i4", 4 * width, ints([token for token, _ in pairs])),
        TOP_LOGPROBS: Extra("<f4", 4 * width, floats([value for _, value in pairs])),
    }
