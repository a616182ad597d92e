"""What one attempt used: time in its stages, time in which it waited, and what its model calls cost.

Promises:
- time in which several wait for the same kind of thing counts once;
- what is still waited for when the account is taken counts up to then: no time is below nothing;
- times of a stage are whole: with its pauses, which are told apart.
"""

from rookery.core import Stage, Timing, Usage
from rookery.environments import Context
from rookery.gateway import Session


class Account:
    """Belongs to one loop, whose time it is told."""

    __slots__ = ("_held", "_seconds", "_since", "_waited", "_waits")

    def __init__(self) -> None:
        self._waits: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._seconds: dict[Stage, float] = {}
        self._held = 0.0

    def waiting(self, on: str, step: int, now: float) -> None:
        """One more waits for this, or one less."""
        count = self._waits.get(on, 0)
        if count == 0:
            self._since[on] = now
        elif count + step == 0:
            self._waited[on] = self._waited.get(on, 0.0) + now - self._since[on]
        self._waits[on] = count + step

    @property
    def waits(self) -> bool:
        """For anything, at this moment."""
        return any(self._waits.values())

    def waits_on(self, what: str) -> bool:
        """Return True while the attempt waits for `what`, for example `model` or `sandbox`."""
        return self._waits.get(what, 0) > 0

    def stage(self, stage: Stage, seconds: float, held: float) -> None:
        """A stage is over; its clock stood still for `held`."""
        self._seconds[stage] = seconds
        self._held += held

    def timing(self, queued: float, now: float) -> Timing:
        seconds = self._seconds
        waited = dict(self._waited)
        for on, count in self._waits.items():
            if count:
                waited[on] = waited.get(on, 0.0) + now - self._since[on]
        return Timing(
            queue=queued,
            setup=seconds.get("setup", 0.0),
            run=seconds.get("run", 0.0),
            score=seconds.get("score", 0.0),
            teardown=seconds.get("teardown", 0.0),
            model=waited.get("model", 0.0),
            sandbox=waited.get("sandbox", 0.0),
            paused=self._held,
        )


def usage_of(session: Session, ctx: Context) -> Usage:
    return Usage(
        session.turns,
        session.prompt_tokens,
        session.sampled_tokens,
        int(ctx.tool_calls),
        session.others,
        session.recorder.counts.drifted + session.promptless,
        session.without_tokens,
    )
