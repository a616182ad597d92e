"""Rows of the benchmark `gateway`: the cost of a late turn of a conversation, compared with an early one.

Conversations of 100 turns, each with 500 sampled and 20 new prompt tokens, run in step. The request grows to
about 240 KB and the answer's prompt IDs to 52,000. The floor (`gateway_floor`) shows what reading and moving that
much JSON costs; after this is subtracted, a late turn should cost as much as an early one, because both add the
same number of tokens. The floor does not decode the prompt's IDs, so a gateway that decodes all of them in every
turn shows here. In the same way, turns after a prompt of 32,768 tokens are compared with turns after a short one.

Method:
- early turns are 2 to 4, late turns 98 to 100, of the same conversations, each continuing the last;
- CPU time of all gateway processes counts; an answer to another question fails the benchmark.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from benchmarks import Progress, Result
from benchmarks.gateway_load_generator import Target, open_connections, request_all
from benchmarks.gateway_payloads import LONG_PROMPT, LONG_PROMPT_TURNS, SHORT_PROMPT, TURNS, RequestFactory
from benchmarks.gateway_servers import ServerUnderTest
from benchmarks.process_usage import CpuMeter

MEASURED = 3
EARLY = range(2, 2 + MEASURED)
LATE = range(TURNS + 1 - MEASURED, TURNS + 1)


class TurnCost(NamedTuple):
    """CPU microseconds of an early and of a late turn."""

    early: float
    late: float


class ConversationCosts(NamedTuple):
    """Costs of all rounds, of our gateway and of the floor."""

    ours: tuple[TurnCost, ...]
    floor: tuple[TurnCost, ...]

    @property
    def growth(self) -> float:
        """Return the cost of a late turn over an early one, without what its larger JSON costs the floor."""
        json = median(cost.late - cost.early for cost in self.floor)
        return median((cost.late - json) / cost.early for cost in self.ours)

    def rows(self) -> list[Result]:
        def middle(costs: Sequence[TurnCost]) -> TurnCost:
            return TurnCost(median(cost.early for cost in costs), median(cost.late for cost in costs))

        mine, least = middle(self.ours), middle(self.floor)
        note = (
            f"turn {TURNS}, less the {least.late - least.early:.0f} CPU-us that its larger JSON costs the floor, "
            f"over turn {EARLY[0]}"
        )
        return [
            Result(name="turn_cost_growth", unit="ratio", ours=self.growth, target="<= 1.05", note=note),
            Result(
                name="turn_2_cpu_us",
                unit="CPU-us",
                ours=mine.early,
                peer="floor",
                theirs=least.early,
                target=">= 0.5x",
            ),
            Result(name=f"turn_{TURNS}_cpu_us", unit="CPU-us", ours=mine.late, peer="floor", theirs=least.late),
        ]


async def measure_conversations(
    ours: ServerUnderTest, floor: ServerUnderTest, *, conversations: int, rounds: int, progress: Progress
) -> ConversationCosts:
    """Measure our gateway and the floor alternately. The floor is stateless and gets only the measured turns."""
    costs: dict[str, list[TurnCost]] = {"ours": [], "floor": []}
    for at in range(rounds):
        for name, server, all_turns in (("floor", floor, False), ("ours", ours, True)):
            async with server.target(conversations) as target:
                costs[name].append(await run_conversations(target, conversations, all_turns=all_turns))
        progress(
            f"conversations {at + 1} of {rounds}: turn {EARLY[0]} {costs['ours'][-1].early:.0f} CPU-us, "
            f"turn {TURNS} {costs['ours'][-1].late:.0f}"
        )
    return ConversationCosts(tuple(costs["ours"]), tuple(costs["floor"]))


async def measure_prompt_growth(
    ours: ServerUnderTest, floor: ServerUnderTest, *, conversations: int, rounds: int, progress: Progress
) -> Result:
    """Compare turns after a prompt of 32,768 tokens with turns after a short one, without the floor's growth."""
    costs: dict[tuple[str, int], list[float]] = {}
    for at in range(rounds):
        progress(f"turns after long prompts, {at + 1} of {rounds}")
        for prompt in (SHORT_PROMPT, LONG_PROMPT):
            for name, server in (("floor", floor), ("ours", ours)):
                async with server.target(conversations) as target:
                    cost = await _mean_turn_cost(target, conversations, prompt)
                costs.setdefault((name, prompt), []).append(cost)
    middle = {key: median(values) for key, values in costs.items()}
    json = middle["floor", LONG_PROMPT] - middle["floor", SHORT_PROMPT]
    return Result(
        name="long_prompt_turn_growth",
        unit="ratio",
        ours=(middle["ours", LONG_PROMPT] - json) / middle["ours", SHORT_PROMPT],
        target="<= 1.2",
        note=f"{middle['ours', LONG_PROMPT]:.0f} CPU-us a turn, less the {json:.0f} that the larger JSON costs "
        f"the floor, over {middle['ours', SHORT_PROMPT]:.0f} after a prompt of {SHORT_PROMPT} tokens",
    )


async def _mean_turn_cost(target: Target, conversations: int, prompt_tokens: int) -> float:
    """Return the CPU microseconds of a turn, without the first, which sends the whole prompt."""
    ask = RequestFactory(size=4 * prompt_tokens, prompt_tokens=prompt_tokens)
    histories = [ask.open_conversation() for _ in range(conversations)]
    async with open_connections(target.port, conversations) as connections:
        meter = CpuMeter(target.pids)
        for turn in range(1, LONG_PROMPT_TURNS + 1):
            if turn == 2:
                meter.start()
            await request_all(
                connections,
                [
                    (target.heads[at % len(target.heads)], number, ask.close_body(history))
                    for at, (number, history) in enumerate(histories)
                ],
            )
            histories = [ask.next_turn(history, number, turn) for number, history in histories]
        return 1e6 * meter.used() / (conversations * (LONG_PROMPT_TURNS - 1))


async def run_conversations(target: Target, conversations: int, *, all_turns: bool) -> TurnCost:
    """Run conversations in step, one session each. Without `all_turns` only the measured turns are sent."""
    ask = RequestFactory(size=4_096, prompt_tokens=SHORT_PROMPT)
    conversations_so_far = [ask.open_conversation() for _ in range(conversations)]
    cpu: dict[str, float] = {}
    async with open_connections(target.port, conversations) as connections:
        meter = CpuMeter(target.pids)
        for turn in range(1, TURNS + 1):
            if turn in (EARLY.start, LATE.start):
                meter.start()
            if all_turns or turn == 1 or turn in EARLY or turn in LATE:
                requests = [
                    (target.heads[at % len(target.heads)], number, ask.close_body(history))
                    for at, (number, history) in enumerate(conversations_so_far)
                ]
                await request_all(connections, requests)
            if turn + 1 in (EARLY.stop, LATE.stop):
                cpu["early" if turn in EARLY else "late"] = 1e6 * meter.used() / (conversations * MEASURED)
            conversations_so_far = [
                ask.next_turn(history, number, turn) for number, history in conversations_so_far
            ]
    return TurnCost(cpu["early"], cpu["late"])
