"""Hypothesis strategies for hostile bytes, and a runner that tries them for a limited time."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("ROOKERY_FUZZ_SECONDS", "4"))
"""Time spent on each decoder."""
BATCH = 200


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], object], seconds: float = SECONDS) -> None:
    """Check values of the strategy until the time is over; Hypothesis shrinks the first failing value."""
    end = time.monotonic() + seconds
    failed = False

    @settings(
        max_examples=BATCH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(strategy)
    def batch(value: Any) -> None:
        nonlocal failed
        if time.monotonic() < end or failed:  # after a failure Hypothesis calls this again to shrink the value
            try:
                check(value)
            except BaseException:
                failed = True
                raise

    while time.monotonic() < end:
        batch()


ODD_TEXT = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["\ud800", "\udfff", "\x00", "NaN", "Infinity", "-0", "1e999", "__class__", "é" * 40, "../..", "a\nb", "🐦"]
)
ODD_NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400, 0.1, -0.0]) | st.integers()
LEAVES = st.none() | st.booleans() | ODD_NUMBERS | st.floats() | ODD_TEXT


def json_like(words: list[str], leaves: int = 12) -> st.SearchStrategy[Any]:
    """Generate JSON values whose keys and strings often come from `words`."""
    texts = st.sampled_from(words)
    return st.recursive(
        LEAVES | texts,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | ODD_TEXT, inner, max_size=5),
        max_leaves=leaves,
    )


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """Take a valid message and change, remove, repeat or insert some bytes."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(0, len(data))))
        how = draw(st.sampled_from(["change", "remove", "repeat", "insert", "cut", "nest"]))
        if how == "change" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif how == "remove":
            del data[at : at + draw(st.integers(1, 8))]
        elif how == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 40))] * draw(st.integers(1, 3))
        elif how == "insert":
            odd = [
                b"\xff",
                b"\x00",
                b"\\ud800",
                b"NaN",
                b"1e999",
                b'"',
                b"{",
                b"]",
                b"\r\n",
                b"\xed\xa0\x80",
                b"9" * 30,
            ]
            data[at:at] = draw(st.sampled_from(odd) | st.binary(max_size=8))
        elif how == "cut":
            del data[at:]
        else:
            data[at:at] = b"[" * draw(st.sampled_from([3, 300, 20_000]))
    return bytes(data)


def messages(seeds: list[Any], words: list[str]) -> st.SearchStrategy[bytes]:
    """Generate JSON messages: mutated valid ones, values made of the same words, and arbitrary bytes."""
    encoded = [json.dumps(seed).encode() for seed in seeds]
    shaped = json_like(words).map(lambda value: json.dumps(value).encode())
    typed = st.sampled_from(seeds).flatmap(lambda seed: retyped(seed, words)).map(lambda v: json.dumps(v).encode())
    return mutated(encoded) | shaped | typed | st.binary(max_size=200)


@st.composite
def retyped(draw: st.DrawFn, seed: Any, words: list[str]) -> Any:
    """Take a valid value and replace some of its parts with other values."""
    if draw(st.integers(0, 5)) == 0:
        return draw(json_like(words, leaves=4))
    if isinstance(seed, dict):
        kept = {key: draw(retyped(one, words)) for key, one in seed.items() if draw(st.integers(0, 9)) > 0}
        return kept | ({draw(st.sampled_from(words)): draw(LEAVES)} if draw(st.booleans()) else {})
    if isinstance(seed, list):
        return [draw(retyped(one, words)) for one in seed] * draw(st.sampled_from([1, 1, 1, 0, 2]))
    return seed
