"""Generate arithmetic problems of five levels from a seed.

The same split, seed and level give the same problems in the same order, on every machine. The two splits have no
problem in common, not even problems with the same numbers and other words. No problem of a level is repeated.
Every answer is an integer: a division has no remainder, or the problem asks for the quotient or the remainder.
"""

import re
from collections.abc import Iterator
from hashlib import blake2b
from random import Random
from typing import Final, NamedTuple

from rookery.core import UsageError, derive_seed
from rookery.environments.arithmetic.expressions import draw_expression
from rookery.environments.arithmetic.stories import draw_story

LEVELS: Final = (1, 2, 3, 4, 5)
SPLITS: Final = ("train", "held-out")
_MAX_FRUITLESS_DRAWS: Final = 2_000
"""Number of consecutive draws without a new problem after which a level counts as exhausted."""
_STORY_SHARES: Final = {1: 0.0, 2: 0.5, 3: 0.6, 4: 0.7, 5: 0.7}
_QUESTIONS: Final = ("What is {}?", "Compute {}.", "Work out {}.", "{} = ?", "How much is {}?", "Find {}.")
_WORDS: Final = re.compile(r"\D+")


class Statement(NamedTuple):
    """Python code for one sentence of a word problem, which changes the number `x`; or a whole expression."""

    code: str
    matters: bool = True
    """False if the sentence is irrelevant for the answer. `code` is then what a careless reader would write."""


class Problem(NamedTuple):
    """A problem and its solution: one expression, or one statement per sentence of a word problem."""

    prompt: str
    answer: int
    level: int
    kind: str
    statements: tuple[Statement, ...]

    @property
    def program(self) -> str:
        """A Python program that prints the answer."""
        if self.kind in ("expression", "brackets"):
            return f"print({self.statements[0].code})"
        return "\n".join([*(statement.code for statement in self.statements if statement.matters), "print(x)"])


def generate_problems(split: str, seed: int, level: int) -> Iterator[Problem]:
    """Yield the problems of one split and level without repetition; raise `UsageError` when no more are found."""
    rng = Random(derive_seed(seed, "arithmetic", split, level))  # noqa: S311
    seen: set[str] = set()
    fruitless = 0
    while True:
        problem = draw_problem(rng, level)
        if get_split(problem.prompt) == split and problem.prompt not in seen:
            seen.add(problem.prompt)
            fruitless = 0
            yield problem
            continue
        fruitless += 1
        if fruitless > _MAX_FRUITLESS_DRAWS:
            raise UsageError(
                f"level {level} of arithmetic has only about {len(seen)} different {split} problems: reduce "
                "`size` or add levels"
            )


def draw_problem(rng: Random, level: int) -> Problem:
    """Draw a random problem of a level. It may belong to either split."""
    if rng.random() < _STORY_SHARES[level]:
        text, answer, kind, statements = draw_story(rng, level)
        return Problem(text, answer, level, kind, tuple(Statement(code, matters) for code, matters in statements))
    text, answer = draw_expression(rng, level)
    code = text.replace(" ", "").replace("/", "//")
    kind = "brackets" if "(" in text else "expression"
    return Problem(rng.choice(_QUESTIONS).format(text), answer, level, kind, (Statement(code),))


def get_split(prompt: str) -> str:
    """Return the split to which a problem belongs. It depends on the numbers in the prompt, not on its words."""
    numbers = _WORDS.sub(" ", prompt).strip()
    return SPLITS[blake2b(numbers.encode(), digest_size=1).digest()[0] & 1]
