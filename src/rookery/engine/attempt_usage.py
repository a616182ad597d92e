"""Measure the times, waits and model calls of an attempt. Runs in the runner process.

- If several calls wait for the same resource (`tool` or `sandbox`) at the same time, that time counts once.
  `Session.busy_seconds` measures model calls in the same way.
- A wait that has not ended yet counts up to the current time.
- The time of a stage includes its pauses, which are also reported separately.
"""

from rookery.core import Stage, Timing, Usage
from rookery.environments import Context
from rookery.gateway import Session


class AttemptTimes:
    """Adds up the times of one attempt. The caller passes the current time."""

    def __init__(self) -> None:
        self._waiters: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._stages: dict[Stage, float] = {}
        self._paused = 0.0

    def count_wait(self, resource: str, step: int, now: float) -> None:
        """Count a call that starts (`step` is 1) or stops (-1) waiting for a resource: `tool` or `sandbox`."""
        count = self._waiters.get(resource, 0)
        if count == 0:
            self._since[resource] = now
        elif count + step == 0:
            self._waited[resource] = self._waited.get(resource, 0.0) + now - self._since[resource]
        self._waiters[resource] = count + step

    @property
    def is_waiting(self) -> bool:
        """True while the attempt waits for any resource."""
        return any(self._waiters.values())

    def end_stage(self, stage: Stage, seconds: float, paused: float) -> None:
        """Add a stage that took `seconds`, during which its clock was stopped for `paused` seconds."""
        self._stages[stage] = seconds
        self._paused += paused

    def build_timing(self, queued: float, now: float, model: float) -> Timing:
        """Return the attempt's times until `now`.

        The attempt waited `queued` seconds for a runner process, and `model` seconds for model calls.
        """
        stages = self._stages
        waited = dict(self._waited)
        for resource, count in self._waiters.items():
            if count:
                waited[resource] = waited.get(resource, 0.0) + now - self._since[resource]
        return Timing(
            queue=queued,
            setup=stages.get("setup", 0.0),
            run=stages.get("run", 0.0),
            score=stages.get("score", 0.0),
            teardown=stages.get("teardown", 0.0),
            model=model,
            sandbox=waited.get("sandbox", 0.0),
            paused=self._paused,
        )


def collect_usage(session: Session, ctx: Context) -> Usage:
    """Return the counts of the attempt's model and tool calls."""
    return Usage(
        session.turns,
        session.prompt_tokens,
        session.sampled_tokens,
        int(ctx.tool_calls),
        session.sampled_tokens_by_role,
        session.recorder.counts.drifted + session.promptless,
        session.without_tokens,
        session.prompt_tokens_by_role,
    )
