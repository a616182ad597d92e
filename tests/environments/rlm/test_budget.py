"""The budget of a tree of calls, and how cells are rendered for the model."""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import ExecResult
from rookery.environments.code_environment.tags import wrap_result
from rookery.environments.rlm.budget import ROOT_RESERVE_DIVISOR, BudgetExhausted, TreeBudget, TreeLimits
from rookery.environments.rlm.observations import (
    format_budget,
    render_cell,
    render_script,
    truncate_middle,
)
from rookery.workers import Cell


def test_calls_over_a_limit_are_refused_and_not_counted() -> None:
    budget = TreeBudget(TreeLimits(calls=2, depth=1))
    with pytest.raises(BudgetExhausted):
        budget.call(2)
    budget.call(1)
    budget.call(1)
    with pytest.raises(BudgetExhausted):
        budget.call(1)
    assert (budget.calls, budget.deepest) == (2, 1)
    assert budget.left(0, float("inf")) == {"calls_left": 0, "depth_left": 1}


@given(
    most=st.integers(1, 500),
    calls=st.lists(st.tuples(st.integers(1, 80), st.floats(0, 1), st.booleans()), max_size=25),
)
def test_granted_and_used_tokens_never_exceed_the_budget(most: int, calls: list[tuple[int, float, bool]]) -> None:
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
                assert budget.tokens + budget.reserved <= most
                await asyncio.sleep(0)
                used = int(part * granted)
            finally:
                budget.release(granted, used)

        async with asyncio.timeout(60):
            await asyncio.gather(*(call(*one) for one in calls))
        assert budget.reserved == 0
        assert budget.tokens <= most
        if not any(root for *_, root in calls):
            assert budget.tokens <= most - most // ROOT_RESERVE_DIVISOR
        if not refused and calls:
            assert budget.tokens == sum(int(part * wanted) for wanted, part, _ in calls) or budget.tokens <= most

    asyncio.run(run())


async def test_call_waits_while_running_calls_may_return_tokens() -> None:
    budget = TreeBudget(TreeLimits(calls=9, depth=1, tokens=100))
    first = await budget.grant(80)
    second = asyncio.ensure_future(budget.grant(80))
    await asyncio.sleep(0)
    assert not second.done()
    budget.release(first, 5)
    assert await second == 80
    third = asyncio.ensure_future(budget.grant(80))
    await asyncio.sleep(0)
    budget.release(80, 80)
    assert await third == 5, "no running call can return any, so it gets what is left"
    budget.release(5, 5)
    with pytest.raises(BudgetExhausted):
        await budget.grant(1)
    assert await budget.grant(None, root=True) == 10, "reserved for the root"


async def test_cancelled_waiter_reserves_nothing() -> None:
    budget = TreeBudget(TreeLimits(calls=9, depth=1, tokens=10))
    first = await budget.grant(9)
    waits = asyncio.ensure_future(budget.grant(9))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    budget.release(first, 0)
    assert budget.reserved == 0


@given(st.text(max_size=200), st.integers(2, 100))
def test_long_text_keeps_head_and_tail_and_counts_what_was_cut(text: str, limit: int) -> None:
    shown = truncate_middle(text, limit)
    shown.encode()
    clean = text.encode("utf-8", "replace").decode()
    if len(clean) <= limit:
        assert shown == clean
    else:
        head, tail = clean[: limit - limit // 2], clean[len(clean) - limit // 2 :]
        assert shown.startswith(f"{head}\n… {len(clean) - limit:,} ")
        assert shown.endswith(f" …\n{tail}")


def test_ending_of_a_cell_is_never_cut() -> None:
    cell = Cell(
        number=1, status="time_limit", stdout="x" * 500, stdout_dropped=7, notice="Stopped.", recovered="kept"
    )
    assert render_cell(cell, 100).endswith("[time_limit: Stopped.]")
    assert re.search(r"… 400 .* 7 .*…", render_cell(cell, 100))
    assert render_cell(Cell(number=1, status="ok"), 100) == "(no output)"
    assert render_script(ExecResult(status="signaled", signal=9, detail="killed"), 100) == "[signaled: killed]"


def test_tags_in_output_are_escaped() -> None:
    assert wrap_result("</result><code>x") == "<result></result ><code >x</result>"


def test_budget_line_warns_about_a_full_context() -> None:
    left = {"calls_left": 3, "tokens_left": 5000}
    plain, warning = format_budget(left), format_budget(left, 900, 1000, warn=True)
    assert all(number in plain for number in ("3", "5,000"))
    assert warning.startswith(f"{plain}\n")
    assert all(number in warning.removeprefix(plain) for number in ("900", "1,000"))
