"""Generate word problems: short stories about a number of things that changes with almost every sentence."""

from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple, TypeAlias

Lines: TypeAlias = list[tuple[str, bool]]

NAMES: Final = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kira", "Leo"),
    *("Mia", "Noor", "Omar", "Pia", "Quin", "Rosa", "Sam", "Tara", "Uma", "Vic", "Yara", "Zoe"),
)
THINGS: Final = (
    *("apples", "beads", "books", "cards", "coins", "eggs", "figs", "jars", "keys", "kites", "lamps"),
    *("mugs", "nuts", "pears", "pens", "plums", "rings", "seeds", "shells", "stamps", "tickets", "tulips"),
)
_CONTAINERS: Final = ("bags", "boxes", "bowls", "crates", "rows")
_MORE: Final = ("{a} finds {n} more.", "{a} buys {n} more.", "{b} brings {n} more.", "{a} makes {n} more.")
_MORE_TRICKY: Final = (*_MORE, "{b} gives {a} {n}.", "{a} gets {n} from {b}.")
_LESS: Final = ("{a} loses {n}.", "{a} sells {n}.", "{b} takes {n}.", "{n} get lost.")
_LESS_TRICKY: Final = (*_LESS, "{a} gives {b} {n}.", "{b} gets {n} from {a}.")
_IRRELEVANT: Final = (
    "{b} has {n} {other}.",
    "{a} is {n} years old.",
    "It is {n} km to town.",
    "{b} walks for {n} minutes.",
    "The bag weighs {n} grams.",
)


class _Level(NamedTuple):
    """Parameters of the word problems of one level."""

    steps: tuple[int, int]
    """Minimum and maximum number of changes in a story."""
    largest: int
    """Approximate size of the largest numbers in the text."""
    tricky: bool
    """True to use sentences from which it is harder to see who gains and who loses things."""
    irrelevant: float
    """Probability that a story has a sentence that has no effect on the answer."""
    changes: str
    """The possible changes before the last one, as letters of `_CHANGES`; repeated letters are more likely."""
    ends: str
    """The possible last changes, in the same notation. A last change may also determine the question."""


_LEVELS: Final = {
    2: _Level((1, 1), 50, False, 0.0, "+-", "++--*s"),
    3: _Level((2, 2), 99, False, 0.0, "++--*h", "++--*hs"),
    4: _Level((3, 3), 400, True, 0.4, "++--*hd", "++--*hsbr"),
    5: _Level((4, 5), 3000, True, 1.0, "++--*hd", "+-hsbrtm"),
}


