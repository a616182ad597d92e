"""Generate long contexts (texts to be searched) from a seed, each with a question and its answer.

The answer is known without generating the context. Equal recipes produce equal questions, answers and bytes. The
facts that an answer needs are spread over the whole context: no half of it contains all of them, and no other line
could be mistaken for one. A context is written to disk piece by piece and is never in memory as a whole.

| kind | context | question |
|---|---|---|
| `needle` | notes in one text | the code of a vault, in five parts far apart, among parts of other codes |
| `aggregate` | a ledger in one text | the units of one item that were refunded in one region |
| `join` | a directory of documents | how many people of a team have a room on a floor: people, badges, rooms |
"""

import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from rookery.core import Message, Task

PARTS: Final = 5
AGGREGATE_ROWS: Final = 60
BLOCKS: Final = 64
FILL_LINES: Final = 2048
_VAULTS = ("Kestrel", "Osprey", "Merlin", "Harrier", "Goshawk", "Lanner", "Saker", "Hobby", "Buzzard", "Kite")
# fmt: off
_WORDS = (
    "the", "harbour", "office", "archive", "morning", "letters", "were", "moved", "before", "winter", "and",
    "nobody", "counted", "them", "again", "after", "rain", "because", "keepers", "wrote", "every", "change",
    "into", "margins", "while", "boats", "waited", "under", "old", "lamps", "near", "stone", "walls",
)
# fmt: on
_REGIONS = ("north", "south", "east", "west", "coast", "hills")
_ITEMS = ("lamp", "chair", "kettle", "clock", "ladder", "basket", "mirror", "drum")
_STATES = ("paid", "open", "refunded")
_TEAMS = ("Heron", "Egret", "Plover", "Curlew", "Avocet", "Dunlin")
_FLOORS = 24


