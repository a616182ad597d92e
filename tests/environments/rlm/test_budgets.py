"""The ledger of a tree, and what a model is shown of a cell."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import ExecResult
from rookery.environments.rlm.budgets import RESERVE, BudgetSpent, Ledger, TreeLimits
from rookery.environments.rlm.observing import budget_line, capped, of_cell, of_script, tagged
from rookery.workers import Cell


def test_calls_and_depth_are_refused_in_words_and_not_counted() -> None:
    ledger = Ledger(TreeLimits(calls=2, depth=1))
    with pytest.raises(BudgetSpent, match="may go 1 deep, and this would be 2"):
        ledger.call(2)
    ledger.call(1)
    ledger.call(1)
    with pytest.raises(BudgetSpent, match="all 2 sub-calls"):
        ledger.call(1)
    assert ledger.left(0, float("inf")) == {"calls_left": 0, "depth_left": 1}


@given(
    most=st.integers(1, 500),
    calls=st.lists(st.tuples(st.integers(1, 80), st.floats(0, 1), st.booleans()), max_size=25),
)
def test_grants_and_what_was_used_never_exceed_the_budget(most: int, calls: list[tuple[int, float, bool]]) -> None:
    async def run() -> None:
        ledger = Ledger(TreeLimits(calls=100, depth=1, tokens=most))
        refused = 0

        async def call(wanted: int, part: float, root: bool) -> None:
            nonlocal refused
            try:
                granted = await ledger.grant(wanted, root=root)
            except BudgetSpent:
                refused += 1
                return
            assert granted is not None
            assert 0 < granted <= wanted
            used = 0
            try:
                assert ledger.tokens + ledger.held <= most
                await asyncio.sleep(0)
                used = int(part * granted)
            finally:
                ledger.settle(granted, used)

        async with asyncio.timeout(60):
            await asyncio.gather(*(call(*one) for one in calls))
        assert ledger.held == 0
        assert ledger.tokens <= most
        if not any(root for *_, root in calls):
            assert ledger.tokens <= most - most // RESERVE
        if not refused and calls:
            assert ledger.tokens == sum(int(part * wanted) for wanted, part, _ in calls) or ledger.tokens <= most

    asyncio.run(run())


async def test_a_call_waits_for_tokens_that_may_come_back() -> None:
    ledger = Ledger(TreeLimits(calls=9, depth=1, tokens=100))
    first = await ledger.grant(80)
    second = asyncio.ensure_future(ledger.grant(80))
    await asyncio.sleep(0)
    assert not second.done()
    ledger.settle(first, 5)
    assert await second == 80
    third = asyncio.ensure_future(ledger.grant(80))
    await asyncio.sleep(0)
    ledger.settle(80, 80)
    assert await third == 5, "what is left, where nobody can give any back"
    ledger.settle(5, 5)
    with pytest.raises(BudgetSpent):
        await ledger.grant(1)
    assert await ledger.grant(None, root=True) == 10, "the root's own"


async def test_a_waiter_that_is_cancelled_holds_nothing() -> None:
    ledger = Ledger(TreeLimits(calls=9, depth=1, tokens=10))
    first = await ledger.grant(9)
    waits = asyncio.ensure_future(ledger.grant(9))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    ledger.settle(first, 0)
    assert ledger.held == 0


@given(st.text(max_size=200), st.integers(2, 100))
def test_what_is_shown_is_head_and_tail_with_what_was_cut(text: str, limit: int) -> None:
    shown = capped(text, limit)
    shown.encode()
    clean = text.encode("utf-8", "replace").decode()
    if len(clean) <= limit:
        assert shown == clean
    else:
        head, tail = clean[: limit - limit // 2], clean[len(clean) - limit // 2 :]
        assert shown == f"{head}\n… {len(clean) - limit:,} characters cut …\n{tail}"


def test_what_ended_a_cell_is_never_cut() -> None:
    cell = Cell(
        number=1, status="time_limit", stdout="x" * 500, stdout_dropped=7, notice="Stopped.", recovered="kept"
    )
    assert of_cell(cell, 100).endswith("[time_limit: Stopped.]")
    assert "… 400 characters and 7 bytes cut …" in of_cell(cell, 100)
    assert of_cell(Cell(number=1, status="ok"), 100) == "(no output)"
    assert of_script(ExecResult(status="signaled", signal=9, detail="killed"), 100) == "[signaled: killed]"


def test_tags_in_output_are_not_ours() -> None:
    assert tagged("</result><code>x") == "<result></result ><code >x</result>"


def test_the_warning_says_how_full_the_conversation_is() -> None:
    line = budget_line({"calls_left": 3, "tokens_left": 5000}, 900, 1000, warn=True)
    assert line.startswith(
        "[left: 3 sub-calls, 5,000 tokens for them]\n[warning: this conversation has about 900 of"
    )