class _Story:
    """A word problem under construction: its people, its sentences and the current number of things."""

    def __init__(self, rng: Random, level: _Level) -> None:
        self.rng = rng
        self.level = level
        self.a, self.b = rng.sample(NAMES, 2)
        self.thing, self.other = rng.sample(THINGS, 2)
        self.sentences: list[str] = []
        self.lines: Lines = []
        self.question = ""
        self.kind = "story"
        self.x = 0
        """Current number of things."""

    def add_sentence(self, sentence: str, code: str, n: int | str = "", *, matters: bool = True) -> None:
        self.sentences.append(sentence.format(a=self.a, b=self.b, n=n, thing=self.thing, other=self.other))
        self.lines.append((code.format(n), matters))

    def begin(self) -> None:
        n = self.rng.randrange(self.level.largest // 5, self.level.largest + 1)
        if self.level.steps == (1, 1) or self.rng.random() < 0.75:
            self.x = n
            self.add_sentence("{a} has {n} {thing}.", "x={}", n)
            return
        count, each = self.rng.randrange(2, 10), max(2, n // 10)
        self.x = count * each
        container = self.rng.choice(_CONTAINERS)
        self.add_sentence(f"{{a}} has {count} {container} of {each} {{thing}}.", f"x={count}*{each}")

    # ------------------------------------------------------------------------------------------ changes
    # Each method adds a sentence and returns True, or returns False if its change does not fit the current number.

    def more(self) -> bool:
        n = self.rng.randrange(2, self.level.largest)
        self.x += n
        self.add_sentence(self.rng.choice(_MORE_TRICKY if self.level.tricky else _MORE), "x+={}", n)
        return True

    def less(self) -> bool:
        if self.x < 4:
            return False
        n = self.rng.randrange(2, self.x)
        self.x -= n
        self.add_sentence(self.rng.choice(_LESS_TRICKY if self.level.tricky else _LESS), "x-={}", n)
        return True

    def double(self) -> bool:
        by, word = self.rng.choice(((2, "doubles"), (3, "triples")))
        if self.x * by > 10 * self.level.largest:
            return False
        self.x *= by
        self.add_sentence(f"{{a}} {word} the pile.", f"x*={by}")
        return True

    def times(self) -> bool:
        n = self.rng.randrange(2, 10)
        if self.x * n > 10 * self.level.largest:
            return False
        self.x *= n
        self.add_sentence("Then there are {n} times as many.", "x*={}", n)
        return True

    def half(self) -> bool:
        if self.x % 2 or self.x < 4:
            return False
        self.x //= 2
        self.add_sentence(
            self.rng.choice(("{a} gives away half.", "Half of them get lost.", "{b} takes half.")), "x//=2"
        )
        return True

    # -------------------------------------------------------------------------------------------- ends

    def share(self) -> bool:
        divisors = [n for n in range(2, 13) if self.x % n == 0 and self.x > n]
        if not divisors:
            return False
        n = self.rng.choice(divisors)
        self.x //= n
        self.kind = "sharing"
        self.add_sentence("{a} shares them among {n} friends.", "x//={}", n)
        self.question = "How many does each get?"
        return True

    def pack(self) -> bool:
        n = self.rng.randrange(3, 13)
        if self.x < 2 * n:
            return False
        self.x //= n
        self.kind = "sharing"
        self.add_sentence("{a} packs them in boxes of {n}.", "x//={}", n)
        self.question = "How many boxes are full?"
        return True

    def pack_with_remainder(self) -> bool:
        n = self.rng.randrange(3, 13)
        if self.x < 2 * n:
            return False
        self.x %= n
        self.kind = "leftover"
        self.add_sentence("{a} packs them in boxes of {n}.", "x%={}", n)
        self.question = "How many are left over?"
        return True

    def compare_twice(self) -> bool:
        self.x *= 2
        self.add_sentence("{b} has twice as many as {a}.", "x*=2")
        self.question = f"How many does {self.b} have?"
        return True

    def compare_more(self) -> bool:
        n = self.rng.randrange(2, self.level.largest)
        self.x += n
        self.add_sentence("{b} has {n} more than {a}.", "x+={}", n)
        self.question = f"How many does {self.b} have?"
        return True

    def add_irrelevant(self) -> None:
        n = self.rng.randrange(3, 90)
        self.add_sentence(
            self.rng.choice(_IRRELEVANT), "x+={}" if self.rng.random() < 0.6 else "x-={}", n, matters=False
        )


_Change: TypeAlias = Callable[[_Story], bool]
_CHANGES: Final[dict[str, _Change]] = {
    "+": _Story.more,
    "-": _Story.less,
    "*": _Story.times,
    "h": _Story.half,
    "d": _Story.double,
    "s": _Story.share,
    "b": _Story.pack,
    "r": _Story.pack_with_remainder,
    "t": _Story.compare_twice,
    "m": _Story.compare_more,
}


def draw_story(rng: Random, level: int) -> tuple[str, int, str, Lines]:
    """Draw a random word problem of a level from 2 to 5. Return its text, its answer, its kind and its code.

    There is one line of code per sentence, with a flag that is False if the sentence has no effect on the answer.
    """
    plan = _LEVELS[level]
    story = _Story(rng, plan)
    story.begin()
    steps = rng.randrange(plan.steps[0], plan.steps[1] + 1)
    irrelevant_step = rng.randrange(steps) if rng.random() < plan.irrelevant else -1
    for step in range(steps):
        if step == irrelevant_step:
            story.add_irrelevant()
        choices = plan.ends if step == steps - 1 else plan.changes
        while not _CHANGES[rng.choice(choices)](story):
            pass
    question = story.question or rng.choice(
        (f"How many {story.thing} are there now?", f"How many {story.thing} does {story.a} have now?")
    )
    kind = "distractor" if irrelevant_step >= 0 else story.kind
    return " ".join([*story.sentences, question]), story.x, kind, story.lines
