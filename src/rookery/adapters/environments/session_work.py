"""Run code that calls models over HTTP, within the budgets and the deadline of an attempt. Runs in runners."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from rookery.core import RookeryError, Truncation, UpstreamError, UsageError
from rookery.core.causes import get_cause
from rookery.core.errors import describe
from rookery.environments import Context, Environment, Score
from rookery.gateway.client import SessionRecord
from rookery.gateway.gateway_session import GatewaySession

T = TypeVar("T")
GRACE: Final = 5.0
"""Seconds that the work gets to end after a budget of the rollout is exhausted; then it is cancelled."""
RESERVE: Final = 5.0
"""Seconds before the deadline of the stage at which work is cancelled, but at most a tenth of the time left."""
END_SECONDS: Final = 3.0
"""Time limit, in seconds, for ending the gateway session of an attempt that failed or was cancelled."""
UNWIND: Final = 20.0
"""Seconds that cancelled work gets to clean up."""


async def run_in_session(ctx: Context, work: Callable[[GatewaySession], Coroutine[Any, Any, T]]) -> T:
    """Run `work` with a gateway session and return its result.

    Raise `Truncation` if a budget is exhausted or the deadline passes before `work` returns. If `work` raises
    after a model call failed for which the policy is not responsible, raise `UpstreamError` with the cause of that
    failure; otherwise raise the exception of `work`. In any case the recorded turns are added to the attempt.
    """
    async with ctx.gateway_session() as session:
        reserve = min(RESERVE, 0.1 * ctx.remaining)
        working = asyncio.create_task(work(session), name="work of another system")
        exhausted = asyncio.create_task(session.wait_truncated(), name="budget")
        try:
            await ctx.charge_policy("tool", _wait(ctx, session, working, exhausted, reserve))
        except BaseException:
            with suppress(RookeryError):  # record the turns that were sampled until then
                await session.end(timeout=END_SECONDS)
            raise
        finally:
            working.cancel()
            exhausted.cancel()
            await asyncio.wait({working, exhausted}, timeout=UNWIND)
            if not exhausted.cancelled() and exhausted.done():
                exhausted.exception()  # mark it as retrieved: `_wait` has raised it
        if not working.done():
            raise RookeryError("the environment kept running after it was cancelled", cause="bug.uncancellable")
        record = await session.end()
        if working.cancelled():
            session.check()
            raise Truncation("time", "the environment exceeded the time limit of the run stage")
        if (error := working.exception()) is not None:
            check_model_calls(session, record, error)
            raise error
        return working.result()


async def _wait(
    ctx: Context,
    session: GatewaySession,
    working: "asyncio.Task[Any]",
    exhausted: "asyncio.Task[Any]",
    reserve: float,
) -> None:
    """Wait until the work ends, its deadline passes, or the grace period after an exhausted budget ends."""
    while not working.done():
        left = max(ctx.remaining - reserve, 0.0)
        await asyncio.wait({working, exhausted}, timeout=min(left, 1.0), return_when="FIRST_COMPLETED")
        if working.done():
            return
        if exhausted.done():
            exhausted.result()  # raises if the gateway cannot be reached
            await asyncio.wait({working}, timeout=min(GRACE, left))
            return
        if ctx.remaining <= reserve:
            await session.check_upstream()  # raises if the inference engine hangs
            return


def check_model_calls(session: GatewaySession, record: SessionRecord, error: object) -> None:
    """Raise if a model call explains the failure `error` of another system's code.

    Raise `Truncation` if a budget was exhausted, and `UpstreamError` if the last call failed.
    """
    session.check()
    code = record.failure
    if code and (get_cause(code).fault == "infra" or not record.turns):
        text = describe(error) if isinstance(error, BaseException) else str(error)
        raise UpstreamError(f"the environment failed after a model call failed with {code}: {text}", cause=code)


def read_reward_range(value: object) -> tuple[float, float]:
    """Return the argument `reward_range` of an environment as two numbers."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UsageError(f"reward_range must be two numbers, such as [0, 1], not {value!r:.80}")
    return (float(value[0]), float(value[1]))


class ScoredInRun(Environment):
    """Base class for environments that score the attempt at the end of the run stage.

    `run` stores the `Score` in `ctx.state["score"]`. An attempt that was truncated before that gets the lowest
    reward of the range.
    """

    async def score(self, ctx: Context) -> Score | float:
        score: Score | float = ctx.state.get("score", self.reward_range[0])
        return score
