"""What a late turn of a conversation costs our gateway, beside an early one.

Conversations of 100 turns, 500 tokens sampled and 20 new ones in each, all in step. The request grows to some
240 KB and the answer's prompt ids to 52,000; what it costs to read and move that much JSON is what the floor
costs more for the same turns. Taken off, a late turn is to cost what an early one does: both bring the same
number of new tokens. The floor does not decode the prompt's ids: whoever decodes all of them again in each turn
pays for that here.

Promises:
- early are turns 2 to 4, late 98 to 100, of the same conversations, each the continuation of the last;
- CPU time of all processes of the gateway counts; every answer is the one to its question, or the bench fails.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result
from benchmarks.gateway_load import Target, at_once, connected
from benchmarks.gateway_payloads import SHORT_PROMPT, TURNS, Ask
from benchmarks.gateway_servers import Contender
from benchmarks.process_usage import CpuMeter

MEASURED = 3
EARLY = range(2, 2 + MEASURED)
LATE = range(TURNS + 1 - MEASURED, TURNS + 1)


class Cost(NamedTuple):
    """CPU µs of a turn."""

    early: float
    late: float


class Turns(NamedTuple):
    """The rounds of both."""

    ours: tuple[Cost, ...]
    floor: tuple[Cost, ...]

    @property
    def growth(self) -> float:
        """A late turn without what its JSON costs more, over an early one."""
        json = median(cost.late - cost.early for cost in self.floor)
        return median((cost.late - json) / cost.early for cost in self.ours)

    def rows(self) -> list[Result]:
        def middle(costs: Sequence[Cost]) -> Cost:
            return Cost(median(cost.early for cost in costs), median(cost.late for cost in costs))

        mine, least = middle(self.ours), middle(self.floor)
        note = (
            f"turn {TURNS} without the {least.late - least.early:.0f} CPU-us that the floor needs more "
            f"for its JSON, over turn {EARLY[0]}"
        )
        return [
            Result(name="turn_cost_growth", unit="ratio", ours=self.growth, target="<= 1.05", note=note),
            Result(name="turn_2_cpu_us", unit="CPU-us", ours=mine.early, peer="floor", theirs=least.early),
            Result(name=f"turn_{TURNS}_cpu_us", unit="CPU-us", ours=mine.late, peer="floor", theirs=least.late),
        ]


async def measure_turns(
    ours: Contender, floor: Contender, *, conversations: int, rounds: int, progress: Progress
) -> Turns:
    """Both by turns; the floor has no memory and is asked the measured turns alone."""
    found: dict[str, list[Cost]] = {"ours": [], "floor": []}
    for at in range(rounds):
        for name, contender, every in (("floor", floor, False), ("ours", ours, True)):
            async with contender.target(conversations) as target:
                found[name].append(await converse(target, conversations, every=every))
        progress(
            f"conversations {at + 1} of {rounds}: turn {EARLY[0]} {found['ours'][-1].early:.0f} CPU-us, "
            f"turn {TURNS} {found['ours'][-1].late:.0f}"
        )
    return Turns(tuple(found["ours"]), tuple(found["floor"]))


async def converse(target: Target, conversations: int, *, every: bool) -> Cost:
    """Conversations in step, one session each; without `every` only the measured turns are asked."""
    ask = Ask(size=4_096, prompt_tokens=SHORT_PROMPT)
    opened = [ask.opened() for _ in range(conversations)]
    cpu: dict[str, float] = {}
    async with connected(target.port, conversations) as connections:
        meter = CpuMeter(target.pids)
        for turn in range(1, TURNS + 1):
            if turn in (EARLY.start, LATE.start):
                meter.start()
            if every or turn == 1 or turn in EARLY or turn in LATE:
                asked = [
                    (target.heads[at % len(target.heads)], number, ask.closed(history))
                    for at, (number, history) in enumerate(opened)
                ]
                await at_once(connections, asked)
            if turn + 1 in (EARLY.stop, LATE.stop):
                cpu["early" if turn in EARLY else "late"] = 1e6 * meter.used() / (conversations * MEASURED)
            opened = [ask.turn(history, number, turn) for number, history in opened]
    return Cost(cpu["early"], cpu["late"])