class Recipe(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Parameters from which a long context (one text or a directory of documents), a question and its answer are
    generated."""

    kind: Literal["needle", "aggregate", "join"]
    seed: int
    size: int
    """Approximate size of the generated context in bytes."""

    def __post_init__(self) -> None:
        if not 10_000 <= self.size <= 1 << 30:
            raise ValueError(f"size must be from 10,000 to {1 << 30:,} bytes, not {self.size}")

    @cached_property
    def _generator(self) -> "_Needle | _Aggregate | _Join":
        if self.kind == "needle":
            return _Needle(self)
        return _Aggregate(self) if self.kind == "aggregate" else _Join(self)

    @property
    def question(self) -> str:
        return self._generator.question

    @property
    def answer(self) -> int:
        return self._generator.answer

    @property
    def facts(self) -> Sequence[str]:
        """All lines of the generated context that are needed for the answer."""
        return self._generator.facts

    def write(self, folder: Path) -> Path:
        """Write the generated context below `folder` and return the path of its file or directory."""
        return self._generator.write(folder)

    def rng(self, part: str) -> random.Random:
        return random.Random(f"{self.kind} {self.seed} {self.size} {part}")  # noqa: S311


def generate_tasks(kinds: Sequence[str], megabytes: Sequence[float], count: int, seed: int) -> list[Task]:
    """Generate `count` tasks. Kinds and sizes alternate, so that the start of the list is balanced over both."""
    tasks = []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        size = megabytes[index // len(kinds) % len(megabytes)]
        number = index // (len(kinds) * len(megabytes))
        recipe = msgspec.convert(
            {"kind": kind, "seed": seed * 1_000_003 + number, "size": int(size * 1_000_000)}, Recipe
        )
        data: dict[str, Any] = {"answer": recipe.answer, "kind": kind, "megabytes": size}
        tasks.append(
            Task(
                id=f"{kind}-{seed}-{size:g}mb-{number:04}",
                prompt=(Message("user", recipe.question),),
                data={**data, "recipe": msgspec.to_builtins(recipe)},
            )
        )
    return tasks


def _spread(rng: random.Random, count: int) -> list[float]:
    """Return one position in each of `count` equal parts of [0, 1]; the first and last are in the outer tenths."""
    positions = [(index + rng.uniform(0.2, 0.8)) / count for index in range(count)]
    positions[0], positions[-1] = rng.uniform(0.01, 0.09), rng.uniform(0.91, 0.99)
    return positions


def _write_lines(path: Path, size: int, fill: Sequence[str], facts: dict[float, str], rng: random.Random) -> Path:
    """Write about `size` bytes of random lines of `fill`. `facts` maps relative positions to lines to put there.

    The position 0 is the start of the file and 1 its end.
    """
    mean = sum(map(len, fill)) / len(fill) + 1
    lines = max(BLOCKS, int(size / mean))
    ordered = sorted(facts.items())
    with path.open("w", encoding="utf-8") as file:
        for block in range(BLOCKS):
            low, high = lines * block // BLOCKS, lines * (block + 1) // BLOCKS
            chosen = rng.choices(fill, k=high - low)
            while ordered and ordered[0][0] * lines < high:
                position, fact = ordered.pop(0)
                chosen[max(0, min(int(position * lines) - low, len(chosen) - 1))] = fact
            file.write("\n".join(chosen) + "\n")
    return path


class _Needle:
    def __init__(self, recipe: Recipe) -> None:
        rng = recipe.rng("facts")
        self._recipe = recipe
        self._vault = rng.choice(_VAULTS)
        parts = [rng.randint(10, 99) for _ in range(PARTS)]
        self._positions = _spread(rng, PARTS)
        order = list(range(PARTS))
        rng.shuffle(order)
        self.facts = [_part(self._vault, index + 1, parts[index]) for index in order]
        self.answer = int("".join(map(str, parts)))
        self.question = (
            f"Somewhere in the notes are the {PARTS} parts of the code of vault {self._vault}, each a number of "
            f"two digits. What is the code: the {PARTS} parts one after the other, as one number?"
        )

    def write(self, folder: Path) -> Path:
        rng = self._recipe.rng("fill")
        others = [name for name in _VAULTS if name != self._vault]
        fill = [f"Note: {' '.join(rng.choices(_WORDS, k=rng.randint(8, 16)))}." for _ in range(FILL_LINES)]
        fill[:: FILL_LINES // 64] = [
            _part(rng.choice(others), rng.randint(1, PARTS), rng.randint(10, 99)) for _ in range(64)
        ]
        facts = dict(zip(self._positions, self.facts, strict=True))
        return _write_lines(folder / "context.txt", self._recipe.size, fill, facts, rng)


def _part(vault: str, number: int, value: int) -> str:
    return f"Note: part {number} of the code of vault {vault} is {value}."


class _Aggregate:
    def __init__(self, recipe: Recipe) -> None:
        rng = recipe.rng("facts")
        self._recipe = recipe
        self._region, self._item = rng.choice(_REGIONS), rng.choice(_ITEMS)
        units = [rng.randint(1, 99) for _ in range(AGGREGATE_ROWS)]
        self._positions = _spread(rng, AGGREGATE_ROWS)
        orders = rng.sample(range(900_000, 1_000_000), AGGREGATE_ROWS)
        self.facts = [
            _row(order, self._region, self._item, count, "refunded")
            for order, count in zip(orders, units, strict=True)
        ]
        self.answer = sum(units)
        self.question = (
            f"The ledger has one order on each line: number, region, item, units, state. How many units of "
            f"{self._item} were refunded in the region {self._region}, over the whole ledger?"
        )

    def write(self, folder: Path) -> Path:
        rng = self._recipe.rng("fill")
        fill: list[str] = []
        while len(fill) < FILL_LINES:
            region, item, state = rng.choice(_REGIONS), rng.choice(_ITEMS), rng.choice(_STATES)
            if (region, item, state) != (self._region, self._item, "refunded"):
                fill.append(_row(rng.randint(100_000, 899_999), region, item, rng.randint(1, 99), state))
        facts = dict(zip(self._positions, self.facts, strict=True))
        return _write_lines(folder / "context.txt", self._recipe.size, fill, facts, rng)


def _row(order: int, region: str, item: str, units: int, state: str) -> str:
    return f"order {order} | {region} | {item} | {units} units | {state}"


class _Join:
    """Context of a `join` task: people, badges and rooms in separate directories.

    Each document about people or badges has a thousand entries; all rooms are in one document.
    """

    PER_PERSON = 96
    ROOMS = 480

    def __init__(self, recipe: Recipe) -> None:
        rng = recipe.rng("facts")
        self._recipe = recipe
        self._people = max(100, recipe.size // self.PER_PERSON)
        self._team, self._floor = rng.choice(_TEAMS), rng.randrange(1, _FLOORS)
        count = rng.randint(12, 48)
        self._matches = sorted({int(position * self._people) for position in _spread(rng, count)})
        self.answer = len(self._matches)
        self.question = (
            f"The folder has documents about people (their team and badge), badges (the room that each opens) and "
            f"rooms (the floor of each). How many people of team {self._team} have a badge for a room on floor "
            f"{self._floor}?"
        )

    @property
    def facts(self) -> list[str]:
        """The lines about the people to count, their badges and the rooms of these badges."""
        wanted = set(self._matches)
        found = [(person, badge) for index, person, badge in self._lines() if index in wanted]
        opened = {badge.rpartition(" ")[2] for _, badge in found}
        rooms = [_room(room, floor) for room, floor in self.rooms() if room in opened]
        return [*(line for pair in found for line in pair), *rooms]

    def _lines(self) -> Iterator[tuple[int, str, str]]:
        """Yield the number, the line about the person and the line about the badge, for each person."""
        rng = self._recipe.rng("fill")
        rooms = self.rooms()
        inside = [room for room, floor in rooms if floor == self._floor]
        outside = [room for room, floor in rooms if floor != self._floor]
        every = [room for room, _ in rooms]
        others = [team for team in _TEAMS if team != self._team]
        matches = set(self._matches)
        for index in range(self._people):
            badge = f"B{index * 7919 % 100_000_007:09}"
            if index in matches:
                team, room = self._team, rng.choice(inside)
            elif rng.random() < 0.2:
                team, room = self._team, rng.choice(outside)
            else:
                team, room = rng.choice(others), rng.choice(every)
            yield (
                index,
                f"person {index:07} is in team {team} and has badge {badge}",
                f"badge {badge} opens room {room}",
            )

    def rooms(self) -> list[tuple[str, int]]:
        rng = self._recipe.rng("rooms")
        numbers = rng.sample(range(1_000, 9_999), self.ROOMS)
        return [(f"R{number}", index % _FLOORS) for index, number in enumerate(numbers)]

    def write(self, folder: Path) -> Path:
        top = folder / "context"
        for name in ("people", "badges", "rooms"):
            (top / name).mkdir(parents=True)
        _document(top / "rooms" / "00000.txt", [_room(room, floor) for room, floor in self.rooms()])
        shuffled: list[str] = []
        people: list[str] = []
        rng = self._recipe.rng("badges")
        for index, person, badge in self._lines():
            people.append(person)
            shuffled.append(badge)
            if len(people) == 1_000 or index + 1 == self._people:
                rng.shuffle(shuffled)
                _document(top / "people" / f"{index // 1_000:05}.txt", people)
                _document(top / "badges" / f"{index // 1_000:05}.txt", shuffled)
                people, shuffled = [], []
        return top


def _room(room: str, floor: int) -> str:
    return f"room {room} is on floor {floor}"


def _document(path: Path, lines: Sequence[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
