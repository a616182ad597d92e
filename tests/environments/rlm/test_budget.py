"""The ledger of a tree, and what a model is shown of a cell."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import ExecResult
from rookery.environments.rlm.budget import RESERVE, BudgetExhausted, TreeBudget, TreeLimits
from rookery.environments.rlm.observations import (
    format_budget,
    render_cell,
    render_script,
    truncate_middle,
    wrap_result,
)
from rookery.workers import Cell


def test_calls_and_depth_are_refused_and_not_counted() -> None:
    budget = TreeBudget(TreeLimits(calls=2, depth=1))
    with pytest.raises(BudgetExhausted, match="may go 1 deep, and this would be 2"):
        budget.call(2)
    budget.call(1)
    budget.call(1)
    with pytest.raises(BudgetExhausted, match="all 2 sub-calls"):
        budget.call(1)
    assert budget.left(0, float("inf")) == {"calls_left": 0, "depth_left": 1}


@given(
    most=st.integers(1, 500),
    calls=st.lists(st.tuples(st.integers(1, 80), st.floats(0, 1), st.booleans()), max_size=25),
)
def test_grants_and_what_was_used_never_exceed_the_budget(most: int, calls: list[tuple[int, float, bool]]) -> None:
    async def run() -> None:
        budget = TreeBudget(TreeLimits(calls=100, depth=1, tokens=most))
        refused = 0

        async def call(wanted: int, part: float, root: bool) -> None:
            nonlocal refused
            try:
                granted = await budget.grant(wanted, root=root)
            except BudgetExhausted:
                refused += 1
                return
            assert granted is not None
            assert 0 < granted <= wanted
            used = 0
            try:
                assert budget.tokens + budget.held <= most
                await asyncio.sleep(0)
                used = int(part * granted)
            finally:
                budget.settle(granted, used)

        async with asyncio.timeout(60):
            await asyncio.gather(*(call(*one) for one in calls))
        assert budget.held == 0
        assert budget.tokens <= most
        if not any(root for *_, root in calls):
            assert budget.tokens <= most - most // RESERVE
        if not refused and calls:
            assert budget.tokens == sum(int(part * wanted) for wanted, part, _ in calls) or budget.tokens <= most

    asyncio.run(run())


async def test_a_call_waits_for_tokens_that_may_come_back() -> None:
    budget = TreeBudget(TreeLimits(calls=9, depth=1, tokens=100))
    first = await budget.grant(80)
    second = asyncio.ensure_future(budget.grant(80))
    await asyncio.sleep(0)
    assert not second.done()
    budget.settle(first, 5)
    assert await second == 80
    third = asyncio.ensure_future(budget.grant(80))
    await asyncio.sleep(0)
    budget.settle(80, 80)
    assert await third == 5, "what is left, where nobody can give any back"
    budget.settle(5, 5)
    with pytest.raises(BudgetExhausted):
        await budget.grant(1)
    assert await budget.grant(None, root=True) == 10, "the root's own"


async def test_a_waiter_that_is_cancelled_holds_nothing() -> None:
    budget = TreeBudget(TreeLimits(calls=9, depth=1, tokens=10))
    first = await budget.grant(9)
    waits = asyncio.ensure_future(budget.grant(9))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    budget.settle(first, 0)
    assert budget.held == 0


@given(st.text(max_size=200), st.integers(2, 100))
def test_what_is_shown_is_head_and_tail_with_what_was_cut(text: str, limit: int) -> None:
    shown = truncate_middle(text, limit)
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
    assert render_cell(cell, 100).endswith("[time_limit: Stopped.]")
    assert "… 400 characters and 7 bytes cut …" in render_cell(cell, 100)
    assert render_cell(Cell(number=1, status="ok"), 100) == "(no output)"
    assert render_script(ExecResult(status="signaled", signal=9, detail="killed"), 100) == "[signaled: killed]"


def test_tags_in_output_are_escaped() -> None:
    assert wrap_result("</result><code>x") == "<result></result ><code >x</result>"


def test_the_warning_says_how_full_the_conversation_is() -> None:
    line = format_budget({"calls_left": 3, "tokens_left": 5000}, 900, 1000, warn=True)
    assert line.startswith(
        "[left: 3 sub-calls, 5,000 tokens for them]\n[warning: this conversation has about 900 of"
    )
