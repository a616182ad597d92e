"""Arithmetic problems of five levels, drawn from a seed.

Promises:
- the same split, seed and level give the same problems, in the same order, on every machine and Python;
- train and held-out have no problem in common, whatever the seeds: not even the numbers of one;
- no problem comes twice in a level;
- every answer is an exact integer, and a division is exact or asks for whole boxes or for what is left over.
"""

import re
from collections.abc import Iterator
from hashlib import blake2b
from random import Random
from typing import Final, NamedTuple

from rookery.core import UsageError, derive_seed
from rookery.environments.arithmetic.expressions import expression
from rookery.environments.arithmetic.stories import story

LEVELS: Final = (1, 2, 3, 4, 5)
SPLITS: Final = ("train", "held-out")
_FRUITLESS: Final = 2_000
"""Draws in a row that bring nothing new, after which a level counts as exhausted."""
_STORIES: Final = {1: 0.0, 2: 0.5, 3: 0.6, 4: 0.7, 5: 0.7}
_ASK: Final = ("What is {}?", "Compute {}.", "Work out {}.", "{} = ?", "How much is {}?", "Find {}.")
_WORDS: Final = re.compile(r"\D+")


class Line(NamedTuple):
    """What one sentence does to the running number `x`, as a statement."""

    code: str
    matters: bool = True
    """False: the sentence changes nothing, and this is what a careless reader would make of it."""


class Problem(NamedTuple):
    """A problem and how it is solved: one expression, or one line for each sentence."""

    prompt: str
    answer: int
    level: int
    kind: str
    lines: tuple[Line, ...]

    @property
    def program(self) -> str:
        """A program that prints the answer."""
        if self.kind in ("expression", "brackets"):
            return f"print({self.lines[0].code})"
        return "\n".join([*(line.code for line in self.lines if line.matters), "print(x)"])


def problems_of(split: str, seed: int, level: int) -> Iterator[Problem]:
    """The problems of one level, without end; `UsageError` once there are no further ones."""
    rng = Random(derive_seed(seed, "arithmetic", split, level))  # noqa: S311
    seen: set[str] = set()
    fruitless = 0
    while True:
        found = draw(rng, level)
        if split_of(found.prompt) == split and found.prompt not in seen:
            seen.add(found.prompt)
            fruitless = 0
            yield found
            continue
        fruitless += 1
        if fruitless > _FRUITLESS:
            raise UsageError(f"level {level} of arithmetic has only about {len(seen)} different {split} problems")


def draw(rng: Random, level: int) -> Problem:
    """Any problem of a level, of either split."""
    if rng.random() < _STORIES[level]:
        text, answer, kind, lines = story(rng, level)
        return Problem(text, answer, level, kind, tuple(Line(code, matters) for code, matters in lines))
    text, answer = expression(rng, level)
    code = text.replace(" ", "").replace("/", "//")
    kind = "brackets" if "(" in text else "expression"
    return Problem(rng.choice(_ASK).format(text), answer, level, kind, (Line(code),))


def split_of(prompt: str) -> str:
    """Where a problem belongs, by its numbers: asked in other words, it is still on the same side."""
    numbers = _WORDS.sub(" ", prompt).strip()
    return SPLITS[blake2b(numbers.encode(), digest_size=1).digest()[0] & 1]
